"""Models with random weights and real shapes, the small one that is trained, and their bundles."""

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_check.steps import NotHereError
from llmc.errors import GpuError, LlmcError, require
from llmc.runtime import load
from llmc.runtime.host import cuda
from llmc.runtime.sessions.onnxruntime import cuda_provider
from llmc.runtime.sessions.tensorrt import library

RECIPES = Path(__file__).resolve().parents[1]
# The small model that is trained and lies in the repository, and geometries of make_model.py.
TINY = "tiny"
GEOMETRIES = {"0.5b": "qwen2.5-0.5b", "1b": "llama-3.2-1b"}
# Prompts of 2,048 tokens and 128 new ones, with room. The small model ends at 2,048.
CONTEXTS = {TINY: 2048, "0.5b": 4096, "1b": 4096}
ROWS = 8


def build(target: str, geometry: str, precision: str, work: Path) -> dict[str, Any]:
    """Build a bundle anew; its size, and what its manifest says of engine, memory and quality."""
    folder, trouble = _places(target, geometry, precision, work)
    trouble.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    manifest = json.loads((built(target, geometry, precision, work) / "llmc.json").read_text(encoding="utf-8"))
    kept = ("target", "limits", "memory", "device", "engine", "graphs", "quality")
    total = sum(file["size"] for file in manifest["files"].values())
    return {"bytes": total, **{name: manifest.get(name) for name in kept}}


def built(target: str, geometry: str, precision: str, work: Path) -> Path:
    """The bundle, which is built if it is not there.

    Raises:
        NotHereError: building it failed or hung before: it is not tried again but by the step for it.
    """
    from llmc.optimize.build import build as build_bundle

    folder, trouble = _places(target, geometry, precision, work)
    if (folder / "llmc.json").is_file():
        return folder
    if trouble.exists():
        raise NotHereError(trouble.read_text(encoding="utf-8"))
    source = export(geometry, work)
    trouble.write_text("no bundle: building it was cut off", encoding="utf-8")
    limits: dict[str, Any] = {"max_context": CONTEXTS[geometry], "max_batch": ROWS}
    try:
        build_bundle(source, folder, target=target, precision=precision, **limits)
    except LlmcError as error:
        trouble.write_text(f"no bundle: {' '.join(str(error).split())}", encoding="utf-8")
        raise
    trouble.unlink()
    return folder


def _places(target: str, geometry: str, precision: str, work: Path) -> tuple[Path, Path]:
    name = f"{target}-{geometry}-{precision}"
    return work / name, work / f"{name}.trouble"


@contextlib.contextmanager
def opened(target: str, geometry: str, precision: str, work: Path) -> Iterator[Any]:
    """The bundle loaded, with no prefix cached, where library and GPU are here."""
    check_here(target)
    folder = built(target, geometry, precision, work)
    with load(folder, self_test=False, prefix_cache_bytes=0) as model:
        yield model


def check_here(target: str) -> None:
    """Refuse to go on without the library of a target or a GPU for it.

    Raises:
        NotHereError, MissingExtraError: with what is missing.
    """
    try:
        if target == "cuda":
            cuda_provider.import_onnxruntime_gpu("0")
        elif target != "cpu":
            library.load_library(target)
        if target != "cpu":
            cuda.open_driver().close()
    except GpuError as error:
        raise NotHereError(str(error)) from error


def export(geometry: str, work: Path) -> Path:
    """The export of a model, which is made if it is not there."""
    output = work / "exports" / geometry
    if (output / "export.json").is_file():
        return output
    require("torch", "export")
    from llmc.export import export as export_checkpoint

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:  # near: the export has links to its weights
        checkpoint = RECIPES / "tiny" / "checkpoint"
        if geometry != TINY:
            checkpoint = Path(folder) / GEOMETRIES[geometry]
            script = RECIPES / "benchmarks" / "make_model.py"
            subprocess.run([sys.executable, str(script), GEOMETRIES[geometry], str(checkpoint)], check=True)
        export_checkpoint(checkpoint, output, force=True)
    return output
