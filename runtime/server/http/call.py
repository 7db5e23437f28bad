"""The call: what guards and routes know of one request, and work that is too long for the event loop."""

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from fastapi import Depends, Request

from llmc.errors import LlmcError
from llmc.runtime.api.handle import Handle
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.keys import Key

T = TypeVar("T")
LARGE = 64 << 10  # bytes of a body; smaller ones take a few milliseconds
# Characters and items of what is made on the event loop whatever the body is, which takes a millisecond at most.
SHORT = 2048
# One thread: Python runs one at a time, and with more of them the event loop would wait for its turn longer.
THREADS = 1
_THREADS: RunVar[CapacityLimiter] = RunVar("llmc_aside")
MOST_IGNORED = 32  # names in a header; a client may send thousands


class Bill(NamedTuple):
    """The requests and tokens that a client took so far."""

    requests: int = 0  # beyond the one that was admitted
    reserved: int = 0  # tokens that were used, and the most that running requests may use
    used: int = 0  # tokens of prompts and outputs so far


NOTHING = Bill()


def take_any(_: Any) -> None:
    """Refuse nothing."""


@dataclass(eq=False)
class Client:
    """The sender of a request."""

    key: Key | None = None  # None where the service asks for none
    # takes the bill whenever it grows. Raises ApiError: 429, the key's rate has no room.
    report: Callable[[Bill], None] = take_any
    # takes tokens that were used elsewhere, whether the key's rate has room or not
    owe: Callable[[int], None] = take_any
    handles: list[Handle] = field(default_factory=list)  # requests that were submitted to models
    _spent: Bill = NOTHING  # beside the handles

    @property
    def name(self) -> str | None:
        """The key's name; None where the service asks for none."""
        return self.key.name if self.key else None

    @property
    def bill(self) -> Bill:
        requests, reserved, used = self._spent
        for handle in self.handles:
            done, tokens = handle.done, cost(handle)
            reserved += tokens if done else handle.most_tokens
            used += tokens
        return Bill(requests, reserved, used)

    def charge(self, handle: Handle) -> None:
        """Reserve the tokens that a request may use, until it ends.
        Raises ApiError: 429, the rate has no room for them; the request is cancelled."""
        self.handles.append(handle)
        try:
            self.report(self.bill)
        except ApiError:
            if not handle.done:
                self.handles.remove(handle)
            handle.cancel()
            raise

    def spend(self, *, requests: int = 0, tokens: int = 0) -> None:
        """Take requests beyond the admitted one, and tokens, that are used for certain. Raises ApiError: 429."""
        before = self._spent
        self._spent = Bill(before.requests + requests, before.reserved + tokens, before.used + tokens)
        try:
            self.report(self.bill)
        except ApiError:
            self._spent = before
            raise

    def take(self, bill: Bill) -> None:
        """Take over the bill of the replica that answers. Raises ApiError: 429."""
        self.report(bill)
        self._spent = bill

    def allows(self, model: str) -> bool:
        """True if the key is for this model."""
        return self.key is None or self.key.allows(model)

    def check_model(self, model: str) -> None:
        """Raises ApiError: 403, the key is not for this model; the error lists its models."""
        if self.key and not self.key.allows(model):
            known = ", ".join(sorted(self.key.models or ()))
            message = f"the key {self.key.name!r} is not for the model {model!r}, expected {known}"
            raise ApiError(403, message, param="model", code="model_not_allowed")

    def check_admin(self) -> None:
        """Raises ApiError: 403, there are keys, and this one is not an admin's."""
        if self.key and not self.key.admin:
            advice = "use one that has admin = true in the file of keys"
            raise ApiError(403, f"the key {self.key.name!r} is no admin's; {advice}")


def cost(handle: Handle) -> int:
    """Tokens of the prompt and of all outputs; so far, if the request runs, was cancelled or failed."""
    if handle.done:
        with suppress(LlmcError):
            usage = handle.result(0).usage
            return usage.prompt_tokens + usage.completion_tokens
    return handle.prompt_tokens + handle.generated()


@dataclass(eq=False)
class Call:
    """One request of HTTP."""

    client: Client = field(default_factory=Client)  # its sender
    has_admin: bool = False  # some key is an admin's
    size: int = 0  # bytes of its body
    # names of parameters that were accepted though they cannot change the answer
    ignored: dict[str, None] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)  # of its line in the log; those that are None are not written

    def note(self, **fields: Any) -> None:
        """Write these fields in the request's line of the log."""
        self.fields.update(fields)

    def ignore(self, name: str) -> None:
        """Accept a parameter without honouring it, and name it in the header ``x-llmc-ignored``.

        Only for what cannot change this answer; everything else is honoured or refused. Characters that a header
        cannot hold are left out of ``name``.
        """
        if len(self.ignored) < MOST_IGNORED and (clean := "".join(filter(_fits, name[:128]))):
            self.ignored[clean] = None

    def rename_ignored(self, names: Mapping[str, str]) -> None:
        """Call the ignored parameters by the dialect's own ``names``."""
        self.ignored = {names.get(name, name): None for name in self.ignored}

    async def aside(self, work: Callable[[], T]) -> T:
        """Run work whose size follows from the body's: inline for small bodies, else in the thread of large ones."""
        return await apart(work) if self.size > LARGE else work()


def _fits(character: str) -> bool:
    return character.isascii() and character.isprintable() and character != ","


def call_of(scope: MutableMapping[str, Any]) -> Call:
    """The call of a request; the outermost guard is the first to ask for it, which makes it."""
    state = scope.setdefault("state", {})
    if "call" not in state:
        state["call"] = Call()
    call: Call = state["call"]
    return call


async def _call_of_route(request: Request) -> Call:  # async: FastAPI would use a thread
    return call_of(request.scope)


Called = Annotated[Call, Depends(_call_of_route)]


# ------------------------------------------------------------------------------------------- beside the event loop


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
