"""What the machine is, and how fast it copies memory: that is what decoding is held against."""

import importlib
import importlib.metadata
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_check.work import NotHereError

PACKAGES = (
    "llmc",
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "onnxruntime-gpu",
    "cuda-bindings",
    "tensorrt",
    "tensorrt-cu12",
    "tensorrt-cu13",
    "tensorrt-rtx",
    "tensorrt-rtx-cu13",
    "torch",
    "transformers",
)
PROBE_S = 120.0
# Of each buffer, far beyond any cache: and no more than a quarter of what is free.
COPY_BYTES = 1 << 30
COPIES, ROUNDS = 20, 5
HOST_BYTES, HOST_COPIES = 1 << 28, 2
PROVIDER = "CUDAExecutionProvider"


def machine() -> dict[str, Any]:
    """The machine, its GPUs and libraries as the probe finds them, installed versions, the commit of this tree."""
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "commit": commit(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "probe": probed(),
    }


def installed(name: str) -> str | None:
    """Version of a distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def need(*names: str) -> None:
    """Refuse to go on without the distributions ``names``.

    Raises:
        NotHereError: with those that are not installed.
    """
    missing = [name for name in names if installed(name) is None]
    if missing:
        raise NotHereError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed")


def commit() -> str | None:
    """The commit of the tree that this script lies in, with a plus sign where files of it were changed."""
    root = Path(__file__).resolve().parents[2]
    found = [_git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=no")]
    return None if found[0] is None else found[0] + ("+" if found[1] else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def probed() -> dict[str, Any]:
    """What ``llmc doctor`` bases its words on."""
    from llmc.runtime.host.probe import probe

    return asdict(probe(timeout_s=PROBE_S))


def bandwidth(on_device: bool) -> dict[str, Any]:
    """Bytes per second of a large copy, read and written bytes counted, and what copied them.

    Raises:
        NotHereError: there is no GPU.
    """
    return _device_bandwidth() if on_device else _host_bandwidth()


def _device_bandwidth() -> dict[str, Any]:
    with closing(opened_driver()) as driver, ExitStack() as taken:
        size = min(COPY_BYTES, driver.memory_info()[0] // 4)
        source, target = driver.alloc(size), driver.alloc(size)
        for address in (source, target):
            taken.callback(driver.free, address)
        stream = driver.stream()
        taken.callback(driver.destroy_stream, stream)
        driver.fill(source, size, stream)

        def copies() -> None:
            for _ in range(COPIES):
                driver.copy(target, source, size, stream)
            driver.synchronize(stream)

        rates = rates_of(copies, 2 * size * COPIES)
        return {"kind": "device", "device": asdict(driver.device), "buffer_bytes": size, **rates}


def opened_driver() -> Any:
    """The CUDA driver.

    Raises:
        NotHereError: there is none, or it has no GPU.
    """
    from llmc.errors import GpuError
    from llmc.runtime.host.cuda import open_driver

    try:
        return open_driver()
    except GpuError as error:
        raise NotHereError(str(error)) from error


def _host_bandwidth() -> dict[str, Any]:
    import numpy as np

    source, target = np.ones(HOST_BYTES // 8), np.zeros(HOST_BYTES // 8)

    def copies() -> None:
        for _ in range(HOST_COPIES):
            np.copyto(target, source)

    rates = rates_of(copies, 2 * HOST_BYTES * HOST_COPIES)
    return {"kind": "host", "device": None, "buffer_bytes": HOST_BYTES, **rates}


def rates_of(copies: Callable[[], None], moved: int) -> dict[str, float]:
    """Bytes per second of the best and of the median of some rounds, after one that is not counted."""
    copies()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        copies()
        seconds.append(time.perf_counter() - start)
    return {"bytes_per_s": moved / min(seconds), "median_bytes_per_s": moved / statistics.median(seconds)}


def library(target: str, emulate: bool) -> dict[str, Any]:
    """Name and version of the library that builds and runs bundles of ``target``.

    Raises:
        NotHereError: it is not installed, broken, too old, or has no kernels for GPUs.
    """
    cuda = _onnxruntime if emulate else _onnxruntime_cuda
    return {"cpu": _onnxruntime, "cuda": cuda}.get(target, _tensorrt)(target)


def _onnxruntime(target: str) -> dict[str, Any]:
    from llmc.runtime.sessions.onnxruntime.cpu import import_onnxruntime

    runtime = import_onnxruntime("0")
    return {
        "library": "onnxruntime",
        "version": runtime.__version__,
        "providers": runtime.get_available_providers(),
    }


def _onnxruntime_cuda(target: str) -> dict[str, Any]:
    found = _onnxruntime(target)
    if PROVIDER not in found["providers"]:
        raise NotHereError(f"onnxruntime {found['version']} has no {PROVIDER}: pip install '.[gpu]' in llmc's folder")
    return found


def _tensorrt(target: str) -> dict[str, Any]:
    from llmc.errors import GpuError
    from llmc.runtime.sessions.tensorrt.library import library_version, load_library

    try:
        found = load_library(target)
    except GpuError as error:
        raise NotHereError(str(error)) from error
    return {"library": found.__name__, "version": library_version(found), "python": sys.version.split()[0]}
