"""What the session calls exists: the double has no method that a version of TensorRT lacks, or TensorRT-RTX."""

import inspect
import os
from dataclasses import replace
from typing import Any

import pytest
from doubles.recorded import SURFACE
from doubles.tensorrt import Context, Engine, Runtime, RuntimeCache, RuntimeConfig

from llmc.errors import BundleError, GpuError
from llmc.runtime.sessions.tensorrt.engine import Engine as LoadedEngine
from llmc.runtime.sessions.tensorrt.library import library_version, load_library

# The library's class behind each class of the double, and what is the double's own.
CLASSES = {"Runtime": (Runtime, set()), "ICudaEngine": (Engine, set()), "IExecutionContext": (Context, {"memory"})}
ATTRIBUTES = {
    "Runtime": set(),
    "ICudaEngine": {"num_optimization_profiles", "device_memory_size_v2"},
    "IExecutionContext": set(),
}


def methods(kind: type) -> dict[str, int]:
    """Names of the double's public methods, and how many arguments each takes."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: len(inspect.signature(method).parameters) - 1 for name, method in found if name[0] != "_"}


def missing(described: dict[str, Any]) -> list[str]:
    """What the double has and a recorded version has not, or takes other arguments for."""
    wrong = []
    for owner, (kind, own) in CLASSES.items():
        members = described[owner]["members"]
        wrong += [f"{owner}.{name}" for name in ATTRIBUTES[owner] if members.get(name, ()) is not None]
        for name, count in methods(kind).items():
            fits = any(len(names) == count or names == ["*"] for names in members.get(name) or ())
            if name not in own and not fits:
                wrong.append(f"{owner}.{name}")
    return wrong


def test_tensorrt_has_what_the_double_has():
    assert missing(SURFACE) == []
    assert "USER_MANAGED" in SURFACE["ExecutionContextAllocationStrategy"]["enum"]


def test_tensorrt_rtx_has_it_too():
    library = pytest.importorskip("tensorrt_rtx")
    for owner, (kind, own) in CLASSES.items():
        names = {*methods(kind), *ATTRIBUTES[owner]} - own
        assert [name for name in names if not hasattr(getattr(library, owner), name)] == []
    assert hasattr(library.ICudaEngine, "get_aliased_input_tensor")
    assert hasattr(library.IExecutionContext, "is_stream_capturable")
    for owner, double in (("IRuntimeConfig", RuntimeConfig), ("IRuntimeCache", RuntimeCache)):
        assert [name for name in methods(double) if not hasattr(getattr(library, owner), name)] == []
    assert library.ExecutionContextAllocationStrategy.USER_MANAGED


def test_a_real_library_without_a_gpu_says_why_it_loads_nothing(bundle, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    if any(os.path.exists(path) for path in ("/dev/nvidia0", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg")):
        pytest.skip("there is a GPU here")
    library = load_library("tensorrt-rtx")
    file = tmp_path / "engine.plan"
    file.write_bytes(b"no engine at all" * 100)
    with pytest.raises((BundleError, GpuError), match=r"tensorrt_rtx .*(refuses engine\.plan|cannot use a GPU)"):
        LoadedEngine(library, file, tmp_path)
    setup = bundle()
    target = replace(setup.manifest.target, engine="tensorrt-rtx", engine_version=library_version(library))
    setup = replace(setup, manifest=replace(setup.manifest, target=target), library=library)
    with pytest.raises((BundleError, GpuError), match="tensorrt_rtx"):
        setup.open()
    assert setup.driver.leaks == []
