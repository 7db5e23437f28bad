"""The check of GPUs, on the target that needs none: a bundle passes, and one that fails or hangs is recorded."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from doubles.modules import load_file

SCRIPT = Path(__file__).parents[2] / "recipes" / "gpu_check.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load_file(SCRIPT)


@pytest.fixture
def exports(layer_export: Path, tmp_path: Path) -> Path:
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "tiny").symlink_to(layer_export)
    return tmp_path / "exports"


@pytest.mark.slow
def test_a_bundle_is_built_compared_and_timed(check, exports, tmp_path, monkeypatch):
    """In this process, and shortly; that what a child says is kept, the failures below show."""
    for name, value in {"PROMPTS": (8, 16), "NEW_TOKENS": 2, "COMPARED": 64}.items():
        monkeypatch.setattr(check, name, value)
    monkeypatch.setattr("llmc.runtime.bench.benchmark.BYTES_PER_THREAD", 1 << 20)
    found = check.check("cpu/tiny/int8", tmp_path, exports)
    assert found["problems"] == [] and found["distances"].keys() == {"prefill", "decode"}
    document = {"bundles": {"cpu/tiny/int8": {"state": "done", "result": found}}}
    assert f"| cpu/tiny/int8 | done | {found['bytes'] / 1e6:.0f} |" in check.markdown(document)


@pytest.mark.parametrize(("limit", "state"), [("60", "failed with 1"), ("0.01", "no end after 0.01 s")])
def test_one_that_fails_or_hangs_is_recorded_and_ends_the_run_with_1(check, tmp_path, monkeypatch, limit, state):
    if limit != "60":  # the machine is described once
        monkeypatch.setattr(check, "machine", lambda: "")
    out = tmp_path / "out.json"
    nowhere = ["--exports", str(tmp_path / "nowhere"), "--limit", limit]
    assert check.main(["cpu/tiny/int4", "--out", str(out), *nowhere]) == 1
    assert json.loads(out.read_text())["bundles"]["cpu/tiny/int4"]["state"] == state


def test_logits_of_the_position_before_are_beyond_every_limit(check):
    logits = np.random.default_rng(0).standard_normal((8, 100))
    assert check.distance(logits, logits) == 0
    assert check.distance(logits[1:], logits[:-1]) > max(check.LIMITS.values())


def test_a_bundle_that_is_none_is_refused(check, capsys):
    with pytest.raises(SystemExit):
        check.main(["vulkan/*"])
    assert "there are cuda/1b/fp16" in capsys.readouterr().err
