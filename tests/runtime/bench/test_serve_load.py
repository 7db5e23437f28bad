"""The load test over HTTP: requests go out when they are due, nobody is waited for, and failures are figures."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from doubles.planted_server import RESET, STREAM, Asked, event, planted_server, response, text, whole

from llmc.errors import LlmcError, UsageError
from llmc.runtime.bench.exchange import Exchange
from llmc.runtime.bench.serve_load import (
    LoadSettings,
    Tally,
    closed_loop,
    open_loop,
    serve_load,
    within,
)
from llmc.runtime.bench.serve_report import ServeReport

SMALL = {"prompt_length": "40", "max_tokens": "3", "requests": 4}


def load_on(url: str, **options: Any) -> ServeReport:
    return serve_load(LoadSettings(url=url, **{**SMALL, **options}))[0]


# -------------------------------------------------------------------------------------------------------------- loops


def test_at_a_rate_nobody_is_waited_for_and_a_late_request_keeps_its_due_time():
    """The loop is held up before the second; the third is due meanwhile, and is sent at once."""
    sent: list[Exchange] = []

    async def request(content: bytes, exchange: Exchange) -> None:
        exchange.sent = time.perf_counter()
        sent.append(exchange)
        if content == b"0":
            time.sleep(0.05)
        await asyncio.sleep(0.2)  # an answer that takes longer than all arrivals

    asyncio.run(open_loop(request, lambda number: b"%d" % number, [0.0, 0.01, 0.02]))
    assert [round(each.due - sent[0].due, 6) for each in sent] == [0.0, 0.01, 0.02]
    assert all(each.late >= 0 for each in sent) and sent[2].late >= 0.02
    assert sent[2].sent - sent[0].sent < 0.2


def test_clients_of_a_closed_loop_send_when_they_have_their_answer():
    running, most, numbers = 0, 0, []

    async def request(content: bytes, exchange: Exchange) -> None:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        numbers.append(content)
        await asyncio.sleep(0)
        running -= 1

    settings = LoadSettings(url="", requests=7)
    asyncio.run(closed_loop(request, lambda number: b"%d" % number, 3, settings))
    assert (most, sorted(numbers)) == (3, [b"%d" % number for number in range(7)])


def test_a_test_ends_by_number_or_by_time_whichever_is_first():
    offsets = [0.0, 1.0, 2.0, 3.0]
    for options, expected in (({"requests": 3}, 3), ({"duration": 1.5}, 2), ({"requests": 1, "duration": 9.0}, 1)):
        assert list(within(offsets, LoadSettings(url="", **options))) == offsets[:expected], options


def test_progress_counts_and_tells_how_far_it_is():
    tally, settings = Tally(), LoadSettings(url="", requests=4, duration=10.0)
    for chunks in ([1.0, 2.0], []):
        exchange = Exchange(0.0, chunks=chunks)
        with tally.counting(exchange):
            if not chunks:
                exchange.fail("timeout", "")
    assert tally.words(2.0) == "2 answered, 0 in flight, 1 failed, 1 tok/s"
    assert (tally.fraction(settings, 1.0), tally.fraction(settings, 9.0)) == (0.5, 0.9)


# ------------------------------------------------------------------------------------------------------ with a server


def test_a_report_has_a_point_for_each_concurrency_and_the_servers_counts():
    with planted_server(whole) as server:
        report = load_on(server.url, concurrency=(1, 2), warm_up=1)
    assert (report.model, report.arguments["requests"], report.server) == ("double", 4, server.url)
    assert [(each.concurrency, each.completed, each.counted_by) for each in report.points] == [
        (1, 4, "usage"),
        (2, 4, "usage"),
    ]
    point = report.points[0]
    assert point.prompt_tokens is not None and point.output_tokens is not None
    assert (point.prompt_tokens.mean, point.output_tokens.mean) == (39.0, 3.0)  # of 40: 26 words are 32, and 7 more
    assert len(server.asked) == 1 + 2 + 1 + 2 * 4  # models, two probes, the warm-up, the tests
    assert server.asked[-1].body["stream_options"] == {"include_usage": True}


def test_bodies_have_what_was_asked_for_and_nothing_else():
    with planted_server(whole) as server:
        options = {"extra_body": {"temperature": 0}, "ignore_eos": True, "usage": False, "model": "m", "warm_up": 0}
        report = load_on(server.url, api="completions", requests=1, **options)
    [asked] = server.asked
    assert asked.line == "POST /v1/completions HTTP/1.1"
    assert set(asked.body) == {"model", "stream", "max_tokens", "prompt", "ignore_eos", "temperature"}
    assert (asked.body["model"], asked.body["max_tokens"], len(asked.body["prompt"].split())) == ("m", 3, 40)
    assert report.points[0].completed == 1


def test_every_way_to_fail_is_counted_and_none_is_raised():
    broken = {
        1: [response(429, {"error": {"message": "full"}})],
        2: [response(500, {})],
        3: [STREAM, event(text("a")), RESET],
        4: [STREAM, event(b"{"), RESET],
        5: [response(200, {"choices": []})],
    }
    numbers = iter(range(100))

    def answer(asked: Asked) -> list[bytes]:
        return broken.get(next(numbers), []) or whole(asked)

    with planted_server(answer) as server:
        report = load_on(server.url, model="m", usage=False, warm_up=0, requests=7, slo="ttft=60")
    point = report.points[0]
    assert {kind: each.count for kind, each in point.errors.items()} == {
        "HTTP 429": 1, "HTTP 500": 1, "connection lost": 1, "malformed chunk": 1, "no event stream": 1,
    }  # fmt: skip
    assert (point.completed, point.failed) == (2, 5)
    assert point.goodput is not None and point.goodput.share == pytest.approx(2 / 7)


def test_a_server_that_is_not_there_is_one_sentence():
    with planted_server(whole) as server:
        url = server.url
    with pytest.raises(LlmcError, match=r"/v1/models lists no model \(.*[Cc]onnect.*check the URL"):
        load_on(url)


def test_a_server_that_refuses_the_warm_up_is_one_sentence():
    with planted_server(lambda asked: [response(401, {"error": {"message": "no key"}})]) as server:
        with pytest.raises(LlmcError, match=r"HTTP 401: .*no key"):
            load_on(server.url)


def test_at_a_rate_requests_come_by_it_and_the_key_is_sent():
    with planted_server(whole) as server:
        settings = LoadSettings(url=server.url, rate=(500.0,), even=True, shared_prefix=0.5, **SMALL)
        report, timelines = serve_load(settings, "sk-1")
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer sk-1"}
    assert report.points[0].arrived_rate == pytest.approx(500.0)
    assert [len(exchanges) for exchanges in timelines] == [4]
    assert "sk-1" not in repr(report)


def test_a_file_of_messages_is_not_for_completions(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('[{"role": "user", "content": "a"}]', encoding="utf-8")
    with planted_server(whole) as server:
        assert load_on(server.url, prompts=path).points[0].completed == 4
        with pytest.raises(UsageError, match="messages, which are for chat"):
            load_on(server.url, prompts=path, api="completions")
    assert server.asked[-2].body["messages"] == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": (1.0,), "concurrency": (1,)}, "rate is 1.0 and concurrency is 1: give one"),
        ({"even": True}, "give rate too"),
        ({"rate": (0.0,)}, "rate is 0.0, expected from"),
        ({"rate": (float("nan"),)}, "rate is nan"),
        ({"concurrency": (0,)}, "concurrency is 0"),
        ({"requests": 0}, "requests is 0"),
        ({"duration": -1.0}, "duration is -1.0"),
        ({"shared_prefix": 1.5}, "shared_prefix is 1.5"),
        ({"timeout": 0.0}, "timeout is 0.0"),
        ({"extra_body": {"stream": False}}, "extra_body has stream"),
        ({"max_tokens": "none"}, "max_tokens is 'none'"),
        ({"slo": "fast"}, "slo is 'fast'"),
        ({"url": "nowhere"}, "is no URL"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(options: dict[str, Any], said: str):
    with pytest.raises(UsageError, match=said):
        serve_load(LoadSettings(**{"url": "http://127.0.0.1:9", **options}))


def test_progress_is_told_while_it_runs():
    said: list[tuple[str, float | None]] = []
    callback: Callable[[str, float | None], None] = lambda step, fraction: said.append((step, fraction))  # noqa: E731
    with planted_server(whole) as server:
        serve_load(LoadSettings(url=server.url, **SMALL), progress=callback)
    assert said[0] == ("warm-up 1 of 2", None)
    assert any(step.startswith("concurrency 1: ") for step, _ in said)
