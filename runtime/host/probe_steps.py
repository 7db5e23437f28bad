"""The steps of a probe, each in a process of its own that may crash or hang without harm to whoever asked.

Runs as a script, ``python probe_steps.py STEP`` or ``python probe_steps.py import MODULE``, and writes one JSON object:
``state`` (ok, missing or failed), a ``problem`` in words, and what the step found. It imports only the standard library
and what it examines, so that it starts fast and nothing but the examined library can go wrong.
"""

import ctypes
import importlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

Found = dict[str, Any]

DRIVER_LIBRARY = "libcuda.so.1"
# Of cuda.h: CUdevice_attribute.
COMPUTE_MAJOR, COMPUTE_MINOR, INTEGRATED = 75, 76, 18
# What the form "native" of a TensorRT engine is made of; see llmc.bundle.EngineConfig.
NATIVE = ("add_kv_cache_update", "add_attention", "add_rotary_embedding", "add_normalization_v2")
# ONNX: y = Identity(x), opset 13, float32 [1]. A provider shows whether it can be loaded when it gets a graph.
IDENTITY = bytes.fromhex(
    "08073a390a120a017812017922084964656e746974793a001201675a0f0a0178120a0a08080112040a02080162"
    "0f0a0179120a0a08080112040a02080142040a00100d"
)


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
            raise DriverError(f"{name}: {self._name(code)} ({code})")

    def number(self, name: str, *arguments: Any) -> int:
        """The int that a function writes where its first argument points."""
        value = ctypes.c_int()
        self(name, ctypes.byref(value), *arguments)
        return value.value

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or b"unknown error").decode()


def driver(load: Callable[[str], Any] = ctypes.CDLL) -> Found:
    """The CUDA version that the driver serves, and its GPUs."""
    try:
        call = Calls(load(DRIVER_LIBRARY))
    except OSError as error:
        return {"state": "missing", "problem": str(error)}
    found: Found = {"version": "", "devices": []}
    try:
        version = call.number("cuDriverGetVersion")
        found["version"] = f"{version // 1000}.{version % 1000 // 10}"
        call("cuInit", 0)
        found["devices"] = [_device(call, index) for index in range(call.number("cuDeviceGetCount"))]
        if found["devices"]:
            found["devices"][0]["free_memory"] = _free_memory(call)
    except DriverError as error:
        return {"state": "failed", "problem": str(error), **found}
    return {"state": "ok", "problem": "", **found}


def _device(call: Calls, index: int) -> Found:
    device, name, size = call.number("cuDeviceGet", index), ctypes.create_string_buffer(256), ctypes.c_size_t()
    call("cuDeviceGetName", name, 256, device)
    call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
    major, minor, integrated = (
        call.number("cuDeviceGetAttribute", attribute, device)
        for attribute in (COMPUTE_MAJOR, COMPUTE_MINOR, INTEGRATED)
    )
    return {
        "index": index,
        "name": name.value.decode(),
        "compute_capability": f"{major}.{minor}",
        "total_memory": size.value,
        "free_memory": None,
        "integrated": bool(integrated),
    }


def _free_memory(call: Calls) -> int:
    """Of the first device; asking takes a context, which takes memory and time itself."""
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


def cuda_bindings() -> Found:
    """The Python side of the driver; its major version must be the driver's."""
    bindings = importlib.import_module("cuda.bindings.driver")
    version = importlib.metadata.version("cuda-bindings")
    found: Found = {"version": version, "cuda": version.partition(".")[0], "abilities": []}
    try:
        code = bindings.cuInit(0)[0]
    except (OSError, RuntimeError) as error:
        return {"state": "ok", "problem": _first_line(error), **found}
    if int(code):
        return {"state": "ok", "problem": f"cuInit: {getattr(code, 'name', code)}", **found}
    return {"state": "ok", "problem": "", **found, "abilities": ["initialised"]}


def onnxruntime() -> Found:
    """ONNX Runtime: its providers, and whether CUDA's can be loaded (``cuda``)."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    library = importlib.import_module("onnxruntime")
    providers = list(library.get_available_providers())
    problem = "" if len(_installed(r"onnxruntime(-gpu)?")) < 2 else "onnxruntime and onnxruntime-gpu are both installed"
    if "CUDAExecutionProvider" in providers:
        loads = _loads_provider(library, "CUDAExecutionProvider")
        providers += [] if loads else ["cuda"]
        problem = problem or loads
    cuda = str(getattr(library, "cuda_version", "") or "").partition(".")[0]
    return {"state": "ok", "problem": problem, "version": library.__version__, "cuda": cuda, "abilities": providers}


def _loads_provider(library: Any, provider: str) -> str:
    """Nothing if ``provider`` takes a graph, else why it does not."""
    preload = getattr(library, "preload_dlls", None)
    if preload is not None:
        preload()  # CUDA's libraries as pip installs them
    try:
        session = library.InferenceSession(IDENTITY, providers=[provider])
    except Exception as error:  # noqa: BLE001 - the library's own kinds of error
        return _first_line(error)
    return "" if provider in session.get_providers() else f"{provider} cannot be loaded; its reason is on stderr"


def tensorrt(name: str = "tensorrt") -> Found:
    """TensorRT or TensorRT-RTX: ``native`` if the API has what that form is made of, ``runtime`` and ``builder`` if
    these can be made here."""
    library = importlib.import_module(name)
    network = getattr(library, "INetworkDefinition", None)
    abilities = ["native"] if all(hasattr(network, member) for member in NATIVE) else []
    problems = []
    logger = library.Logger(library.Logger.ERROR)
    for ability, make in (("runtime", "Runtime"), ("builder", "Builder")):
        try:
            if getattr(library, make)(logger) is not None:
                abilities.append(ability)
        except (RuntimeError, TypeError) as error:  # what pybind11 makes of a null pointer
            problems.append(f"{make}: {_first_line(error)}")
    built_for = [found[-2:] for found in _installed(f"{name.replace('_', '[-_]')}[-_]cu1[0-9]")]
    return {
        "state": "ok",
        "problem": "; ".join(problems),
        "version": library.__version__,
        "cuda": built_for[0] if built_for else "",
        "abilities": abilities,
    }


def tensorrt_rtx() -> Found:
    """:func:`tensorrt` of TensorRT-RTX."""
    return tensorrt("tensorrt_rtx")


def _installed(pattern: str) -> list[str]:
    """Names of installed distributions that match."""
    names = (distribution.metadata["Name"] or "" for distribution in importlib.metadata.distributions())
    return sorted({name for name in names if re.fullmatch(pattern, name)})


# -------------------------------------------------------------------------------------------------------------- a step

EXAMINED = ("cuda", "cuda.bindings", "cuda.bindings.driver", "onnxruntime", "tensorrt", "tensorrt_rtx")
STEPS: dict[str, Callable[[], Found]] = {
    "driver": driver,
    "cuda-bindings": cuda_bindings,
    "onnxruntime": onnxruntime,
    "tensorrt": tensorrt,
    "tensorrt-rtx": tensorrt_rtx,
}


def imported(name: str) -> Found:
    """Import a module, and nothing else."""
    importlib.import_module(name)
    return {"state": "ok", "problem": ""}


def take(step: Callable[[], Found]) -> Found:
    """Take a step; an exception is a finding too."""
    try:
        return step()
    except ModuleNotFoundError as error:
        absent = error.name in EXAMINED
        return {"state": "missing" if absent else "failed", "problem": _first_line(error)}
    except Exception as error:  # noqa: BLE001 - whatever a broken library raises is what was asked for
        return {"state": "failed", "problem": f"{type(error).__name__}: {_first_line(error)}"}


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def main(name: str, module: str = "") -> None:
    """Take the step ``name``, or import ``module``, and write what it finds; what libraries print goes to stderr."""
    result = os.dup(1)
    os.dup2(2, 1)
    text = json.dumps(take(STEPS[name] if name != "import" else lambda: imported(module)))
    with os.fdopen(result, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
