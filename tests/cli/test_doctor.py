"""``llmc doctor``: rows for people, JSON for programs, exit code 0 whatever is found, no engine in this process."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from doubles.machines import H200, NO_GPU, ORIN

from llmc.runtime.host.probe import Probe
from llmc.runtime.host.probe_steps import Driver, Library

# With six processes of its own, each of which imports a library; a busy machine takes several times the quiet second.
PATIENCE_S = 120


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Probe], None]:
    """Let the probe find another machine."""

    def plant(found: Probe) -> None:
        monkeypatch.setattr("llmc.runtime.host.probe.probe", lambda: found)

    return plant


def rows(out: str) -> dict[str, str]:
    """First column -> the rest of the line; what follows under it is left out."""
    found = {}
    for line in out.splitlines():
        name, _, rest = line.partition("  ")
        if name.strip():
            found[name] = rest.strip()
    return found


def test_a_server_is_described_in_rows(llmc, machine: Callable[[Probe], None]):
    machine(H200)
    ran = llmc("doctor")
    shown = rows(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert shown["driver"] == "CUDA 13.0, kernel module 580.95.05"
    assert shown["GPU 0"] == "NVIDIA H200, compute capability 9.0, 150.00 GB memory, 149.00 GB free"
    assert shown["tensorrt"] == "11.4.0.106 for CUDA 13: runtime, builder"
    assert shown["target tensorrt"] == "ready"
    assert shown["target tensorrt-rtx"] == "can build, not run"
    assert "tensorrt-rtx does not list compute capability 9.0 (NVIDIA H200): use the target tensorrt or cuda" in ran.out


def test_crashes_are_rows_of_the_report(llmc, machine: Callable[[Probe], None]):
    libraries = NO_GPU.libraries | {"tensorrt": Library("crashed", "ended by SIGSEGV")}
    machine(Probe(**{**vars(NO_GPU), "driver": Driver("hung", "no answer within 20 s"), "libraries": libraries}))
    ran = llmc("doctor")
    assert ran.code == 0
    assert rows(ran.out)["tensorrt"] == "crashed: ended by SIGSEGV"
    assert rows(ran.out)["driver"] == "hung: no answer within 20 s (CUDA unknown, no kernel module)"


def test_json_holds_the_probe_and_the_verdicts(llmc, machine: Callable[[Probe], None]):
    machine(ORIN)
    found = json.loads(llmc("doctor", "--json").out)
    assert found["probe"]["jetson"] == "36.4.3"
    assert found["targets"]["tensorrt"]["state"] == "not possible"
    assert found["targets"]["tensorrt"]["runs"] is False
    assert found["targets"]["cuda"]["obstacles"][0]["blocks"] == ["run"]
    assert found["bundle"] is None


def test_a_bundle_is_judged_and_exit_code_0_stays(llmc, machine: Callable[[Probe], None], tmp_path: Path):
    machine(NO_GPU)
    ran = llmc("doctor", tmp_path)
    assert ran.code == 0
    assert f"{tmp_path} does not run here" in ran.out
    assert rows(ran.out)["to do"] == "llmc build CHECKPOINT -o BUNDLE"


def test_the_machine_of_this_test_is_diagnosed_without_an_engine_in_the_process():
    code = """
import sys
from llmc.cli.main import main
try:
    main(["doctor", "--json"])
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {"onnxruntime", "tensorrt", "tensorrt_rtx", "cuda", "torch", "onnx"} & set(sys.modules)
assert not heavy, heavy
"""
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    found = json.loads(ran.stdout)
    assert found["targets"]["cpu"]["state"] in ("ready", "can run, not build")


def test_a_built_bundle_runs_on_the_machine_that_built_it(llmc, tiny_bundle: Path):
    found = json.loads(llmc("doctor", tiny_bundle, "--json").out)["bundle"]
    assert (found["runs"], found["reasons"]) == (True, [])


@pytest.mark.parametrize(("name", "kind"), [("export.json", "an export"), ("config.json", "a checkpoint")])
def test_what_has_yet_to_be_built_is_named_with_the_command(
    llmc, machine: Callable[[Probe], None], tmp_path: Path, name: str, kind: str
):
    machine(H200)
    (tmp_path / name).write_text("{}")
    ran = llmc("doctor", tmp_path, "--json")
    judged = json.loads(ran.out)["bundle"]
    assert (ran.code, judged["runs"]) == (0, False)
    build = f"llmc build {tmp_path} -o BUNDLE"
    assert judged["reasons"] == [f"{tmp_path} is {kind}, expected a bundle; build one with: {build}"]
    assert judged["remedy"] == build
