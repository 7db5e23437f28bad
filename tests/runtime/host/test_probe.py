"""Probing: what is here is found, and a driver or library that crashes or hangs is a finding and nothing worse."""

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.machines import ORIN_FILES, write_files

from llmc.runtime.host import probe_steps
from llmc.runtime.host.apart import run_apart
from llmc.runtime.host.probe import LIBRARIES, probe, step_commands
from llmc.runtime.host.probe_steps import Device, Driver, Library

# A step that hangs is given this long; the machine may be busy, so nothing is asserted about steps that answer.
SHORT_S = 0.5
# A machine busy with other tests may take this long to end a process.
PATIENCE_S = 120.0


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


CRASH = python("import os, signal; print('{', flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
HANG = python("import time; print('{}', flush=True); time.sleep(600)")


def answer(facts: dict[str, Any], then: str = "") -> list[str]:
    return python(f"print({json.dumps(facts)!r}, flush=True); {then}")


def commands(**planted: list[str]) -> dict[str, list[str]]:
    """Steps that find nothing, but for ``planted`` ones."""
    missing = answer({"state": "missing", "problem": "nothing here"})
    names = {name.replace("-", "_"): name for name in ("driver", *LIBRARIES)}
    return {name: planted.get(key, missing) for key, name in names.items()}


# ------------------------------------------------------------------------------------------------------------ processes


def test_a_crash_is_a_finding_and_hides_nothing_else(tmp_path: Path):
    fine = answer({"state": "ok", "problem": "", "version": "1.31.1", "cuda": "", "abilities": ["CPU"]})
    found = probe(PATIENCE_S, tmp_path, commands(tensorrt=CRASH, onnxruntime=fine))
    assert found.libraries["tensorrt"] == Library("crashed", "ended by SIGSEGV")
    assert found.libraries["onnxruntime"] == Library("ok", "", "1.31.1", "", ("CPU",))
    assert found.driver == Driver("missing", "nothing here")


def test_a_hang_is_a_finding_and_ends(tmp_path: Path):
    started = time.monotonic()
    found = run_apart(commands(driver=HANG), SHORT_S)
    assert time.monotonic() - started < SHORT_S + PATIENCE_S
    assert found["driver"] == {"state": "hung", "problem": "no answer within 0.5 s"}


def test_an_answer_that_makes_no_sense_is_a_failure(tmp_path: Path):
    found = probe(PATIENCE_S, tmp_path, commands(driver=answer({"state": "ok", "problem": "", "devices": 7})))
    assert found.driver.state == "failed" and "devices" in found.driver.problem


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Modules that the steps import in place of the installed ones."""

    def write(**sources: str) -> Path:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return write


def test_a_library_that_crashes_when_imported_is_found_by_its_own_step(modules: Callable[..., Path], tmp_path: Path):
    modules(
        tensorrt="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        tensorrt_rtx="raise ImportError('libnvonnxparser.so.11: cannot open shared object file')",
    )
    names = ("tensorrt", "tensorrt-rtx")
    found = probe(PATIENCE_S, tmp_path, {**commands(), **{name: step_commands()[name] for name in names}}).libraries
    assert found["tensorrt"] == Library("crashed", "ended by SIGSEGV")
    assert found["tensorrt-rtx"].state == "failed" and "libnvonnxparser.so.11" in found["tensorrt-rtx"].problem


def test_who_is_interrupted_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch):
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(step: Any, *limits: float) -> None:
        started.append(step.process)
        raise KeyboardInterrupt

    monkeypatch.setattr("llmc.runtime.host.apart._answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_apart({"hung": HANG}, PATIENCE_S)
    assert started[0].poll() is not None


def test_a_library_that_lacks_a_part_of_itself_is_broken_and_not_missing(modules: Callable[..., Path], tmp_path: Path):
    modules(tensorrt="import tensorrt_libs", tensorrt_rtx="import tensorrt_rtx.tensorrt_rtx")
    names = ("tensorrt", "tensorrt-rtx")
    found = probe(PATIENCE_S, tmp_path, {**commands(), **{name: step_commands()[name] for name in names}}).libraries
    assert {name: found[name].state for name in names} == dict.fromkeys(names, "failed")


def test_what_a_library_prints_does_not_spoil_the_answer(modules: Callable[..., Path], tmp_path: Path):
    source = "import os; print('banner', flush=True); os.write(1, b'native banner'); raise RuntimeError('broken')"
    modules(tensorrt=source)
    found = probe(PATIENCE_S, tmp_path, {**commands(), "tensorrt": step_commands()["tensorrt"]})
    assert found.libraries["tensorrt"] == Library("failed", "RuntimeError: broken")


def test_steps_do_not_import_from_the_folder_that_the_command_runs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tensorrt.py").write_text("raise ImportError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    found = step("tensorrt")
    assert "a file of the user" not in found["problem"]


# ---------------------------------------------------------------------------------------------------------------- steps


class FakeCuda:
    """libcuda with ``devices`` of (name, capability, memory, integrated); ``failing`` calls return an error."""

    def __init__(self, devices: list[tuple[str, tuple[int, int], int, bool]], failing: dict[str, int] | None = None):
        self.devices, self.failing, self.released = devices, failing or {}, 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name in self.failing:
                return self.failing[name]
            getattr(self, f"_{name}")(*(getattr(argument, "_obj", argument) for argument in arguments))
            return 0

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def _cuDriverGetVersion(self, version: Any) -> None:
        version.value = 12060

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDeviceGetCount(self, count: Any) -> None:
        count.value = len(self.devices)

    def _cuDeviceGet(self, device: Any, index: int) -> None:
        device.value = index

    def _cuDeviceGetName(self, name: Any, size: int, device: int) -> None:
        name.value = self.devices[device][0].encode()

    def _cuDeviceTotalMem_v2(self, size: Any, device: int) -> None:
        size.value = self.devices[device][2]

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:
        _, (major, minor), _, integrated = self.devices[device]
        value.value = {75: major, 76: minor, 18: int(integrated)}[attribute]

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        assert device == 0
        context.value = 0x1234

    def _cuCtxSetCurrent(self, context: ctypes.c_void_p) -> None:
        assert context.value == 0x1234

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        free.value, total.value = self.devices[0][2] // 2, self.devices[0][2]

    def _cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:
        self.released += 1

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text.value = {100: b"CUDA_ERROR_NO_DEVICE", 2: b"CUDA_ERROR_OUT_OF_MEMORY"}[code]


ORIN_GPU = ("Orin", (8, 7), 8_000_000_000, True)


def test_the_driver_tells_its_version_and_gpus():
    library = FakeCuda([ORIN_GPU, ("NVIDIA H200", (9, 0), 150_000_000_000, False)])
    found = probe_steps.driver(lambda name: library)
    assert (found.state, found.version) == ("ok", "12.6")
    assert found.devices == (
        Device(0, "Orin", "8.7", 8_000_000_000, 4_000_000_000, True),
        Device(1, "NVIDIA H200", "9.0", 150_000_000_000, None, False),
    )
    assert library.released == 1


TENSORRT = """
__version__ = "10.3.0"
class Logger:
    ERROR = 2
    def __init__(self, severity): pass
def Runtime(logger): return object()
def Builder(logger): raise TypeError("pybind11::init(): factory function returned nullptr")
"""


def step(name: str) -> dict[str, Any]:
    found: dict[str, Any] = run_apart({name: step_commands()[name]}, PATIENCE_S)[name]["result"]
    return found


def test_tensorrt_without_a_gpu_makes_no_builder(modules: Callable[..., Path]):
    modules(tensorrt=TENSORRT)
    found = step("tensorrt")
    assert (found["state"], found["version"], found["abilities"]) == ("ok", "10.3.0", ["runtime"])
    assert found["problem"] == "Builder: pybind11::init(): factory function returned nullptr"


def test_tensorrt_rtx_makes_builders_without_a_gpu():
    library = pytest.importorskip("tensorrt_rtx")
    found = step("tensorrt-rtx")
    assert (found["state"], found["version"], found["cuda"]) == ("ok", library.__version__, "13")
    assert "builder" in found["abilities"]


def test_a_provider_counts_when_it_takes_a_graph():
    import onnxruntime

    assert probe_steps._loads_provider(onnxruntime, "CPUExecutionProvider") == ""


def test_files_of_the_system_are_read_below_the_root(tmp_path: Path):
    found = probe(root=write_files(tmp_path, ORIN_FILES), commands=commands())
    assert (found.kernel_module, found.jetson) == ("540.4.0", "36.4.3")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024", "535.183.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build", "580.95.05"),
        ("nonsense", None),
    ],
)
def test_the_kernel_module_has_a_version(tmp_path: Path, text: str, version: str | None):
    root = write_files(tmp_path, {"proc/driver/nvidia/version": text + "\n"})
    assert probe(root=root, commands=commands()).kernel_module == version
