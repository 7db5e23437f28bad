"""Figures of a load test, on recorded timelines: each is the arithmetic that it is said to be."""

import dataclasses

import pytest

from llmc.errors import UsageError
from llmc.runtime.bench.exchange import Exchange
from llmc.runtime.bench.serve_report import BEHIND_S, BUSY, Point, distribution, point, read_slo
from llmc.runtime.bench.wire import Failure


def answered(due: float, *chunks: float, late: float = 0.0, tokens: int | None = None, prompt: int | None = 10):
    ended = chunks[-1] + 0.5
    return Exchange(due, due + late, list(chunks), ended, prompt, tokens or len(chunks), True)


def failed(due: float, ended: float, kind: str, message: str = "") -> Exchange:
    return Exchange(due, due, [], ended, failure=Failure(kind, message))


def at_rate(*exchanges: Exchange, cpu: float = 0.1, **slo: float) -> Point:
    return point(exchanges, rate=1.0, concurrency=None, client_cpu=cpu, slo=slo)


def means(found: Point) -> dict[str, float]:
    names = ("ttft", "tpot", "itl", "e2e", "ttft_from_due", "e2e_from_due", "client_delay")
    return {name: getattr(found, name).mean for name in names}


def test_latencies_count_from_sending_and_from_when_a_request_was_due():
    found = at_rate(answered(100.0, 103.0, 104.0, 106.0, late=2.0))
    expected = {"ttft": 1.0, "tpot": 1.5, "itl": 1.5, "e2e": 4.0, "ttft_from_due": 3.0, "e2e_from_due": 6.0}
    assert means(found) == {**expected, "client_delay": 2.0}


def test_tpot_divides_by_tokens_and_itl_by_pieces():
    """Six tokens in three pieces: two gaps of 2.5 s are five tokens of 1 s."""
    found = at_rate(answered(0.0, 1.0, 3.5, 6.0, tokens=6))
    assert found.tpot is not None and found.itl is not None
    assert (found.tpot.mean, found.itl.mean, found.itl.count) == (1.0, 2.5, 2)


def test_rates_are_of_completed_requests_over_the_time_to_the_last_end():
    found = at_rate(answered(0.0, 1.0, 2.0), answered(2.0, 3.0, 7.5), failed(4.0, 8.0, "HTTP 500"))
    assert (found.requests, found.completed, found.failed, found.duration_s) == (3, 2, 1, 8.0)
    assert (found.requests_per_s, found.output_tokens_per_s, found.total_tokens_per_s) == (0.25, 0.5, 3.0)
    assert (found.arrived_rate, found.most_in_flight, found.counted_by) == (0.5, 2, "usage")


def test_an_end_and_a_beginning_at_one_moment_are_not_two_at_once():
    loop = [answered(0.0, 1.0), answered(1.5, 2.0)]
    found = point(loop, rate=None, concurrency=1, client_cpu=0.0, slo={})
    assert (found.most_in_flight, found.arrived_rate) == (1, None)


def test_errors_are_counted_by_kind_with_what_the_first_said():
    refused = [failed(0.0, 1.0, "HTTP 429", "full"), failed(0.0, 1.0, "HTTP 429", "still full")]
    found = at_rate(failed(0.0, 1.0, "timeout", "gone"), *refused)
    assert list(found.errors) == ["HTTP 429", "timeout"]
    assert (found.errors["HTTP 429"].count, found.errors["HTTP 429"].first) == (2, "full")


def test_where_nothing_was_completed_there_are_no_latencies():
    found = at_rate(failed(0.0, 1.0, "no connection"), ttft=1.0)
    assert (found.ttft, found.itl, found.output_tokens, found.output_tokens_per_s) == (None, None, None, 0)
    assert found.goodput is not None and found.goodput.share == 0


def test_tokens_are_the_servers_or_pieces_and_the_report_says_which():
    counted, not_counted = answered(0.0, 1.0, 2.0, tokens=5), answered(0.0, 1.0, 2.0, prompt=None)
    not_counted.completion_tokens = None
    assert [at_rate(e).counted_by for e in (counted, not_counted)] == ["usage", "chunks"]
    both = at_rate(counted, not_counted)
    assert (both.counted_by, both.total_tokens_per_s) == ("both", None)
    assert both.output_tokens is not None and both.output_tokens.mean == 3.5


def test_goodput_is_what_meets_every_objective_of_all_that_were_sent():
    exchanges = [
        answered(0.0, 0.4, 0.5, 0.6),  # meets all
        answered(0.0, 0.4, 0.5, 0.6, late=0.3),  # TTFT 0.1 from sending, and still 0.4 from when it was due
        answered(0.0, 0.6, 0.7),  # too late
        answered(0.0, 0.4, 0.9),  # too slow
        answered(0.0, 0.4),  # a single token has no TPOT to miss
        failed(0.0, 1.4, "HTTP 500"),
    ]
    found = at_rate(*exchanges, ttft=0.5, tpot=0.2).goodput
    assert found is not None
    assert (found.share, found.met) == (0.5, {"ttft": 4 / 6, "tpot": 4 / 6})
    assert found.requests_per_s == pytest.approx(3 / 1.4)


def test_a_client_that_is_late_makes_no_server_look_good():
    late = answered(0.0, 0.9, 1.0, late=0.8)
    found = at_rate(late, ttft=0.5, e2e=0.5).goodput
    assert found is not None and found.met == {"ttft": 0.0, "e2e": 0.0}


def test_a_client_that_could_not_keep_pace_is_named():
    on_time, late = answered(0.0, 1.0), answered(0.0, 1.0, late=2 * BEHIND_S)
    assert [at_rate(on_time).behind, at_rate(late).behind, at_rate(on_time, cpu=BUSY + 0.1).behind] == [
        False,
        True,
        True,
    ]


def test_percentiles_are_interpolated():
    found = distribution([float(value) for value in range(101)])
    assert found is not None
    assert dataclasses.asdict(found) == {
        "count": 101, "mean": 50.0, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0,
    }  # fmt: skip
    assert distribution([None]) is None


def test_objectives_are_seconds_by_name():
    assert read_slo("ttft=0.5, tpot = 0.05") == {"ttft": 0.5, "tpot": 0.05}


@pytest.mark.parametrize("text", ["", "ttft", "ttft=x", "ttft=0", "ttft=nan", "itl=1", "ttft=0.5,,"])
def test_objectives_that_are_none_are_refused(text: str):
    with pytest.raises(UsageError, match="expected seconds of ttft, tpot, e2e"):
        read_slo(text)
