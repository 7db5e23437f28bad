"""The CUDA driver and its GPUs, examined by a process of its own, which a broken driver may end or hold for ever.

It needs neither cuda-bindings nor an engine's library.
"""

import ctypes
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmc.runtime.host.apart import command, run_apart

# A first use of a GPU reads libraries of hundreds of megabytes: a builder took 7 s to make on a server with a T4, and a
# small board with a cold disk is not to be taken for hanging.
TIMEOUT_S = 90.0
DRIVER_LIBRARY = "libcuda.so.1"
# Of cuda.h: CUdevice_attribute.
COMPUTE_MAJOR, COMPUTE_MINOR, INTEGRATED = 75, 76, 18


@dataclass(frozen=True)
class Device:
    """A GPU as the CUDA driver describes it; bytes, and ``free_memory`` only of the first one.

    ``integrated`` tells that its memory is the machine's, as on a Jetson.
    """

    index: int
    name: str
    compute_capability: str
    total_memory: int
    free_memory: int | None
    integrated: bool


@dataclass(frozen=True)
class Driver:
    """The CUDA driver: the CUDA ``version`` that it serves, and its GPUs.

    Attributes:
        state: ok, missing (there is none), failed (it returned an error), crashed (it ended its process) or hung.
        problem: what went wrong.
    """

    state: str
    problem: str
    version: str = ""
    devices: tuple[Device, ...] = ()


def probe_driver(timeout_s: float = TIMEOUT_S) -> Driver:
    """Examine the driver; takes a tenth of a second where there is none."""
    answer = run_apart({"driver": command(f"{__name__}:describe_driver")}, timeout_s)["driver"]
    found = answer.get("result") or {"state": "failed", **answer}
    return Driver(**{**found, "devices": tuple(Device(**device) for device in found.get("devices", ()))})


def describe_driver() -> dict[str, Any]:
    return asdict(driver())


# ---------------------------------------------------------------------------------------------------- the CUDA driver


class DriverError(Exception):
    """A call of the driver returned an error; the message names the call and the error."""


class Calls:
    """The driver's functions, each checked."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    def number(self, name: str, *arguments: Any) -> int:
        """The int that a function writes where its first argument points."""
        value = ctypes.c_int()
        self(name, ctypes.byref(value), *arguments)
        return value.value


def driver(load: Callable[[str], Any] = ctypes.CDLL) -> Driver:
    """The CUDA version that the driver serves, and its GPUs."""
    try:
        call = Calls(load(DRIVER_LIBRARY))
    except OSError as error:
        return Driver("missing", str(error))
    found = Driver("ok", "")
    try:
        version = call.number("cuDriverGetVersion")
        found = replace(found, version=f"{version // 1000}.{version % 1000 // 10}")
        call("cuInit", 0)
        devices = tuple(_device(call, index) for index in range(call.number("cuDeviceGetCount")))
        found = replace(found, devices=devices)
        if devices:
            first = replace(devices[0], free_memory=_free_memory(call))
            found = replace(found, devices=(first, *devices[1:]))
    except DriverError as error:
        return replace(found, state="failed", problem=str(error))
    return found


def _device(call: Calls, index: int) -> Device:
    device, name, size = call.number("cuDeviceGet", index), ctypes.create_string_buffer(256), ctypes.c_size_t()
    call("cuDeviceGetName", name, 256, device)
    call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
    major, minor, integrated = (
        call.number("cuDeviceGetAttribute", attribute, device)
        for attribute in (COMPUTE_MAJOR, COMPUTE_MINOR, INTEGRATED)
    )
    return Device(index, name.value.decode(), f"{major}.{minor}", size.value, None, bool(integrated))


def _free_memory(call: Calls) -> int:
    """Free memory of the first device; the query needs a context, which takes memory and time itself."""
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    device = call.number("cuDeviceGet", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxSetCurrent", context)
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    finally:
        call("cuDevicePrimaryCtxRelease_v2", device)
    return free.value
