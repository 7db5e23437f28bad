"""The load test over HTTP: requests go out when they are due, nobody is waited for, and failures are figures."""

import json
import time
from typing import Any

import pytest
from doubles.planted_server import RESET, STREAM, Asked, event, planted_server, response, text, usage, whole

from llmc.errors import LlmcError, UsageError
from llmc.runtime.bench.serve_load import LoadSettings, open_loop, serve_load
from llmc.runtime.bench.serve_report import Exchange, figures

SMALL = {"prompt_length": "40", "max_tokens": "3", "requests": 4}


def load_on(url: str, key: str | None = None, **options: Any) -> dict[str, Any]:
    return serve_load(LoadSettings(url=url, **{**SMALL, **options}), key)


def played(*events: Any, due: float = 9.5) -> Exchange:
    """An exchange sent at 10 whose events came at 11, 12, and so on."""
    exchange = Exchange(due, 10.0)
    for moment, data in enumerate(events, 11):
        exchange.note(float(moment), data if isinstance(data, bytes) else json.dumps(data).encode())
    exchange.close(50.0)
    return exchange


# ---------------------------------------------------------------------------------------------------------- exchanges


def test_only_output_is_timed_and_the_servers_count_wins():
    exchange = played(text(""), text("a"), text("b"), text("", "stop"), usage(5, 4), b"[DONE]")
    assert (exchange.failure, exchange.chunks, exchange.tokens, exchange.prompt_tokens) == (None, [12.0, 13.0], 4, 5)
    assert exchange.latencies() == {
        "ttft": 2.0, "e2e": 3.0, "tpot": 1 / 3, "ttft_from_due": 2.5, "e2e_from_due": 3.5,
    }  # fmt: skip
    assert played(text("a"), text("b"), b"[DONE]").tokens == 2
    assert "tpot" not in played(text("a", "stop")).latencies()


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([b"{", text("a"), b"[DONE]"], "malformed chunk"),
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
    failure = played(*events).failure
    assert failure is not None and failure[0] == expected and len(failure[1]) <= 300


# ------------------------------------------------------------------------------------------------------------ figures


def test_figures_follow_from_the_moments_and_failures_count_against_the_server():
    answers = [played(text("a"), text("b"), b"[DONE]", due=9.0), played(text("a"), text("b"), b"[DONE]", due=10.0)]
    found = figures([*answers, played(b"{", due=10.0)], 0.1)
    assert (found["completed"], found["failed"], found["duration_s"], found["counted_by"]) == (2, 1, 41.0, "chunks")
    assert (found["ttft"]["mean"], found["ttft_from_due"]["mean"], found["itl"]["count"]) == (1.0, 1.5, 2)
    assert (found["output_tokens_per_s"], found["prompt_tokens"]) == (4 / 41, None)
    assert (found["errors"]["malformed chunk"]["count"], found["behind"]) == (1, True)


# -------------------------------------------------------------------------------------------------------------- tests


def test_at_a_rate_a_request_that_is_late_is_sent_at_once_and_keeps_its_due_time():
    sent: list[tuple[float, float]] = []

    def send(body: bytes, due: float) -> None:
        sent.append((due, time.perf_counter()))
        if len(sent) == 1:
            time.sleep(0.1)

    open_loop(LoadSettings(url="", requests=3), 1000.0, lambda number: b"", send)
    assert sent[2][0] < sent[1][1] and sent[2][1] - sent[1][1] < 0.05


def test_a_report_has_a_point_for_each_concurrency_and_the_servers_counts():
    with planted_server(whole) as server:
        report = load_on(server.url, concurrency=(1, 2), warm_up=1, ignore_eos=True, extra_body={"temperature": 0})
    assert (report["model"], report["arguments"]["requests"], report["server"]) == ("double", 4, server.url)
    assert [(each["concurrency"], each["completed"], each["counted_by"]) for each in report["points"]] == [
        (1, 4, "usage"),
        (2, 4, "usage"),
    ]
    point = report["points"][0]
    # Of 40 tokens: 26 words are 32, and 7 more.
    assert (point["prompt_tokens"]["mean"], point["output_tokens"]["mean"]) == (39.0, 3.0)
    assert len(server.asked) == 1 + 2 + 1 + 2 * 4  # models, two probes, the warm-up, the tests
    body = server.asked[-1].body
    assert (body["stream_options"], body["ignore_eos"], body["temperature"]) == ({"include_usage": True}, True, 0)
    assert server.connections <= 3, "connections are used again"


def test_every_way_to_fail_is_counted_and_none_is_raised():
    broken = {
        3: [response(429, {"error": {"message": "full"}})],
        4: [response(500, {})],
        5: [STREAM, event(text("a")), RESET],
        6: [STREAM, event(b"{"), RESET],
        7: [response(200, {"choices": []})],
        8: [b"no HTTP at all\r\n\r\n", RESET],
        9: [STREAM, b"no chunk\r\n", RESET],
    }
    numbers = iter(range(100))

    def answer(asked: Asked) -> list[bytes]:
        return broken.get(next(numbers), []) or whole(asked)

    with planted_server(answer) as server:
        point = load_on(server.url, model="m", warm_up=0, requests=9)["points"][0]
    assert {kind: each["count"] for kind, each in point["errors"].items()} == {
        "HTTP 429": 1, "HTTP 500": 1, "connection lost": 3, "malformed chunk": 1, "no event stream": 1,
    }  # fmt: skip
    assert (point["completed"], point["failed"]) == (2, 7)


def test_an_answer_that_does_not_end_in_time_is_a_failure():
    answers = iter([whole, whole, lambda asked: [STREAM, event(text("a"))]])
    with planted_server(lambda asked: next(answers)(asked)) as server:
        point = load_on(server.url, model="m", warm_up=0, requests=1, timeout=0.2)["points"][0]
    assert list(point["errors"]) == ["timeout"]


def test_a_server_that_cannot_be_tested_is_one_sentence():
    with planted_server(lambda asked: [response(401, {"error": {"message": "no key"}})]) as server:
        with pytest.raises(LlmcError, match=r"HTTP 401: .*no key"):
            load_on(server.url)
    with pytest.raises(LlmcError, match=r"/v1/models lists no model \(.*[Rr]efused.*check the URL"):
        load_on(server.url)


def test_at_a_rate_requests_come_by_it_and_the_key_is_sent():
    with planted_server(whole) as server:
        report = load_on(server.url, "sk-1", rate=(200.0, 500.0), duration=60.0)
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer sk-1"}
    assert [(point["rate"], point["completed"]) for point in report["points"]] == [(200.0, 4), (500.0, 4)]
    assert "sk-1" not in repr(report)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": (1.0,), "concurrency": (1,)}, "rate is 1.0 and concurrency is 1: give one"),
        ({"extra_body": {"stream": False}}, "extra_body has stream"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(options: dict[str, Any], said: str):
    with pytest.raises(UsageError, match=said):
        load_on("http://127.0.0.1:9", **options)


@pytest.mark.parametrize("url", ["nowhere", "ftp://a", "http://", "http://a:b", "http://a/\r\nx: y", "http://ä"])
def test_what_is_no_url_of_a_server_is_refused(url: str):
    with pytest.raises(UsageError, match="no URL"):
        load_on(url)


@pytest.mark.parametrize("key", ["", "a\r\nx: y", "ä"])
def test_a_key_that_no_header_can_hold_is_refused(key: str):
    with pytest.raises(UsageError, match="API key"):
        load_on("http://127.0.0.1:9", key)
