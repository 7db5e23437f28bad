"""The machine to run a model on: driver, GPUs, engine libraries, Jetson.

A broken driver or library can end the process that touches it, or hold it for ever. So each is examined by a process of
its own (:mod:`llmc.runtime.host.probe_steps`), and what becomes of that process is a finding. Nothing is imported here.
"""

import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from llmc.errors import BundleError
from llmc.runtime.host.apart import command, run_apart
from llmc.runtime.host.probe_steps import Driver, Library
from llmc.strict import decode

# A first use of a GPU reads libraries of hundreds of megabytes: a builder took 7 s to make on a server with a T4, and a
# small board with a cold disk is not to be taken for hanging.
TIMEOUT_S = 90.0
ROOT = Path("/")
LIBRARIES = ("cuda-bindings", "onnxruntime", "tensorrt", "tensorrt-rtx")
# What building needs beside an engine, what exporting needs beside that, and what all bundles need.
PACKAGES = ("numpy", "tokenizers", "onnx", "onnx-ir", "ml_dtypes", "torch", "safetensors", "transformers")


Found = TypeVar("Found", Driver, Library)


@dataclass(frozen=True)
class Probe:
    """All findings.

    Attributes:
        platform: operating system and processor, as linux-x86_64.
        kernel_module: version of NVIDIA's module in the kernel, None where none is loaded.
        libraries: of :data:`LIBRARIES`, by name.
        packages: version of each Python package that exporting, building or running needs and that is installed.
        jetson: release of Jetson Linux, as 36.4.3; empty on any other machine.
    """

    platform: str
    python: str
    kernel_module: str | None
    driver: Driver
    libraries: dict[str, Library]
    packages: dict[str, str]
    jetson: str


def probe(
    timeout_s: float = TIMEOUT_S, root: Path = ROOT, commands: Mapping[str, Sequence[str]] | None = None
) -> Probe:
    """Examine this machine; takes a second or two, and never more than about twice ``timeout_s``.

    ``root`` is a folder in place of /, and ``commands`` are in place of :func:`step_commands`.
    """
    wanted = dict(step_commands() if commands is None else commands)
    # The driver first, and alone: libraries take memory of the GPU while they are tried.
    answers = run_apart({"driver": wanted.pop("driver")}, timeout_s)
    answers |= run_apart(wanted, timeout_s)
    return Probe(
        platform=f"{sys.platform}-{platform.machine()}",
        python=platform.python_version(),
        kernel_module=_kernel_module(root),
        driver=_take_finding(Driver, answers["driver"]),
        libraries={name: _take_finding(Library, answers[name]) for name in LIBRARIES},
        packages={name: version for name in PACKAGES if (version := _package(name))},
        jetson=_jetson(root),
    )


def probe_driver(timeout_s: float = TIMEOUT_S) -> Driver:
    """Only the driver and its GPUs; takes a tenth of a second where there is none."""
    return _take_finding(Driver, run_apart({"driver": step_commands()["driver"]}, timeout_s)["driver"])


def step_commands() -> dict[str, list[str]]:
    return {name: command("llmc.runtime.host.probe_steps:take", name) for name in ("driver", *LIBRARIES)}


def _take_finding(kind: type[Found], answer: dict[str, Any]) -> Found:
    """The finding of a step, or the end of its process; an end after it had answered is a problem too."""
    found = answer.get("result", answer)
    if found is not answer:
        found["problem"] = "; ".join(filter(None, (found["problem"], answer.get("problem"))))
    defaults = json.loads(json.dumps(asdict(kind("", ""))))
    try:
        return cast(Found, decode(kind, defaults | found))
    except BundleError as error:
        return kind("failed", f"the probe's answer makes no sense: {error}")


def _kernel_module(root: Path) -> str | None:
    """``NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 ...``."""
    match = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)*)\s", _text(root / "proc/driver/nvidia/version"))
    return match[1] if match else None


def _jetson(root: Path) -> str:
    """``# R36 (release), REVISION: 4.3, ...`` -> 36.4.3."""
    match = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", _text(root / "etc/nv_tegra_release"))
    return f"{match[1]}.{match[2]}" if match else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
