"""The machine to run a model on: driver, GPUs, engine libraries, Jetson.

A broken driver or library can end the process that touches it, or hold it for ever. So each is examined by a process of
its own (:mod:`llmc.runtime.host.probe_steps`), and what becomes of that process is a finding. Nothing is imported here.
"""

import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

from llmc.errors import BundleError
from llmc.runtime.host.probe_steps import Driver, Library
from llmc.strict import decode

# A first use of a GPU reads libraries of hundreds of megabytes: a builder took 7 s to make on a server with a T4, and a
# small board with a cold disk is not to be taken for hanging.
TIMEOUT_S = 90.0
ROOT = Path("/")
# A process in an uninterruptible call of a driver cannot be ended; nobody waits longer for it.
GRACE_S = 1.0
STEPS_FILE = Path(__file__).with_name("probe_steps.py")
# Steps see the modules that this process sees, and no others: not those of the folder that it was started in.
STEP_CODE = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)
LIBRARIES = ("cuda-bindings", "onnxruntime", "tensorrt", "tensorrt-rtx")
# What building needs beside an engine, what exporting needs beside that, and what all bundles need.
PACKAGES = ("numpy", "tokenizers", "onnx", "onnx-ir", "ml_dtypes", "torch", "safetensors", "transformers")


Found = TypeVar("Found", Driver, Library)


@dataclass(frozen=True)
class Probe:
    """All findings.

    Attributes:
        platform: operating system and processor, as linux-x86_64.
        python: this interpreter's version.
        kernel_module: version of NVIDIA's module in the kernel, None where none is loaded.
        libraries: by name: cuda-bindings, onnxruntime, tensorrt, tensorrt-rtx.
        packages: version of each Python package that exporting, building or running needs and that is installed.
        jetson: release of Jetson Linux, as 36.4.3; empty on any other machine.
        seconds: what probing took.
    """

    platform: str
    python: str
    kernel_module: str | None
    driver: Driver
    libraries: dict[str, Library]
    packages: dict[str, str]
    jetson: str
    seconds: float


def probe(
    timeout_s: float = TIMEOUT_S, root: Path = ROOT, commands: Mapping[str, Sequence[str]] | None = None
) -> Probe:
    """Examine this machine; takes a second or two, and never more than about twice ``timeout_s``.

    Args:
        timeout_s: seconds after which a step counts as hung.
        root: folder in place of /, for files of the system.
        commands: what each step runs; default: :func:`step_commands`.
    """
    started = time.monotonic()
    wanted = dict(step_commands() if commands is None else commands)
    # The driver first, and alone: libraries take memory of the GPU while they are tried.
    answers = run_steps({"driver": wanted.pop("driver")}, timeout_s)
    answers |= run_steps(wanted, timeout_s)
    return Probe(
        platform=f"{sys.platform}-{platform.machine()}",
        python=platform.python_version(),
        kernel_module=_kernel_module(root),
        driver=_finding(Driver, answers["driver"]),
        libraries={name: _finding(Library, answers[name]) for name in LIBRARIES},
        packages={name: version for name in PACKAGES if (version := _package(name))},
        jetson=_jetson(root),
        seconds=round(time.monotonic() - started, 3),
    )


def probe_driver(timeout_s: float = TIMEOUT_S) -> Driver:
    """Only the driver and its GPUs; takes a tenth of a second where there is none."""
    return _finding(Driver, run_steps({"driver": step_commands()["driver"]}, timeout_s)["driver"])


def _finding(kind: type[Found], answer: dict[str, Any]) -> Found:
    defaults = json.loads(json.dumps(asdict(kind("", ""))))
    try:
        return cast(Found, decode(kind, defaults | answer))
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


# ------------------------------------------------------------------------------------------------------------ processes


class _Started(NamedTuple):
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]


def step_commands() -> dict[str, list[str]]:
    """The command of each step."""
    return {name: [*_step_start(), name] for name in ("driver", *LIBRARIES)}


def _step_start() -> list[str]:
    return [sys.executable, "-c", STEP_CODE, json.dumps([path for path in sys.path if path]), str(STEPS_FILE)]


def run_steps(commands: Mapping[str, Sequence[str]], timeout_s: float) -> dict[str, dict[str, Any]]:
    """The answer of each command, all run at the same time; one that gives none is described in its place."""
    deadline = time.monotonic() + timeout_s
    with ExitStack() as files:
        started = {name: _start(command, files) for name, command in commands.items()}
        return {name: _answer(step, deadline, timeout_s) for name, step in started.items()}


def _start(command: Sequence[str], files: ExitStack) -> _Started:
    # Files and not pipes: a process that cannot be ended would hold a pipe, and whoever reads it.
    out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))  # noqa: SIM115
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
    )
    files.callback(_end, process)  # of one that is still there, where the caller is interrupted
    return _Started(process, out, err)


def _answer(step: _Started, deadline: float, timeout_s: float) -> dict[str, Any]:
    try:
        code = step.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(step.process)
        return {"state": "hung", "problem": _said(f"no answer within {timeout_s:g} s", step.err)}
    end = f"ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    step.out.seek(0)
    try:
        answer = dict(json.loads(step.out.read()))
    except (TypeError, ValueError):
        return {"state": "crashed", "problem": _said(end, step.err)}
    if code:  # after it had answered, as some libraries do when they are unloaded
        answer["problem"] = "; ".join(part for part in (str(answer.get("problem", "")), end) if part)
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return
    process.kill()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL  # it goes when the driver lets it; Popen must not complain until then


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _said(what: str, err: IO[bytes]) -> str:
    """The event, and the last line that the process wrote on stderr."""
    err.seek(0)
    lines = err.read().decode(errors="replace").strip().splitlines()
    return f"{what}; last it said: {lines[-1][:300]}" if lines else what
