"""Work that is too long for the event loop, where every client waits for it."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

T = TypeVar("T")
LARGE = 64 << 10  # bytes of a body; smaller ones take a few milliseconds
# Characters and items of what is made on the event loop whatever the body is, which takes a millisecond at most.
SHORT = 2048
# One thread: Python runs one at a time, and with more of them the event loop would wait for its turn longer.
THREADS = 1
_THREADS: RunVar[CapacityLimiter] = RunVar("llmc_aside")


async def apart(work: Callable[[], T]) -> T:
    """Run long work in the thread for it."""
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
