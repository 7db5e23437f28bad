"""An exchange keeps the moments of what is output, and says in one kind why an answer is none."""

import json
from typing import Any

import pytest
from doubles.planted_server import text, usage

from llmc.runtime.bench.exchange import Exchange
from llmc.runtime.bench.wire import Failure, Reply

STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def played(*events: Any, reply: Reply | None = None) -> Exchange:
    """An exchange sent at 10 whose events came at 11, 12, and so on."""
    exchange = Exchange(9.5, 10.0)
    for moment, event in enumerate(events, 11):
        exchange.note(float(moment), event if isinstance(event, bytes) else json.dumps(event).encode())
    exchange.close(50.0, reply or Reply(200, dict(STREAM)))
    return exchange


def kind(exchange: Exchange) -> str | None:
    return None if exchange.failure is None else exchange.failure.kind


def test_only_output_is_timed_and_the_servers_count_wins():
    exchange = played(text(""), text("a"), text("b"), text("", "stop"), usage(5, 4), b"[DONE]")
    assert (exchange.failure, exchange.chunks) == (None, [12.0, 13.0])
    assert (exchange.tokens, exchange.prompt_tokens) == (4, 5)
    assert (exchange.ttft, exchange.e2e, exchange.tpot, exchange.late) == (2.0, 3.0, 1 / 3, 0.5)


def test_without_a_count_pieces_are_tokens_and_one_of_them_has_no_tpot():
    assert played(text("a"), text("b"), b"[DONE]").tokens == 2
    assert played(text("a", "stop")).tpot is None


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "a"},
        {"delta": {"reasoning_content": "a"}},
        {"delta": {"reasoning": "a"}},
        {"delta": {"tool_calls": [{"index": 0}]}},
        {"delta": {"refusal": "no"}},
    ],
)
def test_text_reasoning_and_tool_calls_are_output(choice: dict[str, Any]):
    assert played({"choices": [choice]}, b"[DONE]").chunks == [11.0]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([b"{", text("a"), b"[DONE]"], "malformed chunk"),
        ([b"[1]", b"[DONE]"], "malformed chunk"),
        ([{"choices": ["x"]}], "malformed chunk"),
        ([{"choices": 3}], "malformed chunk"),
        ([b"\xff"], "malformed chunk"),
        ([b"[" * 100_000], "malformed chunk"),
        ([text("a"), {"error": {"message": "out of memory"}}], "error in the stream"),
        ([text("a")], "cut short"),
        ([text("", "stop"), b"[DONE]"], "no output"),
    ],
)
def test_a_stream_that_is_no_answer_is_a_failure_of_its_kind(events: list[Any], expected: str):
    assert kind(played(*events)) == expected


def test_replies_that_are_no_streams_are_failures_of_their_kinds():
    assert kind(played(reply=Reply(429, {}, bytearray(b"full")))) == "HTTP 429"
    assert kind(played(reply=Reply(200, {"content-type": "application/json"}))) == "no event stream"
    assert kind(played(text("a"), reply=Reply(200, {}, failure=Failure("timeout", "")))) == "timeout"


def test_the_first_failure_is_the_one_that_counts_and_is_one_short_line():
    exchange = played(b"x" * 1000 + b"\n", reply=Reply(0, failure=Failure("connection lost", "")))
    assert exchange.failure is not None
    assert (exchange.failure.kind, len(exchange.failure.message)) == ("malformed chunk", 300)
