"""Rates: requests and tokens per minute that a key may use, counted by token buckets.

The buckets of a key are where its requests come in: in the only process, or in the front of a fleet. The process that
answers knows what a request takes, and reports it as a :class:`Bill`.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.call import NOTHING, Bill, Client, call_of
from llmc.runtime.server.http.errors import ApiError, refuse
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

    def owe(self, tokens: int) -> None:
        """Take out tokens that were used, whether they are there or not."""
        if self.tokens is not None:
            self.tokens.spend(tokens)

    def _check(self, what: str, bucket: Bucket | None, amount: int, asked: int | None = None) -> None:
        if bucket is None or (wait := bucket.wait(amount)) <= 0:
            return
        left = "is used up" if asked is None else f"has no room for the {asked} of prompt and max_tokens"
        said = f"the rate of {bucket.size} {what} per minute {left}; try again in {math.ceil(wait)} s"
        raise ApiError(429, said, code="rate_limit_exceeded", retry_after_s=wait, headers=self.headers())

    def headers(self) -> dict[str, str]:
        named = (("requests", self.requests), ("tokens", self.tokens))
        return {k: v for what, bucket in named if bucket for k, v in bucket.headers(what).items()}


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
            self.account.owe(bill.reserved - reserved)
        self._bill = bill._replace(requests=max(requests, bill.requests))

    def close(self) -> None:
        self.account.owe(self._bill.used - self._bill.reserved)
        self._bill = self._bill._replace(reserved=self._bill.used)


STORED = "/v1/responses/"  # megabytes each, and read again and again


class Rates:
    """Refuse requests of a key beyond its rates; those that only read (GET) are free, but for what is stored."""

    def __init__(self, app: ASGIApp, config: ServerConfig, clock: Clock = time.monotonic) -> None:
        self.app = app
        self._default = (config.requests_per_minute, config.tokens_per_minute)
        self._clock = clock
        self._accounts: dict[Any, Account] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = call_of(scope).client
        account = self.account(client.key)
        is_counted = scope["method"] == "POST" or scope["path"].startswith(STORED)
        if is_counted:
            try:
                account.admit()
            except ApiError as error:
                return await refuse(scope, receive, send, error)
        tab = Tab(account)
        client.report, client.owe = tab.take, account.owe
        try:
            return await self.app(scope, receive, _tell_rates(client, tab, send) if is_counted else send)
        finally:
            tab.take(client.bill)
            tab.close()

    def account(self, key: Key | None) -> Account:
        """The buckets of a key, new ones where its rates have changed; without keys, those of everybody."""
        name, requests, tokens = (key.name, key.requests_per_minute, key.tokens_per_minute) if key else ("", None, None)
        rates = (requests or self._default[0], tokens or self._default[1])
        if (name, rates) not in self._accounts:
            buckets = [None if rate is None else Bucket(rate, self._clock) for rate in rates]
            self._accounts = {k: v for k, v in self._accounts.items() if k[0] != name}
            self._accounts[name, rates] = Account(*buckets)
        return self._accounts[name, rates]


def _tell_rates(client: Client, tab: Tab, send: Send) -> Send:
    """``send`` that adds the state of the rates to an answer's headers, and counts its tokens before its end."""
    account = tab.account
    if account.requests is None and account.tokens is None:
        return send

    async def sending(message: Message) -> None:
        is_start = message["type"] == "http.response.start"
        if is_start or not message.get("more_body", False):
            tab.take(client.bill)  # the client may send the next request as soon as it has the last piece
        if is_start:
            MutableHeaders(scope=message).update(account.headers())
        await send(message)

    return sending
