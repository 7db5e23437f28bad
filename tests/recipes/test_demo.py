"""The demo is what a stranger runs first."""

import runpy
from pathlib import Path

import pytest


@pytest.mark.slow
def test_demo_streams_from_every_bundle_and_compares_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path
):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(tiny_checkpoint.parent / "demo.py"), run_name="__main__")
    out = capsys.readouterr().out
    table = out.rpartition("\nbundle ")[2].splitlines()
    assert out.count("\n    for i in range(") >= 3
    assert [row.split()[0] for row in table[1:4]] == ["fp32", "int8", "int4"]
    assert all(row.endswith("tok/s") for row in table[1:4])
    assert sorted(path.name for path in (tmp_path / "build" / "demo").iterdir()) == ["export", "fp32", "int4", "int8"]
