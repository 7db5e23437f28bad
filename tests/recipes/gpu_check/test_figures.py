"""Ratios and the table of the check of GPU targets follow from the numbers of a run as they should."""

import json
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
NAME = "tensorrt/1b/int8"
Part = Callable[[str], ModuleType]


def times(p50_s: float) -> dict[str, float]:
    return {"p50_s": p50_s, "p95_s": 2 * p50_s, "best_s": p50_s / 2}


def measured(step_s: float, weight_bytes: int) -> dict[str, Any]:
    return {
        "new_tokens": 128,
        "step": times(step_s),
        "step_without_graphs": times(1.5 * step_s),
        "alone": [
            {"prompt": 128, "ttft": times(0.004), "tpot": times(step_s)},
            {"prompt": 2048, "ttft": times(0.02), "tpot": times(0.0006)},
        ],
        "batch": {"tokens_per_s": 9000.0},
        "weight_bytes": weight_bytes,
        "cache_bytes_per_position": 100_000,
        "device_bytes": {"loaded": 2_000_000_000, "after_runs": 2_500_000_000},
    }


@pytest.fixture
def document() -> dict[str, Any]:
    """A run on a GPU with round numbers: 1B in int8 and fp16 by TensorRT, and torch beside it."""
    results: dict[str, Any] = {
        "machine": {"packages": {"numpy": "2.0", "tensorrt": "11.4", "torch": "2.13.0"}},
        "driver": {"device": asdict(SERVER), "on_device": {"bytes_per_s": 4e12}},
        "baseline/1b": {"step_s": 0.002, "prefill_s": 0.03, "prefill_tokens": 2048},
        f"build/{NAME}": {},
        f"verify/{NAME}": {},
        f"determinism/{NAME}": {},
        f"measure/{NAME}": measured(0.0005, 1_380_800_000),
        "measure/tensorrt/1b/fp16": measured(0.001, 2_780_800_000),
        f"buckets/{NAME}": {"s_per_position": 5e-8, "cache_bytes_per_position": 100_000},
    }
    common = {"state": "done", "ended": "2026-01-02T03:04:05", "commit": "c" * 40, "message": ""}
    steps = {name: {**common, "result": result} for name, result in results.items()}
    return {"schema": 2, "started": "2026-01-01T00:00:00", "steps": steps}


def figures(part: Part, document: dict[str, Any], bundle: str = NAME) -> dict[str, Any]:
    return {name: figure for name, (figure, _) in part("report").figures(document, bundle).items()}


def test_ratios_are_those_of_the_numbers_of_the_run(part, document):
    found = figures(part, document)
    assert found.pop("of bandwidth") == pytest.approx((1_380_800_000 + 192 * 100_000) / 0.0005 / 4e12, rel=CLOSE)
    assert found == pytest.approx(
        {
            "step p50": 0.5,
            "p95": 1.0,
            "to fp16": 0.5,
            "bytes": 1400.0,
            "bytes to fp16": 0.5,
            "decode": 2000.0,
            "without graphs": 1.5,
            "to torch.compile": 4.0,
            "TTFT 2,048": 20.0,
            "prefill to SDPA": 1.5,
            "8 rows": 9000.0,
            "bucket slope": 2.0,
            "GPU memory": 2500.0,
        },
        rel=CLOSE,
    )


def test_without_the_bandwidth_only_what_needs_it_is_missing(part, document):
    document["steps"]["driver"]["state"] = "failed"
    found = figures(part, document)
    assert [name for name, figure in found.items() if figure is None] == ["of bandwidth", "bucket slope"]


def test_a_share_is_not_taken_of_another_kind_of_memory(part, document):
    document["steps"]["measure/cpu/1b/int8"] = document["steps"][f"measure/{NAME}"]
    found = figures(part, document, "cpu/1b/int8")
    assert found["decode"] == 2000.0
    assert [found[name] for name in ("of bandwidth", "to torch.compile", "prefill to SDPA")] == [None] * 3


def test_a_prefill_of_another_length_is_not_compared(part, document):
    document["steps"]["baseline/1b"]["result"]["prefill_tokens"] = 1024
    assert figures(part, document)["prefill to SDPA"] is None


def test_figures_of_a_step_that_failed_are_none(part, document):
    document["steps"][f"measure/{NAME}"]["state"] = "failed"
    found = figures(part, document)
    assert {name for name, figure in found.items() if figure is not None} == {"bucket slope"}


def test_the_table_names_gpu_driver_versions_and_date(part, document):
    lines = part("report").markdown(document).splitlines()
    machine = "NVIDIA L4 (compute capability 8.9), driver for CUDA 13.0, tensorrt 11.4, torch 2.13.0; copies 4000 GB/s"
    assert lines[0] == f"{machine}; 2026-01-02, commit {'c' * 12}."
    row = next(line for line in lines if line.startswith(f"| {NAME}"))
    assert row == (
        f"| {NAME} | yes | 0.50 ms | 1.00 ms | 0.50 | 1400 MB | 0.50 | 2000 tok/s | 70% | 1.50x | 4.00x | 20.0 ms "
        "| 1.50x | 9000 tok/s | 2.00 | 2500 MB |"
    )
    assert sum("| not run |" in line for line in lines) == 2 * 2 * 3 - 1


def test_what_is_wrong_or_unverified_is_said_beside_the_speed(part, document):
    verified, steps = part("report").verified, document["steps"]
    steps[f"determinism/{NAME}"]["state"] = "not run"
    assert verified(document, NAME) == "not run"
    steps[f"verify/{NAME}"]["state"] = "failed"
    assert verified(document, NAME) == "verify failed"
    steps["build/cuda/1b/int8"] = {"state": "crashed", "message": "x", "result": None}
    assert "| cuda/1b/int8 | build crashed | not run |" in part("report").markdown(document)


@pytest.mark.parametrize(
    ("listed", "accepted", "line"),
    [
        (False, False, "TensorRT-RTX does not list this GPU and refuses an engine on it: no kernels for 9.0"),
        (True, True, "TensorRT-RTX lists this GPU and runs an engine on it: no kernels for 9.0"),
    ],
)
def test_the_last_line_is_what_the_library_said_of_the_gpu(part, document, listed: bool, accepted: bool, line: str):
    markdown = part("report").markdown
    assert "TensorRT-RTX" not in markdown(document)
    said = {"listed": listed, "accepted": accepted, "said": "no kernels\n for 9.0"}
    document["steps"][part("steps").REFUSAL] = {"state": "done", "result": said}
    assert markdown(document).splitlines()[-2:] == ["", line]
    assert "tensorrt-rtx/" not in markdown(document), "no row of a bundle of which nothing was measured"


def test_what_was_not_run_is_said_so_in_the_table(tmp_path):
    (tmp_path / "none.json").write_text(json.dumps({"schema": 2, "started": "", "steps": {}}))
    command = [sys.executable, str(SCRIPT), "--markdown", "--out", str(tmp_path / "none.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == "Not run on a GPU."
    assert sum(line.count("not run") for line in lines) == 12 * 15
