"""Rates: requests and tokens per minute that a key may use, counted by token buckets."""

import time
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.accounts import CLIENT, Account, Bucket, Client, Clock, Tab
from llmc.runtime.server.http.errors import ApiError, refuse
from llmc.runtime.server.http.keys import Key

STORED = "/v1/responses/"  # megabytes each, and read again and again


class Rates:
    """Refuse requests of a key beyond its rates; those that only read (GET) are free, but for what is stored.

    What stands behind finds the client in :data:`llmc.runtime.server.http.accounts.CLIENT`.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, clock: Clock = time.monotonic) -> None:
        self.app = app
        self._default = (config.requests_per_minute, config.tokens_per_minute)
        self._clock = clock
        self._accounts: dict[Any, Account] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        account = self.account(state["key"])
        is_counted = scope["method"] == "POST" or scope["path"].startswith(STORED)
        if is_counted:
            try:
                account.admit()
            except ApiError as error:
                return await refuse(scope, receive, send, error)
        tab = Tab(account)
        client = Client(state["key"], tab.take, account)
        CLIENT.set(client)  # of this request's task alone
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
