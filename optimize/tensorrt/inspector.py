"""Contents of an engine: from the engine itself where a GPU can load it, else from the network it was built of."""

import contextlib
import json
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmc.bundle import EngineConfig
from llmc.errors import GpuError
from llmc.optimize.tensorrt.network import Network, Ranges
from llmc.runtime.sessions.tensorrt.library import library_version, logger, made


def inspect_engine(library: Any, path: Path) -> dict[str, Any] | None:
    """An engine's layers, its inputs and outputs, and bytes for activations, by the library's inspector.

    None where it cannot be loaded, for want of a GPU or for another one. Not run on a GPU yet.
    """
    with logger(library).collected(), path.open("rb") as file, contextlib.suppress(GpuError):
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            runtime = made(library, library.Runtime)
            runtime.engine_host_code_allowed = True  # what a version-compatible engine carries is our own
            engine = runtime.deserialize_cuda_engine(data)
            return _described(library, engine) if engine is not None else None
    return None


def _described(library: Any, engine: Any) -> dict[str, Any]:
    text = engine.create_engine_inspector().get_engine_information(library.LayerInformationFormat.JSON)
    found = json.loads(text)
    tensors = found.get("I/O Tensors", found.get("Bindings", []))  # renamed in 11
    memory = getattr(engine, "device_memory_size_v2", None)
    size = int(memory if memory is not None else engine.device_memory_size)
    return {"layers": found.get("Layers", []), "tensors": tensors, "device_memory": size}


def write_inspector(
    path: Path,
    config: EngineConfig,
    library: Any,
    network: Network,
    profiles: Sequence[Ranges],
    engine: dict[str, Any] | None,
) -> None:
    """Write the summary: library, what its builder was told, inputs and outputs, profiles, layers in short, and the
    engine's own where known."""
    layers = network.summary()
    summary = {
        "library": library.__name__,
        "version": library_version(library),
        "workspace": config.workspace,
        "flags": config.flags,
        "inputs": _tensors(network.inputs()),
        "outputs": _tensors(network.outputs()),
        "aliases": network.aliases(),
        "profiles": [dict(ranges) for ranges in profiles],
        "layers": [asdict(layer) for layer in layers],
        "engine": engine,
    }
    path.write_text(_lines(summary), encoding="utf-8")


def _tensors(tensors: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"name": t.name, "dtype": t.dtype.name, "shape": [int(size) for size in t.shape]} for t in tensors]


def _lines(summary: dict[str, Any]) -> str:
    """JSON with a line for each entry of each list: to be read, searched and compared."""
    parts = []
    for key, value in summary.items():
        listed = isinstance(value, list) and value
        text = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]" if listed else json.dumps(value)
        parts.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
