"""Clients: the one whose request is being answered, and the requests and tokens that each may still use."""

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from llmc.errors import LlmcError
from llmc.runtime.api.handle import Handle
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.guard.keys import Key

Clock = Callable[[], float]


class Bucket:
    """As much as a minute brings, filled evenly; what is spent beyond is owed.

    Args:
        per_minute: its size, and what flows in each minute.
        clock: seconds.
    """

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
        """The state of it, as OpenAI's API tells it."""
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
        """Count a request.

        Raises:
            ApiError: 429, with the time after which it would be admitted.
        """
        for what, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None and (wait := bucket.wait(1)) > 0:
                message = f"the rate of {bucket.size} {what} per minute is used up; try again in {math.ceil(wait)} s"
                raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait, headers=self.headers())
        if self.requests is not None:
            self.requests.spend(1)

    def spend(self, tokens: int) -> None:
        """Count the tokens of a request, prompt and outputs, once they are known."""
        if self.tokens is not None:
            self.tokens.spend(tokens)

    def headers(self) -> dict[str, str]:
        """The state of both, as OpenAI's API tells it."""
        named = (("requests", self.requests), ("tokens", self.tokens))
        return {k: v for what, bucket in named if bucket for k, v in bucket.headers(what).items()}


@dataclass(frozen=True)
class Client:
    """The sender of a request.

    Attributes:
        key: None where none is asked for.
        account: what it may use.
        handles: requests to models that were not paid for yet.
    """

    key: Key | None
    account: Account
    handles: list[Handle] = field(default_factory=list)

    def settle(self, *, running: bool) -> None:
        """Count the tokens of requests, once: of those that have ended, and with ``running`` of all, as they are."""
        due = [handle for handle in self.handles if running or handle.done]
        self.handles[:] = [handle for handle in self.handles if handle not in due]
        for handle in due:
            self.account.spend(cost(handle))


CLIENT: ContextVar[Client | None] = ContextVar("llmc_client", default=None)


def cost(handle: Handle) -> int:
    """Tokens of the prompt and of all outputs; of a request that was cancelled or failed, those of its prompt and those
    that were read."""
    try:
        usage = handle.result(0).usage
    except (LlmcError, TimeoutError):
        return handle.prompt_tokens + len(handle.token_ids)
    return usage.prompt_tokens + usage.completion_tokens


def allowed(model: str) -> bool:
    """True if the present client's key is for a model."""
    client = CLIENT.get()
    return client is None or client.key is None or client.key.allows(model)


def check_model(name: str) -> None:
    """Refuse a model that the present client's key is not for.

    Raises:
        ApiError: 403, with the models that it is for.
    """
    client = CLIENT.get()
    if client and client.key and not allowed(name):
        known = ", ".join(sorted(client.key.models or ()))
        message = f"the key {client.key.name!r} is not for the model {name!r}, expected {known}"
        raise ApiError(403, message, param="model", code="model_not_allowed")


def spend(tokens: int) -> None:
    """Count tokens for the present client."""
    if client := CLIENT.get():
        client.account.spend(tokens)


def charge(handle: Handle) -> None:
    """Count the tokens of a request to a model once it has ended, for the present client."""
    if client := CLIENT.get():
        client.handles.append(handle)
