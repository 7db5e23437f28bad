"""Work whose size follows from a request's body: off the event loop where that is large, for everybody waits there."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

T = TypeVar("T")
LARGE = 64 << 10  # bytes of a body; what is smaller takes a few milliseconds
# Characters and items of what is made on the event loop whatever the body is, which takes a millisecond at most.
SHORT = 2048
# One thread: Python runs one at a time, and with more of them the event loop would wait for its turn longer.
THREADS = 1
_IS_LARGE: ContextVar[bool] = ContextVar("llmc_large", default=False)
_THREADS: RunVar[CapacityLimiter] = RunVar("llmc_aside")


def mark(size: int) -> None:
    """Say how large the body is of the request that this task answers."""
    _IS_LARGE.set(size > LARGE)


async def aside(work: Callable[[], T]) -> T:
    """The result of what the present request's body asks for, which follows from its size: at once where that is small,
    else from the thread of large ones."""
    return await apart(work) if _IS_LARGE.get() else work()


async def apart(work: Callable[[], T]) -> T:
    """The result of what is large whatever the body is, from the thread of such work."""
    try:
        limiter = _THREADS.get()
    except LookupError:
        _THREADS.set(limiter := CapacityLimiter(THREADS))
    return await to_thread.run_sync(work, limiter=limiter)


def room_beside(value: Any, room: int) -> int:
    """``room`` less the characters and items that JSON's values in ``value`` have; negative where it is not enough."""
    if isinstance(value, str):
        return room - len(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return room - 1
    room -= len(value)
    for one in value:
        if room < 0:
            break
        room = room_beside(one, room)
    return room
