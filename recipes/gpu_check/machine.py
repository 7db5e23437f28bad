"""The machine, and its driver without any engine: memory, copies, recorded work."""

import ctypes
import importlib.metadata
import platform
import re
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gpu_check.steps import NotHereError
from llmc.errors import GpuError
from llmc.runtime.host import cuda
from llmc.runtime.host.probe import probe

PACKAGES = re.compile(r"llmc|numpy|onnx|tensorrt|cuda|nvidia|torch|transformers", re.IGNORECASE)
PROBE_S = 120.0
# Of each buffer, far beyond any cache: and no more than an eighth of what is free.
COPY_BYTES = 1 << 30
COPIES, ROUNDS, ROWS = 20, 5, 16


def machine(work: Path) -> dict[str, Any]:
    """The machine, its GPUs and libraries as the probe finds them, and versions of what is installed."""
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    packages = {name: installed[name] for name in sorted(installed) if PACKAGES.search(name)}
    return {"platform": platform.platform(), "packages": packages, "probe": asdict(probe(timeout_s=PROBE_S))}


def driver(work: Path) -> dict[str, Any]:
    """Allocation, pinned memory, copies, a resized cache, recorded copies: rates, times, and what came out wrong."""
    try:
        gpu = cuda.open_driver()
    except GpuError as error:
        raise NotHereError(str(error)) from error
    with closing(gpu), ExitStack() as taken:
        free, total = gpu.memory_info()
        size = min(COPY_BYTES, free // 8) // 4096 * 4096
        places, taking = [], []
        for take, give in 2 * [(gpu.alloc, gpu.free)] + 2 * [(gpu.alloc_host, gpu.free_host)]:
            start = time.perf_counter()
            places.append(take(size))
            taking.append(time.perf_counter() - start)
            taken.callback(give, places[-1])
        stream = gpu.stream()
        taken.callback(gpu.destroy_stream, stream)
        facts = {"device": asdict(gpu.device), "free_bytes": free, "total_bytes": total, "buffer_bytes": size}
        return {**facts, "alloc_s": taking[:2], "pinned_alloc_s": taking[2:], **Copies(gpu, stream, size, places).all()}


class Copies:
    """Two buffers on the device and two pinned ones, all of ``size`` bytes, and what a session does with such."""

    def __init__(self, gpu: Any, stream: int, size: int, places: list[int]) -> None:
        self.gpu, self.stream, self.size = gpu, stream, size
        self.source, self.target, self.up, self.down = places
        given, self.got = (np.frombuffer((ctypes.c_ubyte * size).from_address(p), np.uint8) for p in places[2:])
        given[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        self.given = given

    def all(self) -> dict[str, Any]:
        """Rates and times; each begins with what the one before has left."""
        found: dict[str, Any] = {
            "host_to_device": self.copied(self.source, self.up, 2),
            "on_device": self.copied(self.target, self.source, COPIES),
            "device_to_host": self.copied(self.down, self.target, 2),
        }
        wrong = [] if np.array_equal(self.given, self.got) else ["what came down differs from what went up"]
        found["resize"], resized = self.resize()
        found["launches_s"], replayed = self.replay()
        wrong += [] if resized else ["rows of the cache are not what they were after it was resized"]
        wrong += [] if replayed else ["recorded copies, launched as A, B, A, left something else"]
        return found | {"problems": wrong}

    def copied(self, target: int, source: int, count: int) -> dict[str, float]:
        """Rates of some copies of everything."""
        return self.rates(lambda: [self.gpu.copy(target, source, self.size, self.stream) for _ in range(count)], count)

    def rates(self, queue: Callable[[], Any], count: float) -> dict[str, float]:
        """Rates of what moves so many times the size."""

        def run() -> None:
            queue()
            self.gpu.synchronize(self.stream)

        return rates_of(run, int(2 * self.size * count))

    def read(self, size: int) -> Any:
        """The bytes at the beginning of the target."""
        self.gpu.copy(self.down, self.target, size, self.stream)
        self.gpu.synchronize(self.stream)
        return self.got[:size]

    def resize(self) -> tuple[dict[str, float], bool]:
        """Rows moved to where each is twice as long."""
        pitch = self.size // 2 // ROWS
        self.gpu.fill(self.target, self.size, self.stream)
        places = self.target, 2 * pitch, self.source, pitch, pitch, ROWS, self.stream
        rates = self.rates(lambda: self.gpu.copy_2d(*places), 0.5)
        rows, wanted = self.read(self.size).reshape(ROWS, 2 * pitch), self.given[: pitch * ROWS]
        return rates, np.array_equal(rows[:, :pitch].ravel(), wanted) and not rows[:, pitch:].any()

    def replay(self) -> tuple[list[float], bool]:
        """Two recorded copies into the same place, A and B, launched as A, B, A."""
        half, graphs, seconds, right = self.size // 2, [], [], True
        for offset in (0, half):
            self.gpu.begin_capture(self.stream)
            self.gpu.copy(self.target, self.source + offset, half, self.stream)
            graphs.append(self.gpu.end_capture(self.stream))
        for number in (0, 1, 0):
            start = time.perf_counter()
            self.gpu.launch(graphs[number], self.stream)
            self.gpu.synchronize(self.stream)
            seconds.append(time.perf_counter() - start)
            right &= np.array_equal(self.read(half), self.given[number * half : (number + 1) * half])
        for graph in graphs:
            self.gpu.destroy_graph(graph)
        return seconds, right


def rates_of(copies: Callable[[], None], moved: int) -> dict[str, float]:
    """Bytes per second of the best and of the median of some rounds, after one that is not counted."""
    copies()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        copies()
        seconds.append(time.perf_counter() - start)
    return {"bytes_per_s": moved / min(seconds), "median_bytes_per_s": moved / statistics.median(seconds)}
