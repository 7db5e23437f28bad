"""A GPU in host memory that enforces CUDA's rules: what ``host.cuda`` promises, and what a session may not do.

Addresses are real, so another engine can compute on them. Work is queued per stream and done by ``synchronize``: who
reads results before sees what was there before. Memory begins as NaNs, and must not be touched once it is freed.
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from llmc.errors import GpuError, ResourceError
from llmc.runtime.host.cuda import DeviceInfo

ORIN = DeviceInfo("Orin", "8.7", 8 * 2**30, integrated=True, driver_version="12.6")
SERVER = DeviceInfo("NVIDIA L4", "8.9", 24 * 2**30, integrated=False, driver_version="13.0")
ALIGNMENT = 256
Work = Callable[[], None]


class RuleBrokenError(AssertionError):
    """The code under test did what CUDA does not allow, or what would compute nonsense."""


@dataclass
class Block:
    """One allocation; ``kind`` is device or host, ``mapped`` tells that the device was given its address."""

    memory: Any
    size: int
    kind: str
    mapped: bool = False


@dataclass
class GlobalCapture:
    """A recording in global mode, as ONNX Runtime makes them; ``spoiled`` by a thread of another library."""

    driver: "FakeDriver"
    stream: int
    spoiled: bool = False


class FakeDriver:
    """A :class:`llmc.runtime.host.cuda.Driver` without a GPU.

    Args:
        device: what it says it is; ``total_memory`` limits what can be allocated.
        fail_alloc: number of the allocation that finds no memory, the first is 1; 0 for none.
        lose: number of the call at which the context is lost, the first is 1; 0 for none.

    Attributes:
        calls: how often each function was called.
        lost: whether the context is gone.
        copied: bytes of all copies that were done, by ``host`` or ``device`` of target and source.
        global_captures: recordings in global mode, of all GPUs and threads of the process.
    """

    global_captures: ClassVar[list[GlobalCapture]] = []

    def __init__(self, device: DeviceInfo = SERVER, *, fail_alloc: int = 0, lose: int = 0) -> None:
        self.device = device
        self.fail_alloc = fail_alloc
        self.lose = lose
        self.calls: Counter[str] = Counter()
        self.copied: Counter[tuple[str, str]] = Counter()
        self.blocks: dict[int, Block] = {}
        self.closed = False
        self.lost = False
        self._count = 0
        self._allocations = 0
        self._streams: dict[int, list[Work]] = {}
        self._graphs: dict[int, list[Work]] = {}
        self._capturing: dict[int, list[Work]] = {}
        self._next = 1
        self._threads: set[int] = set()

    @property
    def allocated(self) -> int:
        """Bytes that were not given back."""
        return sum(block.size for block in self.blocks.values())

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that were not given back."""
        return sum(block.size for block in self.blocks.values() if block.kind == "device")

    @property
    def leaks(self) -> list[str]:
        """What was not given back: memory, streams, graphs."""
        named = {"memory": self.blocks, "streams": self._streams, "graphs": self._graphs}
        return [name for name, kept in named.items() if kept]

    def _called(self, name: str) -> None:
        self._count += 1
        self.calls[name] += 1
        if self.closed:
            raise RuleBrokenError(f"{name} after close")
        self.lost |= self._count == self.lose
        if self.lost:
            raise GpuError(f"the GPU's context was lost while calling {name}", lost=True)

    def begin_global_capture(self, stream: int) -> GlobalCapture:
        """Record this thread's work as ONNX Runtime does; the recording has to be ended, or dropped."""
        capture = GlobalCapture(self, stream)
        self.global_captures.append(capture)
        return capture

    def drop_capture(self, stream: int) -> None:
        self._called("drop_capture")
        self.global_captures[:] = [it for it in self.global_captures if (it.driver, it.stream) != (self, stream)]

    def records_globally(self, stream: int) -> bool:
        """Whether such a recording of the stream was not ended yet."""
        return any((it.driver, it.stream) == (self, stream) for it in self.global_captures)

    def kill(self) -> None:
        """Lose the context at the next call."""
        self.lose = self._count + 1

    def find(self, address: int, size: int) -> Block:
        """The allocation that holds these bytes.

        Raises:
            RuleBrokenError: they lie outside of every living allocation.
        """
        for start, block in self.blocks.items():
            if start <= address and address + size <= start + block.size:
                return block
        raise RuleBrokenError(f"{size} bytes at {address} lie in no allocation: freed, too small, or never pinned")

    def check_device(self, address: int, size: int) -> None:
        """Refuse addresses that a kernel cannot use: host memory that was not mapped, or memory that is gone."""
        block = self.find(address, size)
        if block.kind == "host" and not block.mapped:
            raise RuleBrokenError(f"a kernel would touch host memory at {address}, which is not mapped to the device")

    def is_active(self) -> bool:
        """Whether the context is current on this thread."""
        return threading.get_ident() in self._threads

    def submit(self, stream: int, work: Work) -> None:
        """Queue work, or record it while the stream is captured."""
        if stream not in self._streams:
            raise RuleBrokenError(f"stream {stream} is the default one, or was destroyed")
        self._capturing.get(stream, self._streams[stream]).append(work)

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream's work is recorded at present."""
        return stream in self._capturing

    def _forbid_in_capture(self, name: str) -> None:
        if self._capturing:
            raise GpuError(f"{name} failed (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900); see llmc doctor")

    def activate(self) -> None:
        self._called("activate")
        self._threads.add(threading.get_ident())

    def memory_info(self) -> tuple[int, int]:
        self._called("memory_info")
        return self.device.total_memory - self.device_bytes, self.device.total_memory

    def alloc(self, size: int) -> int:
        self._called("alloc")
        self._forbid_in_capture("allocating")
        if size > self.device.total_memory - self.device_bytes:
            raise ResourceError(f"allocating {size} bytes of GPU memory failed")
        return self._take(size, "device")

    def alloc_host(self, size: int) -> int:
        self._called("alloc_host")
        self._forbid_in_capture("allocating")
        return self._take(size, "host")

    def _take(self, size: int, kind: str) -> int:
        if size <= 0:
            raise RuleBrokenError(f"{size} bytes are asked for: CUDA refuses that")
        self._allocations += 1
        if self._allocations == self.fail_alloc:
            raise ResourceError(f"allocating {size} bytes of GPU memory failed")
        memory = (ctypes.c_char * (size + ALIGNMENT)).from_buffer(bytearray(b"\xff") * (size + ALIGNMENT))
        address = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
        self.blocks[address] = Block(memory, size, kind)
        return address

    def free(self, address: int) -> None:
        self._called("free")
        self._give_back(address, "device")

    def free_host(self, address: int) -> None:
        self._called("free_host")
        self._give_back(address, "host")

    def _give_back(self, address: int, kind: str) -> None:
        if address not in self.blocks or self.blocks[address].kind != kind:
            raise RuleBrokenError(f"{address} is no {kind} memory, or was freed before")
        for stream in list(self._streams):  # cuMemFree waits for the device
            self._run(stream)
        del self.blocks[address]

    def device_address(self, host: int) -> int:
        self._called("device_address")
        if not self.device.integrated:
            raise RuleBrokenError("pinned memory of a discrete GPU is not mapped")
        block = self.find(host, 1)
        if block.kind != "host":
            raise RuleBrokenError(f"{host} is no pinned host memory")
        block.mapped = True
        return host

    def stream(self) -> int:
        self._called("stream")
        self._next += 1
        self._streams[self._next] = []
        return self._next

    def destroy_stream(self, stream: int) -> None:
        self._called("destroy_stream")
        self._run(stream)
        del self._streams[stream]

    def synchronize(self, stream: int) -> None:
        self._called("synchronize")
        self._forbid_in_capture("waiting")
        if stream not in self._streams:
            raise RuleBrokenError(f"there is no stream {stream}")
        self._run(stream)

    def _run(self, stream: int) -> None:
        queue = self._streams[stream]
        while queue:
            queue.pop(0)()

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self.copy_2d(target, size, source, size, size, 1, stream)

    def copy_2d(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        self._called("copy")
        if width > min(target_pitch, source_pitch):
            raise RuleBrokenError(f"rows of {width} bytes are wider than a pitch of {target_pitch} or {source_pitch}")

        def work() -> None:
            kinds = []
            for address, pitch in ((target, target_pitch), (source, source_pitch)):
                kinds.append(self.find(address, pitch * (height - 1) + width).kind)
            self.copied[kinds[0], kinds[1]] += width * height
            for row in range(height):
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

        if width and height:
            self.submit(stream, work)

    def fill(self, address: int, size: int, stream: int) -> None:
        self._called("fill")

        def work() -> None:
            self.find(address, size)
            ctypes.memset(address, 0, size)

        self.submit(stream, work)

    def begin_capture(self, stream: int) -> None:
        self._called("begin_capture")
        if stream in self._capturing:
            raise RuleBrokenError("the stream is captured already")
        self._capturing[stream] = []

    def end_capture(self, stream: int) -> int:
        self._called("end_capture")
        if stream not in self._capturing:
            raise RuleBrokenError("the stream is not captured")
        self._next += 1
        self._graphs[self._next] = self._capturing.pop(stream)
        return self._next

    def launch(self, graph: int, stream: int) -> None:
        self._called("launch")
        if graph not in self._graphs:
            raise RuleBrokenError(f"there is no graph {graph}, or it was destroyed")
        for work in self._graphs[graph]:
            self.submit(stream, work)

    def destroy_graph(self, graph: int) -> None:
        self._called("destroy_graph")
        del self._graphs[graph]

    def close(self) -> None:
        self.global_captures[:] = [it for it in self.global_captures if it.driver is not self]
        self.closed = True


def small(device: DeviceInfo = SERVER, total_memory: int = 2**20) -> DeviceInfo:
    """A GPU with little memory."""
    return replace(device, total_memory=total_memory)


def array_at(address: int, shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray:
    """What lies at an address of the fake's memory."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype, count).reshape(shape)
