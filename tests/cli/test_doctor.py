"""``llmc doctor``: rows for people, JSON for programs, exit code 0 whatever is found, no engine in this process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from doubles.machines import H200, NO_GPU

from llmc.runtime.diagnose.doctor import Attempt, Diagnosis, Outlook, this_machine
from llmc.runtime.host.probe import Driver

# With nine processes of its own, each of which imports a library; a busy machine takes several times the quiet seconds.
PATIENCE_S = 120
WORKS, LACKS = Attempt(True, "onnxruntime 1.32.0"), Attempt(False, "tensorrt is not installed: install it")


def shown(llmc, monkeypatch: pytest.MonkeyPatch, driver: Driver, bundle: Attempt | None = None) -> str:
    targets = {"cpu": Outlook(WORKS, WORKS), "tensorrt": Outlook(LACKS, LACKS, defers=True)}
    found = Diagnosis("linux-x86_64", "3.12.3", this_machine(), "", driver, {"numpy": "2.4.6"}, targets, bundle)
    monkeypatch.setattr("llmc.runtime.diagnose.doctor.diagnose", lambda folder: found)
    monkeypatch.setattr("llmc.sources.built.find_bundle", lambda name, **_: Path(name))
    ran = llmc("doctor", *([] if bundle is None else ["."]))
    assert (ran.code, ran.err) == (0, "")
    return ran.out


def test_a_machine_is_described_in_rows(llmc, monkeypatch: pytest.MonkeyPatch):
    out = shown(llmc, monkeypatch, H200.driver, LACKS)
    assert "driver           CUDA 13.0\n" in out
    assert "NVIDIA H200, compute capability 9.0, 150.00 GB memory, 149.00 GB free" in out
    assert "target tensorrt  can build with --deferred\n" in out
    assert "run and build: tensorrt is not installed: install it" in out
    assert ". does not run here" in out
    assert "hung: no answer (CUDA unknown)" in shown(llmc, monkeypatch, Driver("hung", "no answer"))
    assert f"none ({NO_GPU.driver.problem})" in shown(llmc, monkeypatch, NO_GPU.driver)


def test_this_machine_is_diagnosed_without_an_engine_in_the_process(tiny_bundle: Path):
    code = """
import sys
from llmc.cli.main import main
try:
    main(["doctor", sys.argv[1], "--json"])
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {"onnxruntime", "tensorrt", "tensorrt_rtx", "cuda", "torch", "onnx"} & set(sys.modules)
assert not heavy, heavy
"""
    command = [sys.executable, "-c", code, str(tiny_bundle)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    found = json.loads(ran.stdout)
    assert found["targets"]["cpu"]["state"] in ("ready", "can run, not build")
    assert found["bundle"]["works"]
