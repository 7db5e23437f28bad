"""Examine the CUDA driver and its GPUs in a separate process, which a broken driver may crash or hang.

It needs neither cuda-bindings nor an engine's library.
"""

import ctypes
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmc.runtime.host.apart import command, run_apart

# The first use of a GPU reads libraries of hundreds of megabytes: making a builder took 7 s on a server with a T4, and
# a small board with a cold disk must not count as hung.
TIMEOUT_S = 90.0
DRIVER_LIBRARY = "libcuda.so.1"
# Constants of cuda.h: CUdevice_attribute.
COMPUTE_MAJOR, COMPUTE_MINOR, INTEGRATED = 75, 76, 18


@dataclass(frozen=True)
class Device:
    """A GPU as the CUDA driver describes it; sizes in bytes; ``free_memory`` is only known for the first one.

    ``integrated`` is True if its memory is the machine's, as on a Jetson.
    """

    index: int
    name: str
    compute_capability: str
    total_memory: int
    free_memory: int | None
    integrated: bool


@dataclass(frozen=True)
class Driver:
    """The CUDA driver: the CUDA ``version`` that it supports, and its GPUs."""

    state: str  # ok, missing, failed (it returned an error), crashed (it ended its process) or hung
    problem: str  # what went wrong
    version: str = ""
    devices: tuple[Device, ...] = ()


def probe_driver(timeout_s: float = TIMEOUT_S) -> Driver:
    """Examine the driver; takes a tenth of a second if there is none."""
    answer = run_apart({"driver": command(f"{__name__}:describe_driver")}, timeout_s)["driver"]
    fields = answer.get("result") or {"state": "failed", **answer}
    return Driver(**{**fields, "devices": tuple(Device(**device) for device in fields.get("devices", ()))})


def describe_driver() -> dict[str, Any]:
    return asdict(driver())


# ---------------------------------------------------------------------------------------------------- the CUDA driver


class DriverError(Exception):
    """A driver call returned an error; the message names both."""


class Calls:
    """The driver's functions with checked results."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    def number(self, name: str, *arguments: Any) -> int:
        """The int that a function writes to its first argument."""
        value = ctypes.c_int()
        self(name, ctypes.byref(value), *arguments)
        return value.value


def driver(load: Callable[[str], Any] = ctypes.CDLL) -> Driver:
    """The CUDA version that the driver supports, and its GPUs."""
    try:
        call = Calls(load(DRIVER_LIBRARY))
    except OSError as error:
        return Driver("missing", str(error))
    driver_info = Driver("ok", "")
    try:
        version = call.number("cuDriverGetVersion")
        driver_info = replace(driver_info, version=f"{version // 1000}.{version % 1000 // 10}")
        call("cuInit", 0)
        devices = tuple(_device(call, index) for index in range(call.number("cuDeviceGetCount")))
        driver_info = replace(driver_info, devices=devices)
        if devices:
            first = replace(devices[0], free_memory=_free_memory(call))
            driver_info = replace(driver_info, devices=(first, *devices[1:]))
    except DriverError as error:
        return replace(driver_info, state="failed", problem=str(error))
    return driver_info


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
    """Free memory of the first device; asking needs a context, which takes memory and time."""
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    device = call.number("cuDeviceGet", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxSetCurrent", context)
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    finally:
        call("cuDevicePrimaryCtxRelease_v2", device)
    return free.value
