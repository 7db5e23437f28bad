"""Probing the driver: what is here is found, and one that crashes or hangs is a finding and nothing worse."""

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from llmc.runtime.host import probe
from llmc.runtime.host.apart import run_apart
from llmc.runtime.host.probe import Device, Driver, driver, probe_driver

# A step that hangs is given this long; the machine may be busy, so nothing is asserted about steps that answer.
SHORT_S = 0.5
# A machine busy with other tests may take this long to end a process.
PATIENCE_S = 120.0


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


HANG = python("import time; print('{}', flush=True); time.sleep(600)")


def test_a_driver_that_crashes_is_a_finding(monkeypatch):
    crash = python("import os, signal; print('{', flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr(probe, "command", lambda function: crash)
    assert probe_driver(PATIENCE_S) == Driver("crashed", "ended by SIGSEGV")


def test_a_hang_is_a_finding_and_ends():
    started = time.monotonic()
    found = run_apart({"driver": HANG}, SHORT_S)
    assert time.monotonic() - started < SHORT_S + PATIENCE_S
    assert found["driver"] == {"state": "hung", "problem": "no answer within 0.5 s"}


def test_who_is_interrupted_leaves_no_process_behind(monkeypatch):
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(step: Any, *limits: float) -> None:
        started.append(step.process)
        raise KeyboardInterrupt

    monkeypatch.setattr("llmc.runtime.host.apart._answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_apart({"hung": HANG}, PATIENCE_S)
    assert started[0].poll() is not None


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
    found = driver(lambda name: library)
    assert (found.state, found.version) == ("ok", "12.6")
    assert found.devices == (
        Device(0, "Orin", "8.7", 8_000_000_000, 4_000_000_000, True),
        Device(1, "NVIDIA H200", "9.0", 150_000_000_000, None, False),
    )
    assert library.released == 1
