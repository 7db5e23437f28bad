"""The steps of a probe, each for a process of its own that may crash or hang without harm to whoever asked.

It imports only the standard library and what it examines, so it starts fast, and nothing else can go wrong.
"""

import contextlib
import ctypes
import glob
import importlib
import importlib.metadata
import io
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

DRIVER_LIBRARY = "libcuda.so.1"
# Of cuda.h: CUdevice_attribute.
COMPUTE_MAJOR, COMPUTE_MINOR, INTEGRATED = 75, 76, 18
# ONNX: y = Identity(x), opset 13, float32 [1]. A provider shows whether it can be loaded when it gets a graph.
IDENTITY = bytes.fromhex(
    "08073a390a120a017812017922084964656e746974793a001201675a0f0a0178120a0a08080112040a02080162"
    "0f0a0179120a0a08080112040a02080142040a00100d"
)


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
    """The CUDA driver: the CUDA ``version`` that it serves, and its GPUs. For ``state`` see :class:`Library`."""

    state: str
    problem: str
    version: str = ""
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class Library:
    """An engine's library, or the Python side of the driver.

    Attributes:
        state: ok, missing (not installed), failed (raised an error), crashed (ended its process) or hung.
        problem: what went wrong, in the library's words where it has any; an ok library may have one too.
        version: its own.
        cuda: major version of the CUDA that it was built for, empty if unknown or none.
        abilities: what it can do here: ``initialised`` (cuda-bindings), the providers and ``cuda`` where that one can
            be loaded (onnxruntime), ``runtime`` and ``builder`` (tensorrt, tensorrt-rtx).
    """

    state: str
    problem: str
    version: str = ""
    cuda: str = ""
    abilities: tuple[str, ...] = ()


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


# ------------------------------------------------------------------------------------------------------------ libraries


def cuda_bindings() -> Library:
    """The Python side of the driver; its major version must be the driver's."""
    bindings = importlib.import_module("cuda.bindings.driver")
    version = importlib.metadata.version("cuda-bindings")
    try:
        code = bindings.cuInit(0)[0]
        problem = f"cuInit: {getattr(code, 'name', code)}" if int(code) else ""
    except (OSError, RuntimeError) as error:
        problem = _first_line(error)
    return Library("ok", problem, version, version.partition(".")[0], () if problem else ("initialised",))


def onnxruntime() -> Library:
    """ONNX Runtime: its providers, and whether CUDA's can be loaded (``cuda``)."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    library = importlib.import_module("onnxruntime")
    providers = list(library.get_available_providers())
    problem = (
        "" if len(_list_installed(r"onnxruntime(-gpu)?")) < 2 else "onnxruntime and onnxruntime-gpu are both installed"
    )
    if "CUDAExecutionProvider" in providers:
        loads = _loads_provider(library, "CUDAExecutionProvider")
        providers += [] if loads else ["cuda"]
        problem = problem or loads
    cuda = str(getattr(library, "cuda_version", "") or "").partition(".")[0]
    return Library("ok", problem, library.__version__, cuda, tuple(providers))


def _loads_provider(library: Any, provider: str) -> str:
    """Nothing if ``provider`` takes a graph, else why it does not."""
    sys.stderr.write(preload_library(library))
    try:
        session = library.InferenceSession(IDENTITY, providers=[provider], enable_fallback=0)
    except Exception as error:  # noqa: BLE001 - the library's own kinds of error
        return _first_line(error)
    return "" if provider in session.get_providers() else f"{provider} cannot be loaded; its reason is on stderr"


def preload_library(library: Any) -> str:
    """Load CUDA's libraries as pip installs them, and say what ONNX Runtime says of it.

    It looks for them beside itself only, and not where torch, say, has brought them into another folder of packages;
    what is loaded already it takes.
    """
    load = getattr(library, "preload_dlls", None)
    if load is None:
        return ""
    folders = (sorted(glob.glob(f"{glob.escape(path)}/nvidia/*/lib")) for path in dict.fromkeys(sys.path))
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()):  # of one folder it complains of what others have
        for folder in chain.from_iterable(folders):
            load(directory=folder)
    with contextlib.redirect_stdout(said):
        load()
    return said.getvalue()


def tensorrt(name: str) -> Library:
    """TensorRT or TensorRT-RTX: ``runtime`` and ``builder`` if these can be made here."""
    library = importlib.import_module(name)
    abilities: list[str] = []
    problems: list[str] = []
    logger = library.Logger(library.Logger.ERROR)
    for ability, make in (("runtime", "Runtime"), ("builder", "Builder")):
        try:
            if getattr(library, make)(logger) is not None:
                abilities.append(ability)
        except (RuntimeError, TypeError) as error:  # what pybind11 makes of a null pointer
            problems.append(f"{make}: {_first_line(error)}")
    built_for = [found[-2:] for found in _list_installed(f"{name.replace('_', '[-_]')}[-_]cu1[0-9]")]
    cuda = built_for[0] if built_for else ""
    return Library("ok", "; ".join(problems), library.__version__, cuda, tuple(abilities))


def _list_installed(pattern: str) -> list[str]:
    names = (distribution.metadata["Name"] or "" for distribution in importlib.metadata.distributions())
    return sorted({name for name in names if re.fullmatch(pattern, name)})


# -------------------------------------------------------------------------------------------------------------- a step

EXAMINED = ("cuda", "cuda.bindings", "cuda.bindings.driver", "onnxruntime", "tensorrt", "tensorrt_rtx")
STEPS: dict[str, Callable[[], Driver | Library]] = {
    "driver": driver,
    "cuda-bindings": cuda_bindings,
    "onnxruntime": onnxruntime,
    "tensorrt": partial(tensorrt, "tensorrt"),
    "tensorrt-rtx": partial(tensorrt, "tensorrt_rtx"),
}


def take(name: str) -> dict[str, Any]:
    try:
        return asdict(STEPS[name]())
    except ModuleNotFoundError as error:
        absent = error.name in EXAMINED
        return {"state": "missing" if absent else "failed", "problem": _first_line(error)}
    except Exception as error:  # noqa: BLE001 - whatever a broken library raises is what was asked for
        return {"state": "failed", "problem": f"{type(error).__name__}: {_first_line(error)}"}


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
