"""The calls of the CUDA driver that a session needs: memory, copies, streams and CUDA graphs.

Built on NVIDIA's ``cuda-bindings``, imported when a driver is opened. All work goes to this module's own streams, never
to the default one. Not run on a GPU yet.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from llmc.errors import GpuError, LlmcError, MissingExtraError, ResourceError, install_command, require, text_of

log = logging.getLogger(__name__)

OUT_OF_MEMORY = 2
# After these errors the context, or even the process, is unusable: a kernel accessed wrong memory, the watchdog ended
# it, or the device went away. CUDA's documentation of CUresult lists them.
STICKY = frozenset({4, 46, 201, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 720, 721, 999})
EMULATE = "llmc run, verify and eval take --emulate, which runs a bundle's graph on the CPU, slowly"
# Advice by error code, for errors that mean that no GPU can be used.
ADVICE = {
    34: "libcuda is the stub of the toolkit; remove the toolkit's stubs folder from LD_LIBRARY_PATH",
    46: "the GPU is in use or unavailable; check nvidia-smi for exclusive mode or a process that holds it",
    100: "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES, and start containers with --gpus all; "
    + EMULATE,
    101: "there is no such device; check CUDA_VISIBLE_DEVICES",
    803: "driver and kernel module have different versions; restart the machine",
    999: "the driver failed to start; restart the machine or reload the nvidia kernel modules",
}
MB = 1_000_000
# Bytes of each of the two buffers for timing copies. Smaller ones would stay in a large GPU's cache.
COPIED, LEAST_COPIED = 1 << 30, 64 << 20
COPIES = 20


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU: compute capability (such as 8.7), memory in bytes, and the newest CUDA that the driver supports (13.0).

    An ``integrated`` GPU uses the machine's memory, as on a Jetson. ``index`` is its number among the visible GPUs.
    """

    name: str
    compute_capability: str
    total_memory: int
    integrated: bool
    driver_version: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.compute_capability}), driver for CUDA {self.driver_version}"


class Driver:
    """A GPU through the driver API, in its primary context, which libraries share. Any thread may call it.

    Addresses, streams and graphs are integers; sizes are bytes. ``api`` is the module ``cuda.bindings.driver``,
    ``index`` the number of the GPU among the visible ones.
    """

    def __init__(self, api: Any, index: int = 0) -> None:
        self._api, self._index = api, index
        self._local = threading.local()
        self._lost: str | None = None
        self._context: Any = None
        self._start()
        self._device = self._call(f"finding GPU {index}", "cuDeviceGet", index)
        self._info = self._describe()
        self._context = self._call("opening the GPU", "cuDevicePrimaryCtxRetain", self._device)
        try:
            self.activate()
        except LlmcError:
            self.close()
            raise

    @property
    def device(self) -> DeviceInfo:
        return self._info

    def _start(self) -> None:
        try:
            self._call("starting CUDA", "cuInit", 0)
        except RuntimeError as error:  # raised by cuda-bindings: libcuda is missing, or lacks a function
            raise GpuError(
                f"no NVIDIA driver was found ({' '.join(str(error).split())[:200]}); install it, or build for the "
                f"target cpu; {EMULATE}; llmc doctor lists what else is missing"
            ) from error
        version, needed = int(self._call("asking for the version", "cuDriverGetVersion")), int(self._api.CUDA_VERSION)
        if version // 1000 < needed // 1000:
            raise GpuError(
                f"the driver supports CUDA {_format_version(version)}, the installed cuda-bindings need "
                f"{needed // 1000}.0 or newer; pip install 'cuda-bindings<{needed // 1000}', or update the driver"
            )
        self._version = _format_version(version)

    def _describe(self) -> DeviceInfo:
        attributes = self._api.CUdevice_attribute

        def attribute(name: str) -> int:
            doing = "asking what the GPU is"
            return int(self._call(doing, "cuDeviceGetAttribute", getattr(attributes, name), self._device))

        name = self._call("asking for the GPU's name", "cuDeviceGetName", 100, self._device)
        major = attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR")
        minor = attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR")
        return DeviceInfo(
            name=bytes(name).split(b"\0")[0].decode(errors="replace"),
            compute_capability=f"{major}.{minor}",
            total_memory=int(self._call("asking for the GPU's memory", "cuDeviceTotalMem", self._device)),
            integrated=bool(attribute("CU_DEVICE_ATTRIBUTE_INTEGRATED")),
            driver_version=self._version,
            index=self._index,
        )

    def activate(self) -> None:
        """Prepare this thread for CUDA calls, also those of libraries; needed once per thread.

        While ONNX Runtime records a CUDA graph in global mode, calls of other threads that allocate or wait fail (error
        900) and spoil the recording. Threads in thread-local mode are exempt.
        """
        if not getattr(self._local, "active", False):
            self._call("using the GPU", "cuCtxSetCurrent", self._context)
            thread_local = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            self._call("using the GPU", "cuThreadExchangeStreamCaptureMode", thread_local)
            self._local.active = True

    def memory_info(self) -> tuple[int, int]:
        """Bytes of the GPU's memory: free, and total."""
        free, total = self._call_bound("asking for free memory", "cuMemGetInfo")
        return int(free), int(total)

    def alloc(self, size: int) -> int:
        """Allocate device memory, aligned to at least 256 bytes; its contents are undefined."""
        return int(self._call_bound(f"allocating {size} bytes of GPU memory", "cuMemAlloc", size))

    def free(self, address: int) -> None:
        self._call_bound("freeing GPU memory", "cuMemFree", address)

    def alloc_host(self, size: int) -> int:
        """Allocate pinned host memory; an integrated GPU accesses it in place."""
        flags = int(self._api.CU_MEMHOSTALLOC_PORTABLE)
        if self._info.integrated:
            flags |= int(self._api.CU_MEMHOSTALLOC_DEVICEMAP)
        return int(self._call_bound(f"allocating {size} bytes of pinned memory", "cuMemHostAlloc", size, flags))

    def free_host(self, address: int) -> None:
        self._call_bound("freeing pinned memory", "cuMemFreeHost", address)

    def device_address(self, host: int) -> int:
        """The device's address of pinned host memory; integrated GPUs only."""
        return int(self._call_bound("mapping pinned memory", "cuMemHostGetDevicePointer", host, 0))

    def stream(self) -> int:
        flags = int(self._api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self._call_bound("making a stream", "cuStreamCreate", flags))

    def destroy_stream(self, stream: int) -> None:
        self._call_bound("freeing a stream", "cuStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        """Wait until all work of the stream is done; raise its errors."""
        self._call_bound("waiting for the GPU", "cuStreamSynchronize", stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy bytes in any direction, in stream order: host and device share one address space."""
        self._call_bound("copying", "cuMemcpyAsync", target, source, size, stream)

    def copy_2d(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Copy ``height`` rows of ``width`` bytes whose starts are a pitch apart."""
        order = self._api.CUDA_MEMCPY2D()
        order.srcMemoryType = order.dstMemoryType = self._api.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        order.srcDevice, order.srcPitch = source, source_pitch
        order.dstDevice, order.dstPitch = target, target_pitch
        order.WidthInBytes, order.Height = width, height
        self._call_bound("copying", "cuMemcpy2DAsync", order, stream)

    def fill(self, address: int, size: int, stream: int) -> None:
        self._call_bound("clearing memory", "cuMemsetD8Async", address, 0, size, stream)

    def begin_capture(self, stream: int) -> None:
        """Record this thread's work on the stream; other threads may allocate meanwhile."""
        mode = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call_bound("recording a CUDA graph", "cuStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        graph = self._call_bound("recording a CUDA graph", "cuStreamEndCapture", stream)
        try:
            return int(self._call_bound("preparing a CUDA graph", "cuGraphInstantiate", graph, 0))
        finally:
            self._call_bound("freeing a CUDA graph", "cuGraphDestroy", graph)

    def drop_capture(self, stream: int) -> None:
        """End a failed recording, if the stream still records: otherwise later work would be recorded, not done."""
        with suppress(GpuError):  # the stream does not record, or the same error is raised again
            graph = self._call_bound("dropping a CUDA graph", "cuStreamEndCapture", stream)
            self._call_bound("dropping a CUDA graph", "cuGraphDestroy", graph)

    def launch(self, graph: int, stream: int) -> None:
        """Launch recorded work, in stream order."""
        self._call_bound("launching a CUDA graph", "cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call_bound("freeing a CUDA graph", "cuGraphExecDestroy", graph)

    def copy_bandwidth(self) -> float:
        """Bytes per second that the GPU reads and writes while it copies within its memory.

        Buffers have 1 GiB each, or a quarter of the free memory. Raises ResourceError: too little memory is free.
        """
        free, _ = self.memory_info()
        size = min(COPIED, free // 4)
        if size < LEAST_COPIED:
            raise ResourceError(
                f"timing copies takes {4 * LEAST_COPIED // MB} MB of free GPU memory, {free // MB} MB are free; end "
                "processes that use the GPU"
            )
        with ExitStack() as stack:
            buffers = []
            for _ in range(2):
                buffers.append(self.alloc(size))
                stack.callback(self.free, buffers[-1])
            stream = self.stream()
            stack.callback(self.destroy_stream, stream)
            events = []
            for _ in range(2):
                events.append(self._call_bound("making an event", "cuEventCreate", 0))
                stack.callback(self._call_bound, "freeing an event", "cuEventDestroy", events[-1])
            (target, source), (start, end) = buffers, events
            self.copy(target, source, size, stream)  # the first copy, which wakes the GPU, is not timed
            self._call_bound("timing copies", "cuEventRecord", start, stream)
            for _ in range(COPIES):
                self._call_bound("timing copies", "cuMemcpyDtoDAsync", target, source, size, stream)
            self._call_bound("timing copies", "cuEventRecord", end, stream)
            self.synchronize(stream)
            milliseconds = float(self._call_bound("timing copies", "cuEventElapsedTime", start, end))
        return 2 * COPIES * size / (milliseconds / 1000)

    def close(self) -> None:
        """Release the primary context; closing twice is harmless."""
        if self._context is not None:
            self._context = None
            self._local = threading.local()
            with suppress(LlmcError):  # a lost context cannot be released
                self._call("closing the GPU", "cuDevicePrimaryCtxRelease", self._device)

    def _call_bound(self, doing: str, function: str, *arguments: Any) -> Any:
        """Call the driver with the context current: this thread may not have used the GPU before."""
        if self._lost is not None:
            raise GpuError(self._lost, lost=True)
        if self._context is None:
            raise GpuError(f"{doing} failed: the GPU was closed; load the bundle again")
        self.activate()
        return self._call(doing, function, *arguments)

    def _call(self, doing: str, function: str, *arguments: Any) -> Any:
        """The results of an API call without its CUresult: nothing, one value, or a tuple."""
        call: Callable[..., tuple[Any, ...]] = getattr(self._api, function)
        try:
            code, *values = call(*arguments)
        except ValueError as error:  # the driver is newer than the bindings and returned a code unknown to them
            raise GpuError(f"{doing} failed ({error}); see llmc doctor") from error
        if int(code):
            raise self._error(doing, int(code), _name(code))
        return values[0] if len(values) == 1 else tuple(values)

    def _error(self, doing: str, code: int, name: str) -> LlmcError:
        if code == OUT_OF_MEMORY:
            return ResourceError(f"{doing} failed: {self._free()}; lower the context or the batch, or free GPU memory")
        advice = ADVICE.get(code)
        if code in STICKY and self._context is not None:
            self._lost = (
                f"the GPU's context was lost while {doing} ({name}); restart the process, and check dmesg for Xid "
                "messages if it happens twice"
            )
            return GpuError(self._lost, lost=True)
        return GpuError(f"{doing} failed ({name})" + (f": {advice}" if advice else "; see llmc doctor"))

    def _free(self) -> str:
        code, *values = self._api.cuMemGetInfo()
        return "no memory is left" if int(code) else f"{int(values[0]) // MB} of {int(values[1]) // MB} MB are free"


def open_driver(index: int = 0) -> Driver:
    """Open a visible GPU by its number. Raises MissingExtraError, GpuError: what is missing or broken, with advice."""
    try:
        api = require("cuda.bindings.driver", "gpu")
    except MissingExtraError as error:
        raise MissingExtraError(
            "cuda-bindings is not installed; it is in the extras 'tensorrt', 'tensorrt-rtx' and 'gpu': "
            + install_command("tensorrt")
        ) from error
    except Exception as error:  # a broken installation raises anything
        raise GpuError(
            f"cuda-bindings is installed and cannot be loaded ({text_of(error)}): pip uninstall cuda-bindings, then "
            + install_command("tensorrt")
        ) from error
    return Driver(api, index)


def _format_version(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _name(code: Any) -> str:
    """CUDA_ERROR_UNKNOWN (999), or only the number if the bindings do not know it."""
    name = getattr(code, "name", "")
    return f"{name}, {int(code)}" if name else f"CUDA error {int(code)}"
