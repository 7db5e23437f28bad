"""Benchmarks of the engine: each runs on the small model, and computes its figures as it says."""

import argparse
import itertools
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doubles.clocks import even_costs

from llmc.errors import CancelledError, UsageError
from llmc.runtime import Delta, Output, Request, SamplingParams, load
from llmc.runtime.engine.engine import Engine

# Sums of a few float64 in another order.
CLOSE = 1e-12
# Standard deviations of a binomial count within which a fixed seed lies; the planted rate is far outside.
SIGMAS = 4
Script = Callable[[str], ModuleType]


@pytest.fixture
def run_script(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a script as from the command line; what it wrote."""

    def run(name: str, bundle: Path, *arguments: str) -> dict[str, Any]:
        out = tmp_path / "out.json"
        common = [str(bundle), "--threads", "1", "--rounds", "1", "--json", str(out)]
        monkeypatch.setattr(sys, "argv", [name, *common, *arguments])
        script(name).main()
        return json.loads(out.read_text(encoding="utf-8"))

    return run


def figures(report: dict[str, Any]) -> list[float]:
    return [check["figure"] for check in report["checks"]]


# ----------------------------------------------------------------------------------------------------------- shared


def test_a_check_compares_in_the_direction_that_it_states(script):
    check = script("engine_measures").Check
    assert [check("", figure, 2.0).met for figure in (1.9, 2.0, 2.1)] == [False, True, True]
    assert [check("", figure, 2.0, True).met for figure in (1.9, 2.0, 2.1)] == [True, True, False]
    assert check("x", 0.123456, 0.05, True).row() == ("x", "0.123", "at most 0.05", "MISSED")


def test_a_report_says_whether_all_targets_were_met_and_whether_to_quote_it(script, tmp_path, capsys):
    measures = script("engine_measures")
    checks = [measures.Check("a", 3.0, 2.0), measures.Check("b", 1.0, 2.0)]
    named = {"model": "tiny", "precision": "int8", "threads": 2}
    measures.Found(checks, {"rounds": [1]}).write(tmp_path / "x.json", 0.5, **named)
    found = json.loads((tmp_path / "x.json").read_text())
    assert (found["met"], found["details"], found["checks"][1]["target"]) == (False, {"rounds": [1]}, 2.0)
    assert found["machine"]["threads"] > 0
    assert "DISTURBED: 0.5 CPUs" in capsys.readouterr().out
    measures.Found(checks[:1], {}).write(tmp_path / "x.json", 0.0, **named)
    assert json.loads((tmp_path / "x.json").read_text())["met"] is True
    assert "DISTURBED" not in capsys.readouterr().out


def test_ratios_are_taken_within_rounds(script):
    median_ratio = script("engine_measures").median_ratio
    assert median_ratio([2.0, 40.0, 9.0], [1.0, 10.0, 3.0]) == 3.0  # of the medians it would be 9 / 3 by chance, or 4.5
    with pytest.raises(ValueError, match="zip"):
        median_ratio([1.0, 2.0], [1.0])


def test_percentiles_are_in_milliseconds(script):
    found = script("engine_measures").percentiles([i / 1000 for i in range(101)])
    expected = {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99, "max_ms": 100, "count": 101}
    assert found == pytest.approx(expected, rel=CLOSE)


def test_prompts_differ_by_salt_and_hold_no_special_tokens(script):
    tokens = script("engine_measures").tokens
    assert tokens(50, 1) == tokens(50, 1) != tokens(50, 2)
    assert min(tokens(5000, 3)) >= 10 and max(tokens(5000, 3)) < 4000


def test_load_of_others_leaves_out_our_own(script, monkeypatch, tmp_path):
    machine, whose = script("machine"), resource.RUSAGE_SELF
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    seconds, clock = {whose: iter((100.0, 104.0))}, itertools.count(0, 10)
    monkeypatch.setattr(machine, "_cpu_seconds", lambda whose: next(seconds[whose]))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    (tmp_path / "stat").write_text("cpu 1000 0 0 5000 0 0 0 0 0 0\n")
    load = machine.Disturbance(whose)
    (tmp_path / "stat").write_text("cpu 1500 0 400 9000 0 0 0 0 0 0\n")  # 9 s busy at 100 ticks a second
    assert load.cpus() == pytest.approx(0.5)  # (9 - 4) s in 10 s
    (tmp_path / "stat").unlink()
    monkeypatch.setattr(machine, "_cpu_seconds", lambda whose: 0.0)
    assert machine.Disturbance(whose).cpus() is None


# ------------------------------------------------------------------------------------------------------ concurrency


def test_gaps_count_where_they_overlap_the_time_asked_for(script):
    gaps, times = script("engine_concurrency").gaps, [0.0, 1.0, 3.0, 6.0, 10.0]
    assert gaps(times, 1.0, 6.0) == [2.0, 3.0]
    assert gaps(times, 1.5, 6.5) == [2.0, 3.0, 4.0]
    assert gaps(times, 11.0, 12.0) == []


def test_concurrency_runs_and_divides_serial_by_together(run_script, tiny_bundle, monkeypatch):
    step = Engine.step

    def slowly(engine: Engine) -> None:
        time.sleep(0.01)  # so that the streams last, of two thousand tokens
        step(engine)

    monkeypatch.setattr(Engine, "step", slowly)
    sizes = ["--requests", "3", "--prompt", "12", "--new-tokens", "6"]
    sizes += ["--streams", "2", "--long-prompt", "600", "--quiet-tokens", "12"]
    report = run_script("engine_concurrency", tiny_bundle, *sizes)
    throughput, (episode,) = report["details"]["throughput"], report["details"]["latency"]
    assert figures(report)[0] == pytest.approx(throughput["serial_s"][0] / throughput["together_s"][0], rel=CLOSE)
    assert figures(report)[1] == pytest.approx(episode["beside"]["p95_ms"] / episode["before"]["p95_ms"], rel=CLOSE)
    assert [check["target"] for check in report["checks"]] == [3.0, 2.0]
    assert episode["before"]["count"] >= 2 * 11
    assert episode["beside"]["count"] > 2  # chunks took turns with decoding


def row_of(script: Script, name: str, runner: str, *rounds: dict[int, float]) -> Any:
    peers = script("peers")
    found = [{"results": [{"requests": n, "tok_s": rate} for n, rate in each.items()]} for each in rounds]
    return peers.Row(peers.Entry(name, "4 bits", runner, "model"), "", found)


def test_ratios_to_peers_are_taken_within_each_round(script):
    ours = row_of(script, "llmc", "llmc", {1: 10.0, 8: 100.0}, {1: 20.0, 8: 50.0}, {1: 30.0, 8: 90.0})
    peer = row_of(script, "OpenVINO", "openvino", {1: 10.0, 8: 50.0}, {1: 10.0, 8: 50.0}, {1: 10.0, 8: 60.0})
    broken = row_of(script, "llama.cpp", "llamacpp")
    broken.trouble = "runners.py failed"
    checks, lines = script("engine_concurrency").beside_peers([ours, peer, broken], [1, 8])
    assert lines[1:] == [
        ("llmc", "20", "90"),
        ("OpenVINO", "10 (2.00x; 1.00 to 3.00)", "50 (1.50x; 1.00 to 2.00)"),
        ("llama.cpp", "runners.py failed", "runners.py failed"),
    ]
    assert [(check.figure, check.target) for check in checks] == [(1.5, 1.3)]


def test_requests_at_once_are_measured_in_a_process_of_their_own(run_script, tiny_bundle, tmp_path):
    systems = tmp_path / "systems.toml"
    systems.write_text('[[system]]\nname = "other"\ngroup = "g"\nrunner = "openvino"\nmodel = "none"\n')
    sizes = ["--together", "1", "2", "--prompt", "8", "--new-tokens", "4"]
    report = run_script("engine_concurrency", tiny_bundle, "--peers", str(systems), *sizes)
    ours, other = report["details"]["rows"]
    assert [(found["requests"], found["tok_s"] > 0) for found in ours["rounds"][0]["results"]] == [(1, True), (2, True)]
    assert other["trouble"].startswith("not run")


# --------------------------------------------------------------------------------------------------------- overhead


def calls_of(script: Script, *spans: tuple[int, int, float, float, float, float]) -> list[Any]:
    return [script("engine_overhead").Call(*span) for span in spans]


def test_overhead_is_the_time_between_runs_of_full_batches(script):
    calls = calls_of(
        script,
        (1, 64, 0.0, 0.1, 5.0, 5.1),  # a prompt
        (2, 1, 7.0, 7.1, 8.1, 8.2),
        (2, 1, 9.0, 9.2, 10.2, 10.3),  # 1.1 s after the last one ended, 0.3 of it in the session
        (1, 1, 99.0, 99.1, 199.0, 199.1),  # one has left
    )
    found = script("engine_overhead").summarize(calls, 2)
    expected = {"steps": 1, "compute_ms": 1000, "between_ms": 1100, "session_ms": 300, "share": 1.1}
    assert found == pytest.approx(expected)


def test_without_a_full_batch_there_is_no_figure(script):
    calls = calls_of(script, (1, 1, 0.0, 0.1, 0.2, 0.3), (2, 1, 0.4, 0.5, 0.6, 0.7), (1, 1, 0.8, 0.9, 1.0, 1.1))
    with pytest.raises(SystemExit, match="never had 2 rows"):
        script("engine_overhead").summarize(calls, 2)


def test_overhead_runs_with_every_setting(run_script, tiny_bundle):
    report = run_script("engine_overhead", tiny_bundle, "--rows", "8", "--prompt", "8", "--new-tokens", "16")
    kinds = report["details"]["kinds"]
    assert [(k["settings"], k["logits"]) for k in kinds] == [
        (settings, logits) for settings in ("greedy", "mixed") for logits in ("model's", "peaked")
    ]
    assert figures(report) == [pytest.approx(k["between_ms"] / k["compute_ms"], rel=CLOSE) for k in kinds]
    assert all(k["steps"] > 2 and 0 < k["session_ms"] < k["between_ms"] for k in kinds)


def test_overhead_of_one_row_is_measured_by_setting(run_script, tiny_bundle):
    names = ["greedy", "temperature 0.8, top-p 0.95"]
    report = run_script("engine_overhead", tiny_bundle, "--rows", "1", "--new-tokens", "8", "--settings", *names)
    assert [(k["settings"], k["steps"]) for k in report["details"]["kinds"][::2]] == [(name, 6) for name in names]


# ----------------------------------------------------------------------------------------------------------- prefix


def test_prefixes_come_from_memory_and_after_a_restart_from_disk(run_script, tiny_bundle):
    report = run_script("prefix_reuse", tiny_bundle, "--prefix", "200", "--question", "8")
    (found,) = report["details"]["rounds"]
    assert found["memory_tokens"] == found["disk_tokens"] == 192  # whole blocks of 32
    assert figures(report) == [
        pytest.approx(value, rel=CLOSE)
        for value in (found["memory_s"] / found["cold_s"], found["disk_s"] / found["cold_s"], 192 / 200)
    ]


# --------------------------------------------------------------------------------------------------- shared prefill


# ------------------------------------------------------------------------------------------------------ speculation


def test_the_oracle_is_wrong_as_often_as_it_should_be(script):
    new, prompt = list(range(5000)), [7, 8]
    oracle = script("speculation_gain").OracleDraft(0.2, 5001)
    oracle.learn(prompt, new)
    drafts = oracle.propose(0, prompt, 5000)
    wrong = sum(a != b for a, b in zip(drafts, new, strict=True))
    spread = SIGMAS * np.sqrt(5000 * 0.2 * 0.8)
    assert abs(wrong - 1000) < spread
    assert abs(0.3 * 5000 - 1000) > spread  # a rate of 0.3 would be seen


def test_the_oracle_knows_only_what_it_learnt_and_goes_on_from_where_it_is_asked(script):
    oracle = script("speculation_gain").OracleDraft(0.0, 100)
    oracle.learn([1, 2], [3, 4, 5])
    assert oracle.propose(0, [1, 2], 2) == [3, 4]
    assert oracle.propose(0, [1, 2, 9, 9], 7) == [5]
    assert oracle.propose(0, [2, 2], 7) == []


@pytest.mark.parametrize("right", [0.0, 0.35, 0.8, 1.0])
def test_expected_tokens_are_the_sum_over_all_outcomes(script, right):
    expected = 0.0
    for outcome in itertools.product((True, False), repeat=5):
        accepted = next((i for i, good in enumerate(outcome) if not good), 5)
        probability = np.prod([right if good else 1 - right for good in outcome])
        expected += float(probability) * (accepted + 1)
    assert script("speculation_gain").expected(5, right) == pytest.approx(expected, rel=CLOSE)


def test_a_pair_divides_within_rounds_and_counts_drafts_of_its_own_runs(script):
    def results(*rates: float) -> list[Any]:
        metrics = SimpleNamespace(accepted=2, drafted=3)
        return [SimpleNamespace(timings=SimpleNamespace(decode_tokens_per_s=r), metrics=metrics) for r in rates]

    gain = script("speculation_gain")
    pair = gain.pair_of("x", results(10.0, 30.0), results(20.0, 90.0))
    assert (pair["gain"], pair["accepted"], pair["drafted"]) == (2.5, 4, 6)
    assert gain.row(pair) == ("x", "20.0", "55.0", "6", "66.7%")


def test_speculation_runs_and_the_oracle_is_held_to_what_it_recorded(run_script, tiny_bundle, monkeypatch):
    even_costs(monkeypatch)
    sizes = ("--prompt", "16", "--new-tokens", "32", "--free-tokens", "16")
    report = run_script("speculation_gain", tiny_bundle, *sizes, "--wrong", "0")
    oracle = report["details"]["pairs"][0]
    assert oracle["accepted"] == oracle["drafted"] > 0  # an oracle that is never wrong, and nothing but its tokens
    assert figures(report)[0] == pytest.approx(oracle["drafts"][0] / oracle["plain"][0], rel=CLOSE)
    assert [check["target"] for check in report["checks"]] == [2.0, 1.0, 0.97, 0.97]
    assert [item["drafts"] for item in report["details"]["verifications"]] == [0, 1, 3, 5, 7, 11, 15, 23, 31]


def test_answers_are_compared_with_and_without_drafts(run_script, script, tiny_bundle, monkeypatch):
    even_costs(monkeypatch)
    report = run_script("speculation_gain", tiny_bundle, "--answers", "--free-tokens", "8")
    answers = script("answers")
    assert [pair["name"] for pair in report["details"]["pairs"]] == [*answers.COPYING, *answers.FREE]
    assert figures(report) == [pair["gain"] for pair in report["details"]["pairs"]]
    assert [check["target"] for check in report["checks"]] == [2.0] * len(answers.COPYING) + [0.98] * len(answers.FREE)


def test_the_spread_of_a_gain_is_that_of_its_rounds(script):
    pair = {"drafts": [20.0, 90.0], "plain": [10.0, 30.0]}
    assert script("speculation_gain").spread(pair) == "2.00 to 3.00"


# ------------------------------------------------------------------------------------------------------------- soak


def output(*ids: int, text: str = "ab") -> Output:
    return Output(0, text, ids, "length")


@pytest.fixture
def seen(script: Script) -> Callable[..., Any]:
    def make(
        ids: tuple[int, ...], text: str = "ab", result: Output | None = None, error: Exception | None = None
    ) -> Any:
        made = script("soak").Seen(result=SimpleNamespace(outputs=(result,)) if result else None)
        made.note(Delta(0, text, ids))
        if error is not None:
            made.fail(error)
        return made

    return make


def test_the_soak_finds_nothing_wrong_with_what_is_right(script, seen):
    case, alone = script("soak").make_case(0, "greedy"), seen((1, 2, 3), result=output(1, 2, 3))
    for right in (
        seen((1, 2, 3), result=output(1, 2, 3)),
        seen((1, 2), error=CancelledError("gone")),
        seen(()),
    ):
        assert list(script("soak").mistakes(case, alone, right)) == []


def test_the_soak_finds_every_planted_mistake(script, seen):
    case, alone = script("soak").make_case(0, "greedy"), seen((1, 2, 3), result=output(1, 2, 3))
    planted = [
        seen((1, 3), result=output(1, 2, 3)),  # lost on the way
        seen((1, 2, 2, 3), result=output(1, 2, 3)),  # twice on the way
        seen((1, 2, 3), text="a", result=output(1, 2, 3)),
        seen((1, 2, 4), result=output(1, 2, 4)),  # another token than alone
        seen((1, 2, 3), text="x", result=output(1, 2, 3, text="x")),
        seen((1, 3), error=CancelledError("gone")),  # no prefix
        seen((1, 2, 3, 4)),  # went on after the end
        seen((1,), error=UsageError("whatever")),  # failed for no reason
    ]
    assert [len(list(script("soak").mistakes(case, alone, wrong))) for wrong in planted] == [1] * len(planted)


def test_a_faulty_request_must_not_end_well(script, seen):
    case, alone = script("soak").make_case(0, "raises"), seen((1, 2))
    found = list(script("soak").mistakes(case, alone, seen((1, 2), result=output(1, 2))))
    assert found == ["ended although its processor fails"]


def test_growth_compares_the_end_with_what_follows_the_first_fifth(script):
    clients = script("soak").Clients(SimpleNamespace(), [], [], 100, 0)
    clients.resident = [(5, 10), (20, 100), (25, 110), (30, 120), (60, 500), (90, 120), (95, 121), (100, 300)]
    assert clients.growth() == pytest.approx(121 / 110 - 1, rel=CLOSE)


def test_cases_are_the_same_for_the_same_number(script):
    make_case = script("soak").make_case
    assert make_case(7, "mirostat 2") == make_case(7, "mirostat 2") != make_case(8, "mirostat 2")
    assert make_case(3, "3 beams").params.seed is None


def test_the_soak_comes_to_its_end_on_the_small_model(script, tiny_bundle):
    soak = script("soak")
    sizes = {"requests": 60, "distinct": len(soak.KINDS), "seed": 1}
    args = argparse.Namespace(bundle=tiny_bundle, threads=1, determinism="batch", lookup=False, **sizes)
    found = soak.soak(args)
    details, missed = (
        found.details,
        [check.name for check in found.checks[:-1] if not check.met],
    )  # so few requests say nothing on memory
    assert (missed, details["wrong"], details["alone_mistakes"]) == ([], [], [])
    assert sum(count for outcome, count in details["outcomes"].items() if outcome != "turned away") == 60


def test_what_holds_an_output_to_recorded_tokens_overrides_the_model(script, tiny_bundle):
    gain = script("speculation_gain")
    prompt, wanted = [20, 21, 22], [300, 17, 300, 1234]
    with load(tiny_bundle, threads=1, self_test=False) as model:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        request = Request(prompt, params, logits_processors=(gain.held_to(prompt, wanted),))
        assert list(model.submit(request).result().token_ids) == wanted
        assert list(model.submit(Request(prompt, params)).result().token_ids) != wanted
