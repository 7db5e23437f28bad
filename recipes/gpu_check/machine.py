"""What the machine is, and what its driver does without any engine: memory, copies, recorded work."""

import ctypes
import importlib.metadata
import platform
import re
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any

import numpy as np

from gpu_check.steps import NotHereError, Options

PACKAGES = re.compile(r"llmc|numpy|onnx|tensorrt|cuda|nvidia|torch|transformers", re.IGNORECASE)
PROBE_S = 120.0
# Of each buffer, far beyond any cache: and no more than an eighth of what is free.
COPY_BYTES = 1 << 30
COPIES, ROUNDS, ROWS = 20, 5, 16


def machine(options: Options) -> dict[str, Any]:
    """The machine, its GPUs and libraries as the probe finds them, and versions of what is installed."""
    from llmc.runtime.host.probe import probe

    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    packages = {name: installed[name] for name in sorted(installed) if PACKAGES.search(name)}
    return {"platform": platform.platform(), "packages": packages, "probe": asdict(probe(timeout_s=PROBE_S))}


def driver(options: Options) -> dict[str, Any]:
    """Allocation, pinned memory, copies, a resized cache, recorded copies: rates, times, and what came out wrong."""
    from llmc.errors import GpuError
    from llmc.runtime.host import cuda

    try:
        gpu = cuda.open_driver()
    except GpuError as error:
        raise NotHereError(str(error)) from error
    with closing(gpu), ExitStack() as taken:
        return Rehearsal(gpu, taken).results()


class Rehearsal:
    """Buffers of one size on both sides, and what a session does with such."""

    def __init__(self, gpu: Any, taken: ExitStack) -> None:
        self.gpu, self.free = gpu, gpu.memory_info()[0]
        self.size = min(COPY_BYTES, self.free // 8) // 4096 * 4096
        start = time.perf_counter()
        self.source, self.target = (self._taken(taken, gpu.alloc, gpu.free) for _ in range(2))
        self.alloc_s = (time.perf_counter() - start) / 2
        start = time.perf_counter()
        self.up, self.down = (self._taken(taken, gpu.alloc_host, gpu.free_host) for _ in range(2))
        self.pinned_alloc_s = (time.perf_counter() - start) / 2
        self.stream = gpu.stream()
        taken.callback(gpu.destroy_stream, self.stream)
        self.given, self.got = (
            np.frombuffer((ctypes.c_ubyte * self.size).from_address(place), np.uint8) for place in (self.up, self.down)
        )
        self.given[:] = np.random.default_rng(0).integers(0, 256, self.size, np.uint8)

    def _taken(self, taken: ExitStack, take: Callable[[int], int], give: Callable[[int], None]) -> int:
        place = take(self.size)
        taken.callback(give, place)
        return place

    def results(self) -> dict[str, Any]:
        """Everything, in the order in which it is of use to the next."""
        found: dict[str, Any] = {
            "device": asdict(self.gpu.device),
            "free_bytes": self.free,
            "buffer_bytes": self.size,
            "alloc_s": self.alloc_s,
            "pinned_alloc_s": self.pinned_alloc_s,
            "host_to_device": self.copies(self.source, self.up, 2),
            "on_device": self.copies(self.target, self.source, COPIES),
            "device_to_host": self.copies(self.down, self.target, 2),
        }
        wrong = [] if np.array_equal(self.given, self.got) else ["what came down differs from what went up"]
        found["resize"], resized = self.resize()
        wrong += [] if resized else ["rows of the cache are not what they were after it was resized"]
        found["launches_s"], replayed = self.replay()
        wrong += [] if replayed else ["recorded copies, launched as A, B, A, left something else"]
        return found | {"problems": wrong}

    def copies(self, target: int, source: int, count: int) -> dict[str, float]:
        """Rates of some copies of everything."""

        def run() -> None:
            for _ in range(count):
                self.gpu.copy(target, source, self.size, self.stream)
            self.gpu.synchronize(self.stream)

        return rates_of(run, 2 * self.size * count)

    def read(self, size: int) -> Any:
        """What lies at the beginning of the target."""
        self.gpu.copy(self.down, self.target, size, self.stream)
        self.gpu.synchronize(self.stream)
        return self.got[:size]

    def resize(self) -> tuple[dict[str, float], bool]:
        """Rows moved to where each is twice as long."""
        pitch = self.size // 2 // ROWS
        self.gpu.fill(self.target, self.size, self.stream)

        def grow() -> None:
            self.gpu.copy_2d(self.target, 2 * pitch, self.source, pitch, pitch, ROWS, self.stream)
            self.gpu.synchronize(self.stream)

        rates = rates_of(grow, 2 * pitch * ROWS)
        rows, wanted = self.read(2 * pitch * ROWS).reshape(ROWS, 2 * pitch), self.given[: pitch * ROWS]
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
