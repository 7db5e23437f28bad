"""Exports of models with random weights and real shapes, how they travel without their weights, and their bundles.

A file of weights is named by its header alone (``model.safetensors.header``): where it is used, random weights are made
from a seed, and those of the small model lie in the repository. They are the same on every machine, so results of
different machines can be compared.
"""

import contextlib
import json
import math
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gpu_check.steps import NotHereError, Options, place
from llmc.errors import BuildError, GpuError, LlmcError, require
from llmc.runtime import load
from llmc.runtime.host import cuda
from llmc.runtime.sessions.onnxruntime import cuda_provider
from llmc.runtime.sessions.tensorrt import library

RECIPES = Path(__file__).resolve().parents[1]
# The small model that is trained and lies in the repository, and geometries of make_model.py.
TINY, CHECKPOINT = "tiny", RECIPES / "tiny" / "checkpoint"
GEOMETRIES = {"0.5b": "qwen2.5-0.5b", "1b": "llama-3.2-1b"}
# Prompts of 2,048 tokens and 128 new ones, with room. The small model ends at 2,048.
CONTEXTS = {TINY: 2048, "0.5b": 4096, "1b": 4096}
ROWS = 8
WEIGHTS, HEADER = ".safetensors", ".safetensors.header"
# As transformers begins, with biases that are not zero, for else a runtime that forgets them would go unnoticed.
DEVIATION, BIAS_DEVIATION = 0.02, 0.1
SEED = 0
PIECE = 1 << 24


def build(target: str, geometry: str, precision: str, options: Options) -> dict[str, Any]:
    """Build a bundle anew; its size, what its manifest says of engine, memory and quality, and all that the engine's
    library said."""
    folder, trouble = _places(target, geometry, precision, options)
    trouble.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    built(target, geometry, precision, options)
    manifest = json.loads((folder / "llmc.json").read_text(encoding="utf-8"))
    kept = ("target", "limits", "memory", "device", "engine", "graphs", "quality", "notes")
    total = sum(file["size"] for file in manifest["files"].values())
    log = (manifest.get("engine") or {}).get("log")
    said = json.loads((folder / log).read_text(encoding="utf-8")) if log else []
    return {"bytes": total, **{name: manifest.get(name) for name in kept}, "build_log": said}


def built(target: str, geometry: str, precision: str, options: Options) -> Path:
    """The bundle, which is built if it is not there.

    Raises:
        NotHereError: building it failed or hung before: it is not tried again but by the step for it.
    """
    from llmc.optimize.build import build as build_bundle

    folder, trouble = _places(target, geometry, precision, options)
    if (folder / "llmc.json").is_file():
        return folder
    if trouble.exists():
        raise NotHereError(trouble.read_text(encoding="utf-8"))
    source = export(geometry, options)
    trouble.write_text("no bundle: building it was cut off", encoding="utf-8")
    limits: dict[str, Any] = {"max_context": CONTEXTS[geometry], "max_batch": ROWS}
    try:
        build_bundle(source, folder, target=target, precision=precision, **limits)
    except LlmcError as error:
        trouble.write_text(f"no bundle: {' '.join(str(error).split())}", encoding="utf-8")
        raise
    trouble.unlink()
    return folder


def _places(target: str, geometry: str, precision: str, options: Options) -> tuple[Path, Path]:
    folder = place(f"{target}/{geometry}/{precision}", options.work)
    return folder, folder.with_name(f"{folder.name}.trouble")


@contextlib.contextmanager
def opened(target: str, geometry: str, precision: str, options: Options) -> Iterator[Any]:
    """The bundle loaded, with no prefix cached, where library and GPU are here."""
    check_here(target)
    folder = built(target, geometry, precision, options)
    with load(folder, self_test=False, prefix_cache_bytes=0) as model:
        yield model


def check_here(target: str) -> None:
    """Refuse to go on without the library of a target or a GPU for it.

    Raises:
        NotHereError, MissingExtraError: with what is missing.
    """
    try:
        if target == "cuda":
            cuda_provider.check_provider(cuda_provider.import_onnxruntime_gpu(), "0")
        elif target != "cpu":
            library.load_library(target)
        if target != "cpu":
            cuda.open_driver().close()
    except GpuError as error:
        raise NotHereError(str(error)) from error


def export(geometry: str, options: Options) -> Path:
    """The export of a model: carried along, with the weights that it lacks, or made here, which needs torch."""
    output = options.work / "exports" / geometry
    if (output / "export.json").is_file():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    if options.models is None:
        make(geometry, output)
        return output
    source = options.models / geometry
    if not (source / "export.json").is_file():
        raise NotHereError(f"{source} is no export; make it with --prepare where torch is installed")
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        made = Path(shutil.copytree(source, Path(folder) / geometry))
        for path in sorted(made.glob(f"*{HEADER}")):
            given = CHECKPOINT / path.with_suffix("").name
            if geometry == TINY:
                shutil.copyfile(given, path.with_suffix(""))
                path.unlink()
            else:
                randomize(path.rename(path.with_suffix("")))
        made.rename(output)
    return output


def make(geometry: str, output: Path) -> None:
    """Write the checkpoint, if it is none that comes with llmc, and export it."""
    require("torch", "export")
    from llmc.export import export as export_checkpoint

    with tempfile.TemporaryDirectory(dir=output.parent) as folder:  # near: the export has links to its weights
        checkpoint = CHECKPOINT
        if geometry != TINY:
            checkpoint = Path(folder) / GEOMETRIES[geometry]
            script = RECIPES / "benchmarks" / "make_model.py"
            subprocess.run([sys.executable, str(script), GEOMETRIES[geometry], str(checkpoint)], check=True)
            for path in sorted(checkpoint.glob(f"*{WEIGHTS}")):
                randomize(path)
        export_checkpoint(checkpoint, output, force=True)


def prepare(geometry: str, folder: Path) -> None:
    """Write an export that can be carried along, of the weights the header alone, and what it should compute."""
    from gpu_check.correctness import reference_of

    target = folder / geometry
    make(geometry, target)
    if problems := reference_of(target, folder / f"{geometry}.npz")["problems"]:
        raise BuildError(f"{geometry}: {'; '.join(problems)}")
    for path in sorted(target.glob(f"*{WEIGHTS}")):
        path.with_suffix(HEADER).write_bytes(_head(path))
        path.unlink()


def _head(path: Path) -> bytes:
    """The length of the header, and the header."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


def randomize(path: Path) -> None:
    """Write random weights behind the header of a safetensors file: norms are one, all others normal.

    Each tensor has a seed of its own that follows from its name.
    """
    head = _head(path)
    tensors = {name: entry for name, entry in json.loads(head[8:]).items() if name != "__metadata__"}
    with path.open("r+b") as file:
        file.truncate(len(head))
        for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"][0]):
            file.seek(len(head) + entry["data_offsets"][0])
            _write_tensor(file, name, entry["dtype"], math.prod(entry["shape"]))


def _write_tensor(file: IO[bytes], name: str, dtype: str, count: int) -> None:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([SEED, zlib.crc32(name.encode())])))
    deviation = np.float32(BIAS_DEVIATION if name.endswith(".bias") else DEVIATION)
    for start in range(0, count, PIECE):
        values = np.ones(min(PIECE, count - start), np.float32)
        if not name.endswith("norm.weight"):
            values = generator.standard_normal(len(values), np.float32) * deviation
        file.write(stored(values, dtype).tobytes())


def stored(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """``values`` as safetensors' F32, F16 or BF16, the last one as words of 16 bits, rounded to nearest even."""
    if dtype != "BF16":
        return values.astype({"F32": np.float32, "F16": np.float16}[dtype])
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
