"""Ratios, goals and tables of the check of GPU targets follow from the numbers of a run as they should."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doubles.cuda import SERVER

SCRIPT = Path(__file__).parents[3] / "recipes" / "gpu_check.py"
# Quotients of the same float64 in another order.
CLOSE = 1e-12
Part = Callable[[str], ModuleType]


@pytest.fixture
def document(part: Part) -> dict[str, Any]:
    """A run on a GPU with round numbers: 1B in int8 by TensorRT, and torch beside it."""
    store, process = part("store"), part("process")
    made: dict[str, Any] = store.fresh("planted", {})
    results: dict[str, Any] = {
        "machine": {"commit": "c" * 40, "packages": {"torch": "2.13.0"}},
        "bandwidth": {"kind": "device", "device": asdict(SERVER), "bytes_per_s": 4e12},
        "tensorrt/library": {"library": "tensorrt", "version": "11.4"},
        "1b/baseline": {"step_s": 0.002, "prefill_s": 0.03, "prefill_tokens": 2048},
        "tensorrt/1b/int8/build": {},
        "tensorrt/1b/int8/verify": {},
        "tensorrt/1b/int8/determinism": {},
        "tensorrt/1b/int8/measure": {
            "new_tokens": 128,
            "alone": [
                {"prompt": 128, "ttft_s": 0.004, "tpot_s": 0.0005},
                {"prompt": 2048, "ttft_s": 0.02, "tpot_s": 0.0006},
            ],
            "batch": {"decode_tokens_per_s": 9000.0},
            "weight_bytes": 1_380_800_000,
            "cache_bytes_per_position": 100_000,
            "device_bytes": {"loaded": 2_000_000_000, "after_runs": 2_500_000_000},
        },
    }
    for name, result in results.items():
        store.put(made, store.record(name, process.Outcome("done", result=result)))
    return made


def test_ratios_are_those_of_the_numbers_of_the_run(part, document):
    found = part("goals").row(document, "tensorrt", "1b", "int8")
    assert found.tokens_per_s == pytest.approx(2000, rel=CLOSE)
    assert found.share == pytest.approx((1_380_800_000 + 192 * 100_000) / 0.0005 / 4e12, rel=CLOSE)
    assert found.share == pytest.approx(0.7, rel=CLOSE)
    assert found.speedup == pytest.approx(4.0, rel=CLOSE)
    assert found.prefill_ratio == pytest.approx(1.5, rel=CLOSE)
    assert (found.batch_tokens_per_s, found.device_bytes, found.verified) == (9000.0, 2_500_000_000, "yes")


def test_a_share_is_not_taken_of_another_kind_of_memory(part, document):
    part("store").find(document, "bandwidth")["result"]["kind"] = "host"
    assert part("goals").row(document, "tensorrt", "1b", "int8").share is None


def test_a_prefill_of_another_length_is_not_compared(part, document):
    part("store").find(document, "1b/baseline")["result"]["prefill_tokens"] = 1024
    assert part("goals").row(document, "tensorrt", "1b", "int8").prefill_ratio is None


def goals_of(part: Part, document: dict[str, Any], precision: str = "int8") -> dict[str, str]:
    """Verdicts about TensorRT's 1B."""
    found = [goal for goal in part("goals").verdicts(document) if goal["precision"] == precision]
    return {goal["name"]: goal["verdict"] for goal in found if (goal["target"], goal["geometry"]) == ("tensorrt", "1b")}


def test_goals_pass_and_are_missed_by_their_figures(part, document):
    share, speedup, prefill = goals_of(part, document)
    assert set(goals_of(part, document).values()) == {"passed"}
    assert set(goals_of(part, document, "fp16").values()) == {"not run"}
    part("store").find(document, "bandwidth")["result"]["bytes_per_s"] = 4.7e12  # of which it has 0.596
    part("store").find(document, "1b/baseline")["result"] |= {"step_s": 0.00074, "prefill_s": 0.0199}
    assert goals_of(part, document) == {share: "missed", speedup: "missed", prefill: "missed"}


def test_speed_counts_for_nothing_where_results_are_wrong(part, document):
    part("store").find(document, "tensorrt/1b/int8/verify")["state"] = "failed"
    assert part("goals").row(document, "tensorrt", "1b", "int8").verified == "FAILED"
    assert set(goals_of(part, document).values()) == {"missed"}


def test_speed_without_a_verification_meets_no_goal(part, document):
    part("store").find(document, "tensorrt/1b/int8/verify")["state"] = "not run"
    assert set(goals_of(part, document).values()) == {"missed"}


def test_what_was_emulated_reaches_no_goal_and_no_table(part, document):
    document["arguments"]["emulate"] = True
    assert set(goals_of(part, document).values()) == {"not run"}
    assert "2000 tok/s" not in part("goals").markdown(document)


def test_a_run_that_emulates_prints_what_is_right_and_no_speed(part, document):
    store, goals = part("store"), part("goals")
    own = store.find(document, "tensorrt/1b/int8/measure")["result"]
    store.put(document, store.record("cpu/1b/int8/measure", part("process").Outcome("done", result=own)))
    document["arguments"]["emulate"] = True
    goals.summarize(document)
    lines = list(goals.report(document))
    figures = " | ".join(["not run"] * 7)
    assert f"| tensorrt | 1b | int8 | yes | {figures} |" in lines
    assert [line for line in lines if "tok/s" in line] == [line for line in lines if line.startswith("| cpu ")]
    emulated = next(row for row in document["rows"] if row["target"] == "tensorrt")
    assert emulated["verified"] == "yes" and emulated["tokens_per_s"] is None and emulated["ttft_s"] == {}


def test_the_report_names_the_reference_that_is_missing(part, document):
    outcome = part("process").Outcome("done", result={"missing": ["transformers: transformers is not installed"]})
    part("store").put(document, part("store").record("tiny/reference", outcome))
    part("goals").summarize(document)
    *_, last = part("goals").report(document)
    assert last == "not run: tiny/reference: transformers: transformers is not installed"


def test_the_goals_are_those_that_were_agreed(part):
    found = {(goal.figure, goal.at_least, goal.geometries, goal.precisions) for goal in part("goals").GOALS}
    assert found == {
        ("share", 0.6, ("1b",), ("fp16", "int8")),
        ("speedup", 1.5, ("0.5b", "1b"), ("fp16", "int8")),
        ("tokens_per_s", 700.0, ("0.5b",), ("int8",)),
        ("prefill_ratio", 1.0, ("0.5b", "1b"), ("fp16", "int8")),
    }


def test_the_table_names_gpu_driver_versions_and_date(part, document):
    lines = part("goals").markdown(document).splitlines()
    machine = "NVIDIA L4 (compute capability 8.9), driver for CUDA 13.0, tensorrt 11.4, torch 2.13.0; copies 4000 GB/s"
    assert lines[0] == f"{machine}; {document['started'][:10]}, commit {'c' * 12}."
    row = next(line for line in lines if line.startswith("| tensorrt | 1b | int8"))
    assert row == (
        "| tensorrt | 1b | int8 | yes | 4.0 / 20.0 ms | 2000 tok/s | 70% | 4.00x | 1.50x | 9000 tok/s | 2500 MB |"
    )
    assert sum("| not run |" in line for line in lines) == 3 * 3 * 3 - 1


def test_what_was_not_run_is_said_so_in_the_table(part, tmp_path):
    part("store").write(part("store").fresh("", {}), tmp_path / "none.json")
    command = [sys.executable, str(SCRIPT), "--markdown", "--out", str(tmp_path / "none.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == "Not run on a GPU."
    assert sum(line.count("not run") for line in lines) == 27 * 8


def test_a_step_that_failed_shows_in_the_table(part, document):
    store = part("store")
    store.find(document, "tensorrt/1b/int8/determinism")["state"] = "failed"
    assert "| determinism failed | 4.0 / 20.0 ms |" in part("goals").markdown(document)
    store.put(document, store.record("cuda/1b/int8/build", part("process").Outcome("crashed", "x")))
    assert "| cuda | 1b | int8 | build crashed | not run |" in part("goals").markdown(document)


def test_the_report_ends_with_what_went_wrong(part, document):
    goals, store = part("goals"), part("store")
    store.put(document, store.record("cuda/1b/int8/build", part("process").Outcome("crashed", "ended by SIGSEGV")))
    goals.summarize(document)
    *_, left, last = goals.report(document)
    assert last == "crashed: cuda/1b/int8/build: ended by SIGSEGV"
    assert left == f"goals not run: {len(document['goals']) - 3} of {len(document['goals'])}"


def test_facts_hold_what_the_library_said(part, document):
    store, process = part("store"), part("process")
    said = process.Outcome("failed", "unsupported compute capability")
    store.put(document, store.record("tensorrt-rtx/tiny/fp16/verify", said))
    store.put(document, store.record("tensorrt/tiny/fp16/lengths", process.Outcome("done", result={"relative": {}})))
    part("goals").summarize(document)
    assert document["facts"]["tensorrt_rtx"] == {"tensorrt-rtx/tiny/fp16/verify": "unsupported compute capability"}
    assert document["facts"]["lengths"] == {"tensorrt/tiny/fp16/lengths": {"relative": {}}}
