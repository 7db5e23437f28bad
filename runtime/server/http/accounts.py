"""Clients: the one whose request is being answered, and the requests and tokens that each may still use.

The buckets of a key are where its requests come in: in the only process, or in the front of a fleet. What a request
takes is known where it is answered, which tells it in a :class:`Bill`.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from llmc.errors import LlmcError
from llmc.runtime.api.handle import Handle
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.keys import Key

Clock = Callable[[], float]


class Bucket:
    """As much as a minute brings, filled evenly; what is spent beyond is owed."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.size = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    def spend(self, amount: int) -> None:
        """Take an amount out, whether it is there or not."""
        self._level = self.level - amount
        self._at = self._clock()

    @property
    def level(self) -> float:
        """The amount in it now; below 0, one that is owed."""
        return min(self.size, self._level + (self._clock() - self._at) * self.size / 60)

    def wait(self, amount: int) -> float:
        """Seconds until an amount is there; 0: it is."""
        return max(0.0, (amount - self.level) * 60 / self.size)

    def headers(self, what: str) -> dict[str, str]:
        return {
            f"x-ratelimit-limit-{what}": str(self.size),
            f"x-ratelimit-remaining-{what}": str(max(0, math.floor(self.level))),
            f"x-ratelimit-reset-{what}": f"{max(0.0, (self.size - self.level) * 60 / self.size):.3f}s",
        }


@dataclass(frozen=True)
class Account:
    """The buckets of one key."""

    requests: Bucket | None
    tokens: Bucket | None

    def admit(self) -> None:
        """Count a request. Raises ApiError: 429, with the time after which it would be admitted."""
        self._check("requests", self.requests, 1)
        self._check("tokens", self.tokens, 1)
        if self.requests is not None:
            self.requests.spend(1)

    def count(self, more: int) -> None:
        """Count requests that came with one that was admitted; more than a minute's where the bucket was full.
        Raises ApiError: as :meth:`admit`."""
        if self.requests is not None:
            self._check("requests", self.requests, min(more, self.requests.size - 1))
            self.requests.spend(more)

    def reserve(self, tokens: int) -> None:
        """Take out what a request may use at most; more than a minute's if any are left, and others wait meanwhile.
        Raises ApiError: as :meth:`admit`."""
        if self.tokens is not None:
            self._check("tokens", self.tokens, tokens if tokens <= self.tokens.size else 1, tokens)
            self.tokens.spend(tokens)

    def give_back(self, tokens: int) -> None:
        if self.tokens is not None:
            self.tokens.spend(-tokens)

    def _check(self, what: str, bucket: Bucket | None, amount: int, asked: int | None = None) -> None:
        if bucket is None or (wait := bucket.wait(amount)) <= 0:
            return
        left = "is used up" if asked is None else f"has no room for the {asked} of prompt and max_tokens"
        said = f"the rate of {bucket.size} {what} per minute {left}; try again in {math.ceil(wait)} s"
        raise ApiError(429, said, code="rate_limit_exceeded", retry_after_s=wait, headers=self.headers())

    def headers(self) -> dict[str, str]:
        named = (("requests", self.requests), ("tokens", self.tokens))
        return {k: v for what, bucket in named if bucket for k, v in bucket.headers(what).items()}


class Bill(NamedTuple):
    """The requests and tokens that a client took so far.

    Attributes:
        requests: beyond the one that was admitted.
        reserved: tokens that were used, and those that what still runs may use at most.
        used: tokens of prompts and outputs so far.
    """

    requests: int = 0
    reserved: int = 0
    used: int = 0


NOTHING = Bill()


class Tab:
    """An account's side of a client's bill."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._bill = NOTHING

    def take(self, bill: Bill) -> None:
        """Account for what the bill has beyond the one before. Raises ApiError: 429, there is no room for it."""
        requests, reserved, _ = self._bill
        if bill.requests > requests:
            self.account.count(bill.requests - requests)
        if bill.reserved > reserved:
            self.account.reserve(bill.reserved - reserved)
        else:
            self.account.give_back(reserved - bill.reserved)
        self._bill = bill._replace(requests=max(requests, bill.requests))

    def close(self) -> None:
        self.account.give_back(self._bill.reserved - self._bill.used)
        self._bill = self._bill._replace(reserved=self._bill.used)


@dataclass
class Client:
    """The sender of a request.

    Attributes:
        key: None where none is asked for.
        report: takes the bill whenever it grows, and refuses what is too much.
        account: its buckets; none at a replica, whose front has them.
    """

    key: Key | None
    report: Callable[[Bill], None]
    account: Account | None = None
    _handles: list[Handle] = field(default_factory=list)
    _spent: Bill = NOTHING  # beside what the handles say

    @property
    def bill(self) -> Bill:
        requests, reserved, used = self._spent
        for handle in self._handles:
            done, tokens = handle.done, cost(handle)
            reserved += tokens if done else handle.most_tokens
            used += tokens
        return Bill(requests, reserved, used)

    def charge(self, handle: Handle) -> None:
        """Reserve what a request to a model may use, until it has ended.
        Raises ApiError: 429; the request is cancelled."""
        self._handles.append(handle)
        try:
            self.report(self.bill)
        except ApiError:
            if not handle.done:
                self._handles.remove(handle)
            handle.cancel()
            raise

    def spend(self, *, requests: int = 0, tokens: int = 0) -> None:
        """Take what is used for certain. Raises ApiError: 429."""
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


CLIENT: ContextVar[Client | None] = ContextVar("llmc_client", default=None)


def cost(handle: Handle) -> int:
    """Tokens of the prompt and of all outputs; of a request that runs, was cancelled or failed, those so far."""
    if handle.done:
        with suppress(LlmcError):
            usage = handle.result(0).usage
            return usage.prompt_tokens + usage.completion_tokens
    return handle.prompt_tokens + handle.generated()


def allows_model(model: str) -> bool:
    """True if the present client's key is for a model."""
    client = CLIENT.get()
    return client is None or client.key is None or client.key.allows(model)


def lets_write_special() -> bool:
    """True unless the present client's key says that raw prompts spell no control tokens."""
    client = CLIENT.get()
    return client is None or client.key is None or client.key.raw_special


def key_name() -> str | None:
    """The name of the present client's key, None where none is asked for."""
    client = CLIENT.get()
    return client.key.name if client and client.key else None


def lowest_priority() -> int:
    """The lowest priority, which is the soonest turn, that the present client may ask for."""
    client = CLIENT.get()
    return client.key.lowest_priority if client and client.key else 0


def check_model(name: str) -> None:
    """Refuse a model that the present client's key is not for. Raises ApiError: 403, with the models that it is for."""
    client = CLIENT.get()
    if client and client.key and not allows_model(name):
        known = ", ".join(sorted(client.key.models or ()))
        message = f"the key {client.key.name!r} is not for the model {name!r}, expected {known}"
        raise ApiError(403, message, param="model", code="model_not_allowed")


def check_admin() -> None:
    """Refuse a client whose key is no admin's. Raises ApiError: 403."""
    client = CLIENT.get()
    if client and client.key and not client.key.admin:
        reason = f"the key {client.key.name!r} is no admin's; use one that has admin = true in the file of keys"
        raise ApiError(403, reason)


def spend(*, requests: int = 0, tokens: int = 0) -> None:
    """Take requests beyond the present client's one, and tokens, that are used for certain.
    Raises ApiError: 429, its rates have no room for them."""
    if client := CLIENT.get():
        client.spend(requests=requests, tokens=tokens)


def owe(tokens: int) -> None:
    """Take tokens that the present client has used elsewhere, whether its rate has room for them or not."""
    if (client := CLIENT.get()) and client.account and client.account.tokens:
        client.account.tokens.spend(tokens)


def charge(handle: Handle) -> None:
    """Reserve the tokens of a request to a model for the present client, until it has ended.
    Raises ApiError: 429, its rate has no room for them; the request is cancelled."""
    if client := CLIENT.get():
        client.charge(handle)
