"""Diagnose a machine by trying: which targets can run and build here, and whether a bundle runs here.

A broken driver or library can crash the process that uses it, or hang it. So each attempt runs in a separate process
(:mod:`llmc.runtime.diagnose.attempts`), and a crash or a hang is a result, too.
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
LOAD_S = 600.0  # for a bundle, whose weights may be on a slow disk
PACKAGES = (
    *("numpy", "tokenizers", "onnxruntime", "onnxruntime-gpu", "cuda-bindings", "tensorrt", "tensorrt-rtx"),
    *("onnx", "onnx-ir", "ml_dtypes", "torch", "safetensors"),
)
RELEASE = Path("/etc/nv_tegra_release")


@dataclass(frozen=True)
class Attempt:
    """An outcome: ``message`` describes what was opened, or the problem with advice."""

    works: bool
    message: str


@dataclass(frozen=True)
class Outlook:
    """One target: whether its bundles run and can be built here; ``defers``: building works without its engine."""

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
    """Processor and memory that this process may use."""

    cpu: str
    threads: int
    memory: Available


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a machine; ``jetson`` is the release of Jetson Linux, empty on any other machine."""

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
    """Try each target, and load ``bundle`` if given; takes some seconds."""
    driver = probe_driver()  # first, on its own: libraries take GPU memory while they are tried
    names = ("lowering", *TARGETS, *BUILDERS.values())
    attempts = try_apart({name: command("llmc.runtime.diagnose.attempts:attempt", name) for name in names}, TIMEOUT_S)
    return Diagnosis(
        f"{sys.platform}-{platform.machine()}",
        platform.python_version(),
        this_machine(),
        read_release(RELEASE),
        driver,
        dict(_list_packages()),
        {target: judge_target(target, attempts) for target in TARGETS},
        None if bundle is None else judge_bundle(bundle),
    )


def try_apart(commands: Mapping[str, Sequence[str]], seconds: float) -> dict[str, Attempt]:
    """The outcome of each attempt, all at the same time; an attempt fails if its process ends."""
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
    packages = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages.append((name, importlib.metadata.version(name)))
    return packages
