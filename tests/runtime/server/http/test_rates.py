"""Rates: what a key may use in a minute, and what it is told of that."""

from collections.abc import Sequence
from typing import Any

import pytest
from doubles.asgi import Echo, ask

from llmc.errors import CancelledError
from llmc.runtime.api.results import Usage
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.call import Bill, Client, call_of
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.keys import Key
from llmc.runtime.server.http.rates import Account, Bucket, Rates, Tab


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class As:
    """Stand in for the middleware that finds the key."""

    def __init__(self, app: Rates) -> None:
        self.app = app
        self.key: Key | None = None

    async def __call__(self, scope, receive, send):
        call_of(scope).client.key = self.key
        await self.app(scope, receive, send)


class Asked:
    """A handle of a request: one that runs until it is ``done``, and may have failed by then."""

    def __init__(self, prompt: int, most: int, generated: int, *, done: bool = True, failed: bool = False) -> None:
        self.prompt_tokens, self.most_tokens, self.generated = prompt, prompt + most, lambda: generated
        self.usage = Usage(prompt, generated)
        self.done, self.failed, self.cancelled = done, failed, False

    def result(self, timeout: float) -> "Asked":
        if self.failed:
            raise CancelledError("its client is gone")
        return self

    def cancel(self) -> None:
        self.cancelled = True


class Asking(Echo):
    """An application that asks models for something, and then answers."""

    handles: Sequence[Any] = ()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.client = call_of(scope).client
        for handle in self.handles:
            self.client.charge(handle)
        await super().__call__(scope, receive, send)


def limited(clock: Clock, **settings: int) -> tuple[As, Asking]:
    echo = Asking()
    return As(Rates(echo, ServerConfig(**settings), clock)), echo


class TestBucket:
    def test_fills_evenly_and_never_over(self, clock):
        bucket = Bucket(60, clock)
        bucket.spend(60)
        assert bucket.wait(1) == 1 and bucket.level == 0
        clock.now += 0.5
        assert bucket.wait(1) == 0.5
        clock.now += 1e6
        assert bucket.level == 60

    def test_remembers_what_is_owed(self, clock):
        bucket = Bucket(60, clock)
        bucket.spend(120)
        assert bucket.level == -60 and bucket.wait(1) == 61
        assert bucket.headers("tokens")["x-ratelimit-remaining-tokens"] == "0"


class TestRequests:
    @pytest.mark.threat("key-rates")
    def test_beyond_the_rate_are_told_when_to_come_back(self, clock):
        app, _ = limited(clock, requests_per_minute=2)
        first, second = (ask(app, method="POST") for _ in range(2))
        assert first.status == 200 and first.headers["x-ratelimit-limit-requests"] == "2"
        assert [a.headers["x-ratelimit-remaining-requests"] for a in (first, second)] == ["1", "0"]
        third = ask(app, method="POST")
        assert third.status == 429 and third.headers["retry-after"] == "30"
        assert third.headers["x-ratelimit-reset-requests"] == "60.000s"
        assert third.json["error"]["type"] == "rate_limit_error"
        assert third.json["error"]["code"] == "rate_limit_exceeded"
        clock.now += 30
        assert ask(app, method="POST").status == 200

    @pytest.mark.threat("stored-responses")
    def test_that_only_read_are_free_but_for_what_is_stored(self, clock):
        app, _ = limited(clock, requests_per_minute=1)
        assert [ask(app).status for _ in range(3)] == [200] * 3
        assert [ask(app, "/v1/responses/resp_a").status for _ in range(2)] == [200, 429]

    def test_of_each_key_are_counted_for_themselves_by_its_own_rate(self, clock):
        app, _ = limited(clock, requests_per_minute=1)
        alice, bob = Key("alice", b""), Key("bob", b"", requests_per_minute=3)
        for key, most in ((alice, 1), (bob, 3)):
            app.key = key
            assert [ask(app, method="POST").status for _ in range(most + 1)] == [200] * most + [429]

    def test_of_a_key_whose_rate_was_changed_begin_anew(self, clock):
        app, _ = limited(clock)
        for rate in (1, 2):
            app.key = Key("alice", b"", requests_per_minute=rate)
            assert [ask(app, method="POST").status for _ in range(rate + 1)] == [200] * rate + [429]

    def test_without_a_rate_are_told_of_none(self, clock):
        app, _ = limited(clock)
        answer = ask(app, method="POST")
        assert answer.status == 200 and not any(name.startswith("x-ratelimit") for name in answer.headers)


class TestTokens:
    @pytest.mark.threat("key-rates")
    def test_that_are_used_up_are_waited_for(self, clock):
        app, echo = limited(clock, tokens_per_minute=600)
        echo.handles = [Asked(100, 300, 300), Asked(100, 100, 100)]
        assert ask(app, method="POST").headers["x-ratelimit-remaining-tokens"] == "0"
        answer = ask(app, method="POST")
        assert answer.status == 429 and answer.headers["retry-after"] == "1"
        assert "600 tokens per minute" in answer.json["error"]["message"]
        clock.now += 60
        assert ask(app, method="POST").status == 200

    def test_are_given_back_before_the_client_has_the_whole_answer(self, clock):
        app, echo = limited(clock, tokens_per_minute=600)
        echo.handles = [running := Asked(100, 300, 50, done=False)]
        left = []

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            async def note(message: Any) -> None:
                left.append(app.app.account(None).tokens.level)
                running.done = True
                await send(message)

            await app(scope, receive, note)

        ask(noting, method="POST")
        assert left == [200, 450]

    def test_of_texts_that_are_encoded_count_too(self, clock):
        app, echo = limited(clock, tokens_per_minute=600)
        ask(app)
        echo.client.spend(tokens=7)
        assert ask(app, method="POST").headers["x-ratelimit-remaining-tokens"] == "593"

    @pytest.mark.threat("key-rates")
    @pytest.mark.parametrize("done", [True, False])
    def test_of_who_leaves_are_the_prompts_and_those_so_far(self, clock, done):
        app, echo = limited(clock, tokens_per_minute=600)
        echo.handles = [Asked(10, 500, 5, done=done, failed=True)]
        ask(app, method="POST")
        assert app.app.account(None).tokens.level == 585

    def test_refusals_for_them_count_no_request(self, clock):
        account = Account(Bucket(5, clock), Bucket(5, clock))
        account.reserve(6)
        with pytest.raises(ApiError, match="tokens per minute"):
            account.admit()
        assert account.headers()["x-ratelimit-remaining-requests"] == "5"

    def test_that_others_hold_are_not_there(self, clock):
        account = Account(None, Bucket(100, clock))
        first, second = (Tab(account) for _ in range(2))
        first.take(Bill(reserved=9))
        first.take(Bill(reserved=110))  # more than there ever is, while some are left
        with pytest.raises(ApiError, match="100 tokens per minute has no room for the 20 of prompt and max_tokens"):
            second.take(Bill(reserved=20))
        first.take(Bill(reserved=110, used=60))
        first.close()
        second.take(Bill(reserved=20))
        assert account.tokens is not None and account.tokens.level == 20

    def test_that_are_too_many_cancel_the_request(self, clock):
        client = Client(None, Tab(Account(None, Bucket(100, clock))).take)
        client.charge(one := Asked(10, 70, 0, done=False))
        with pytest.raises(ApiError, match="has no room"):
            client.charge(other := Asked(10, 70, 0, done=False))
        assert (one.cancelled, other.cancelled, client.bill) == (False, True, Bill(0, 80, 10))


def test_requests_that_come_as_one_are_counted_once_however_often_they_are_told_of(clock):
    account = Account(Bucket(3, clock), None)
    account.admit()
    tab = Tab(account)
    for bill in (Bill(requests=9), Bill(), Bill(requests=9)):  # the second replica after one that was lost
        tab.take(bill)
    assert account.requests is not None and account.requests.level == 3 - 10


def test_a_refused_spending_keeps_the_tokens_of_requests_that_ended(clock):
    account = Account(Bucket(2, clock), Bucket(1000, clock))
    client = Client(None, Tab(account).take)
    client.charge(handle := Asked(10, 70, 5, done=False))
    handle.done = True
    account.count(2)
    with pytest.raises(ApiError, match="requests per minute"):
        client.spend(requests=1)
    assert client.bill == Bill(0, 15, 15)


def test_a_request_that_ends_while_it_is_refused_stays_on_the_bill(clock):
    handle = Asked(10, 70, 5, done=False)

    def refuse(bill: Bill) -> None:
        handle.done = True
        assert client.bill.used == 15  # as another task of this client's may ask meanwhile
        raise ApiError(429, "no room")

    client = Client(None, refuse)
    with pytest.raises(ApiError, match="no room"):
        client.charge(handle)
    assert client.bill == Bill(0, 15, 15)
