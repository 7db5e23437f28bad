"""A machine's diagnosis: what each target would do on it, and whether a bundle runs here. All of it is tried.

A broken driver or library can end the process that touches it, or hold it for ever. So each attempt is made by a
process of its own (:mod:`llmc.runtime.diagnose.attempts`), and what becomes of that process is a finding.
"""

import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.runtime.host.apart import command, run_apart
from llmc.runtime.host.machine import Available, cpu_model, memory_here, usable_threads
from llmc.runtime.host.probe import TIMEOUT_S, Driver, probe_driver

TARGETS = ("cpu", "cuda", "tensorrt", "tensorrt-rtx")
BUILDERS = {"tensorrt": "tensorrt builder", "tensorrt-rtx": "tensorrt-rtx builder"}
LOAD_S = 600.0  # for a bundle, whose weights may come from a slow disk
PACKAGES = (
    *("numpy", "tokenizers", "onnxruntime", "onnxruntime-gpu", "cuda-bindings", "tensorrt", "tensorrt-rtx"),
    *("onnx", "onnx-ir", "ml_dtypes", "torch", "safetensors"),
)
RELEASE = Path("/etc/nv_tegra_release")


@dataclass(frozen=True)
class Attempt:
    """An outcome: ``said`` is what is there, or where it does not work, why, and what to do."""

    works: bool
    said: str


@dataclass(frozen=True)
class Outlook:
    """One target: whether its bundles run here, and can be built here; ``defers``: they can without their engines."""

    run: Attempt
    build: Attempt
    defers: bool = False

    @property
    def state(self) -> str:
        if self.build.works:
            return "ready" if self.run.works else "can build, not run"
        if self.defers:
            return f"can {'run, and ' if self.run.works else ''}build with --deferred"
        return "can run, not build" if self.run.works else "not possible"


@dataclass(frozen=True)
class Machine:
    """Processor and memory, as far as this process may use them."""

    cpu: str
    threads: int
    memory: Available


@dataclass(frozen=True)
class Diagnosis:
    """All that is to be said of a machine; ``jetson`` is the release of Jetson Linux, empty on any other machine."""

    platform: str
    python: str
    machine: Machine
    jetson: str
    driver: Driver
    packages: dict[str, str]
    targets: dict[str, Outlook]
    bundle: Attempt | None


def this_machine() -> Machine:
    return Machine(cpu_model(), usable_threads(), memory_here())


def diagnose(bundle: Path | None = None) -> Diagnosis:
    """Try each target, and to load ``bundle`` if there is one; takes some seconds."""
    driver = probe_driver()  # first, and alone: libraries take memory of the GPU while they are tried
    names = ("lowering", *TARGETS, *BUILDERS.values())
    found = try_apart({name: command("llmc.runtime.diagnose.attempts:attempt", name) for name in names}, TIMEOUT_S)
    return Diagnosis(
        f"{sys.platform}-{platform.machine()}",
        platform.python_version(),
        this_machine(),
        read_release(RELEASE),
        driver,
        dict(_list_packages()),
        {target: judge_target(target, found) for target in TARGETS},
        None if bundle is None else judge_bundle(bundle),
    )


def try_apart(commands: Mapping[str, Sequence[str]], seconds: float) -> dict[str, Attempt]:
    """The outcome of each attempt, all made at the same time; an end of its process is a reason, too."""
    return {name: _judge(answer) for name, answer in run_apart(commands, seconds).items()}


def _judge(answer: Mapping[str, Any]) -> Attempt:
    if "result" in answer:
        return Attempt(True, "; ".join(filter(None, (answer["result"], answer.get("problem")))))
    return Attempt(False, str(answer.get("refused") or answer["problem"]))


def judge_target(target: str, found: Mapping[str, Attempt]) -> Outlook:
    lowering = found["lowering"]
    if not lowering.works or target not in BUILDERS:
        return Outlook(found[target], lowering)
    return Outlook(found[target], found[BUILDERS[target]], defers=True)


def judge_bundle(folder: Path) -> Attempt:
    load = command("llmc.runtime.diagnose.attempts:load_bundle", str(folder))
    return try_apart({"bundle": load}, LOAD_S)["bundle"]


def read_release(path: Path) -> str:
    """``# R36 (release), REVISION: 4.3, ...`` -> 36.4.3."""
    with suppress(OSError):
        if match := re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", path.read_text(errors="replace")):
            return f"{match[1]}.{match[2]}"
    return ""


def _list_packages() -> list[tuple[str, str]]:
    found = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append((name, importlib.metadata.version(name)))
    return found
