"""Rates: what a key may use in a minute, and what it is told of that."""

from collections.abc import Sequence
from typing import Any

import pytest
from doubles.asgi import Echo, ask, converse

from llmc.errors import CancelledError
from llmc.runtime.api.results import Usage
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.guard.accounts import CLIENT, Account, Bucket, charge, check_model, spend
from llmc.runtime.server.guard.keys import Key
from llmc.runtime.server.guard.rates import Rates


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
        scope["state"]["key"] = self.key
        await self.app(scope, receive, send)


class Ended:
    """A handle of a request that came to its end."""

    def __init__(self, prompt: int, completion: int) -> None:
        self.usage = Usage(prompt, completion)

    def result(self, timeout: float) -> "Ended":
        return self


class Running(Ended):
    """A handle of a request that ends once somebody has found it running."""

    prompt_tokens, token_ids, seen = 100, (), False

    @property
    def done(self) -> bool:
        self.seen = True
        return False

    def result(self, timeout: float) -> "Ended":
        if not self.seen:
            raise TimeoutError
        return self


class Failed:
    """A handle of a request that was cancelled after so many tokens."""

    def __init__(self, prompt: int, read: int) -> None:
        self.prompt_tokens, self.token_ids = prompt, [7] * read

    def result(self, timeout: float) -> None:
        raise CancelledError("its client is gone")


class Asking(Echo):
    """An application that asks models for something, and then answers."""

    handles: Sequence[Any] = ()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        for handle in self.handles:
            charge(handle)
        self.client = CLIENT.get()
        await super().__call__(scope, receive, send)


def limited(clock: Clock, **settings: int) -> tuple[As, Asking]:
    echo = Asking()
    return As(Rates(echo, ServerConfig(**settings), clock)), echo


class TestBucket:
    def test_fills_evenly_and_never_over(self, clock: Clock):
        bucket = Bucket(60, clock)
        bucket.spend(60)
        assert bucket.wait(1) == 1 and bucket.level == 0
        clock.now += 0.5
        assert bucket.wait(1) == 0.5
        clock.now += 1e6
        assert bucket.level == 60

    def test_remembers_what_is_owed(self, clock: Clock):
        bucket = Bucket(60, clock)
        bucket.spend(120)
        assert bucket.level == -60 and bucket.wait(1) == 61
        assert bucket.headers("tokens")["x-ratelimit-remaining-tokens"] == "0"


class TestRequests:
    def test_beyond_the_rate_are_told_when_to_come_back(self, clock: Clock):
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

    def test_that_only_read_are_free_but_for_what_is_stored(self, clock: Clock):
        app, _ = limited(clock, requests_per_minute=1)
        assert [ask(app).status for _ in range(3)] == [200] * 3
        assert [ask(app, "/v1/responses/resp_a").status for _ in range(2)] == [200, 429]

    def test_of_each_key_are_counted_for_themselves_by_its_own_rate(self, clock: Clock):
        app, _ = limited(clock, requests_per_minute=1)
        alice, bob = Key("alice", b""), Key("bob", b"", requests_per_minute=3)
        for key, most in ((alice, 1), (bob, 3)):
            app.key = key
            assert [ask(app, method="POST").status for _ in range(most + 1)] == [200] * most + [429]

    def test_of_a_key_whose_rate_was_changed_begin_anew(self, clock: Clock):
        app, _ = limited(clock)
        for rate in (1, 2):
            app.key = Key("alice", b"", requests_per_minute=rate)
            assert [ask(app, method="POST").status for _ in range(rate + 1)] == [200] * rate + [429]

    def test_without_a_rate_are_told_of_none(self, clock: Clock):
        app, _ = limited(clock)
        answer = ask(app, method="POST")
        assert answer.status == 200 and not any(name.startswith("x-ratelimit") for name in answer.headers)


class TestTokens:
    def test_that_were_spent_beyond_the_rate_are_waited_for(self, clock: Clock):
        app, echo = limited(clock, tokens_per_minute=600)
        echo.handles = [Ended(100, 300), Ended(100, 200)]
        assert ask(app, method="POST").status == 200
        answer = ask(app, method="POST")
        assert answer.status == 429 and answer.headers["retry-after"] == "11"
        assert "600 tokens per minute" in answer.json["error"]["message"]
        clock.now += 11
        assert ask(app, method="POST").status == 200

    def test_are_counted_before_the_client_has_the_whole_answer(self, clock: Clock):
        app, echo = limited(clock, tokens_per_minute=600)
        echo.handles = [Ended(100, 300)]
        left = []

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            async def note(message: Any) -> None:
                left.append(echo.client.account.tokens.level)
                await send(message)

            await app(scope, receive, note)

        ask(noting, method="POST")
        assert left == [600, 200]

    def test_of_texts_that_are_encoded_count_too(self, clock: Clock):
        app, echo = limited(clock, tokens_per_minute=600)
        ask(app)
        assert echo.client is not None
        CLIENT.set(echo.client)
        spend(7)
        CLIENT.set(None)
        spend(7)
        assert ask(app, method="POST").headers["x-ratelimit-remaining-tokens"] == "593"

    def test_of_cancelled_requests_are_the_prompts_and_those_that_were_read(self, clock: Clock):
        app, echo = limited(clock, tokens_per_minute=600)
        echo.handles = [Failed(10, 5)]
        ask(app, method="POST")
        assert ask(app, method="POST").headers["x-ratelimit-remaining-tokens"] == "585"

    def test_refusals_for_them_count_no_request(self, clock: Clock):
        account = Account(Bucket(5, clock), Bucket(5, clock))
        account.spend(6)
        with pytest.raises(Exception, match="tokens per minute"):
            account.admit()
        assert account.headers()["x-ratelimit-remaining-requests"] == "5"


def test_each_message_of_a_socket_is_a_request(clock: Clock):
    app, _ = limited(clock, requests_per_minute=2)
    answer = converse(app, ["a", "b", "c"])
    texts = [message["text"] for message in answer.messages if message["type"] == "websocket.send"]
    assert texts[:2] == ["a", "b"] and "2 requests per minute" in texts[2]


def test_a_message_amid_an_answer_spares_none_of_its_tokens(clock: Clock):
    app, echo = limited(clock, tokens_per_minute=600)
    echo.handles = [Running(100, 300)]
    converse(app, ["a"])
    assert echo.client.account.tokens.level == 200


def test_a_key_is_for_its_models_alone(clock: Clock):
    app, echo = limited(clock)
    app.key = Key("alice", b"", frozenset({"tiny", "small"}))
    ask(app)
    CLIENT.set(echo.client)
    check_model("tiny")
    with pytest.raises(ApiError, match="the key 'alice' is not for the model 'large', expected small, tiny") as refusal:
        check_model("large")
    assert refusal.value.status == 403
    CLIENT.set(None)
    check_model("large")
