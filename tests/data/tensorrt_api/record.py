"""Write down which classes, members and arguments a version of TensorRT's Python binding has.

The bindings' wheels are on PyPI, the libraries that they load are not. The binding imports all the same beside
libraries that export the nine symbols it looks up and do nothing: introspection computes nothing. Such libraries are
made here::

    pip download --no-deps --only-binary :all: --dest wheels tensorrt-cu12-bindings==10.3.0
    python -m zipfile -e wheels/*.whl bindings
    python tests/data/tensorrt_api/record.py bindings tests/data/tensorrt_api/10.3.json

The file holds, for each class: ``{"members": {name: null | [[argument, ...], ...]}}`` (null: no method; a list: the
argument names of each overload, ``=`` after those with a default) or ``{"enum": {name: value}}``.
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SYMBOLS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "getBuilderPluginRegistry",
    "getPluginRegistry",
    "getNvOnnxParserVersion",
    "initLibNvInferPlugins",
)
LIBRARIES = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")
# Everything that a builder or a runtime of decoders could touch; the rest (plugins, vision layers) would be noise.
CLASSES = frozenset(
    """
        Builder IBuilderConfig BuilderFlag INetworkDefinition NetworkDefinitionCreationFlag
        IOptimizationProfile OnnxParser OnnxParserFlag OnnxParserRefitter ParserError Refitter Logger
        ILogger IProgressMonitor IStreamWriter IStreamReader IStreamReaderV2 IHostMemory ITimingCache
        MemoryPoolType ProfilingVerbosity HardwareCompatibilityLevel RuntimePlatform PreviewFeature
        TilingOptimizationLevel DataType TensorLocation TensorIOMode TensorFormat LayerType ILayer ITensor
        Dims IAttention IAttentionInputLayer IKVCacheUpdateLayer KVCacheMode IRotaryEmbeddingLayer
        INormalizationLayer Weights Runtime ICudaEngine IExecutionContext IRuntimeConfig
        ISerializationConfig SerializationFlag EngineInspector LayerInformationFormat IOutputAllocator
        IErrorRecorder ExecutionContextAllocationStrategy CudaGraphStrategy
        DynamicShapesKernelSpecializationStrategy IRuntimeCache ComputeCapability EngineValidity
        EngineInvalidityDiagnostics TempfileControlFlag
    """.split()  # noqa: SIM905
)


def main(bindings: Path, output: Path) -> None:
    package = next(path.parent for path in bindings.glob("*/tensorrt.so"))
    if "TENSORRT_STUBS" not in os.environ:
        return again_beside_stubs(package)
    sys.path.insert(0, str(bindings))
    library = importlib.import_module(package.name)
    found = {name: described(getattr(library, name)) for name in sorted(CLASSES) if hasattr(library, name)}
    lines = [f"  {json.dumps(name)}: {json.dumps(each, sort_keys=True)}" for name, each in sorted(found.items())]
    output.write_text(f'{{\n  "__version__": {json.dumps(library.__version__)},\n' + ",\n".join(lines) + "\n}\n")
    return None


def again_beside_stubs(package: Path) -> None:
    """Run this script anew where the dynamic linker finds libraries that do nothing."""
    needed = subprocess.run(["readelf", "-d", package / "tensorrt.so"], capture_output=True, text=True, check=True)
    major = re.search(r"libnvinfer\.so\.(\d+)", needed.stdout)
    assert major, f"{package}/tensorrt.so needs no libnvinfer"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "stub.c")
        source.write_text("\n".join(f"void* {symbol}(void) {{ return 0; }}" for symbol in SYMBOLS))
        for library in LIBRARIES:
            name = f"{library}.so.{major[1]}"
            subprocess.run(["cc", "-shared", "-fPIC", source, "-o", Path(folder, name)], check=True)
        environment = {**os.environ, "LD_LIBRARY_PATH": folder, "TENSORRT_STUBS": "1"}
        subprocess.run([sys.executable, *sys.argv], env=environment, check=True)


def described(each: type) -> dict[str, Any]:
    """A class's public members with the arguments of its methods, or an enumeration's names."""
    if hasattr(each, "__members__"):
        return {"enum": {name: int(member) for name, member in each.__members__.items()}}
    members: dict[str, Any] = {
        name: overloads(inspect.getattr_static(each, name)) for name in dir(each) if name[0] != "_"
    }
    members |= {name: described(found) for name, found in vars(each).items() if inspect.isclass(found)}
    members["__init__"] = overloads(each.__init__)
    return {"members": members}


def overloads(member: object) -> list[list[str]] | None:
    """Argument names of each signature that pybind11 wrote into a method's docstring; None for a property."""
    member = getattr(member, "__func__", member)
    if not callable(member):
        return None
    lines = re.findall(r"^\s*(?:\d+\. )?\w+\((.*)\) -> .+$", member.__doc__ or "", re.MULTILINE)
    found = [arguments(line) for line in lines if line != "*args, **kwargs"]
    return found or [["*"]]


def arguments(text: str) -> list[str]:
    """Names in ``self: X, a: Sequence[int, int] = (1, 2), b: int``, without self."""
    flat = re.sub(r"<[^<>]*>", "0", text)
    while re.search(r"[\[({]", flat):
        shorter = re.sub(r"\[[^\[\](){}]*\]|\([^\[\](){}]*\)|\{[^\[\](){}]*\}", "", flat)
        if shorter == flat:
            break
        flat = shorter
    parts = [part.strip() for part in flat.split(",") if part.strip()]
    return [re.split(r"[:= ]", part)[0] + ("=" if "=" in part else "") for part in parts if not part.startswith("self")]


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
