"""Exports of models with random weights and real shapes, and how they travel without their weights.

A file of random weights is named by its header alone (``model.safetensors.header``): where it is used, the weights are
made from a seed. They are the same on every machine, so results of different machines can be compared.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gpu_check.work import NotHereError

RECIPES = Path(__file__).resolve().parents[1]
# The small model that is trained and lies in the repository, and geometries of make_model.py.
TINY = "tiny"
GEOMETRIES = {TINY: "", "0.5b": "qwen2.5-0.5b", "1b": "llama-3.2-1b"}
WEIGHTS, HEADER = ".safetensors", ".safetensors.header"
# As transformers begins, with biases that are not zero, for else a runtime that forgets them would go unnoticed.
DEVIATION, BIAS_DEVIATION = 0.02, 0.1
SEED = 0
PIECE = 1 << 24


def export(geometry: str, output: str, exports: str | None) -> dict[str, Any]:
    """Put the export of ``geometry`` at ``output``: from the folder of exports that was carried along, or made here.

    Raises:
        NotHereError: it was not carried along, or torch is not installed.
    """
    if exports is not None:
        bring(Path(exports) / geometry, Path(output))
    else:
        make(geometry, Path(output))
    return {"files": sizes(Path(output))}


def make(geometry: str, output: Path) -> None:
    """Write the checkpoint, if it is none that comes with llmc, and export it."""
    from llmc.errors import require

    require("torch", "export")
    from llmc.export import export as export_checkpoint

    if geometry == TINY:
        export_checkpoint(RECIPES / "tiny" / "checkpoint", output, force=True)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:  # near: the export has links to its weights
        checkpoint = Path(folder) / GEOMETRIES[geometry]
        script = RECIPES / "benchmarks" / "make_model.py"
        subprocess.run([sys.executable, str(script), GEOMETRIES[geometry], str(checkpoint)], check=True)
        for path in sorted(checkpoint.glob(f"*{WEIGHTS}")):
            randomize(path)
        export_checkpoint(checkpoint, output, force=True)


def bring(source: Path, output: Path) -> None:
    """Link or copy an export, and make the weights that it lacks.

    Raises:
        NotHereError: there is no export.
    """
    if not (source / "export.json").is_file():
        raise NotHereError(f"{source} is no export; make it with --prepare where torch is installed")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.name.endswith(HEADER):
            target = output / path.name.removesuffix(".header")
            shutil.copyfile(path, target)
            randomize(target)
        else:
            link(path, output / path.name)


def prepare(geometry: str, folder: Path) -> None:
    """Write an export that can be carried along: of random weights the header alone."""
    work = folder / f".{geometry}"
    make(geometry, work)
    target = folder / geometry
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(work.iterdir()):
        if path.name.endswith(WEIGHTS) and geometry != TINY:
            (target / f"{path.name}.header").write_bytes(_head(path))
        else:
            shutil.copyfile(path, target / path.name)
    shutil.rmtree(work)


def _head(path: Path) -> bytes:
    """The length of the header, and the header."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


def link(path: Path, target: Path) -> None:
    """A hard link, or a copy where there can be none."""
    try:
        os.link(path.resolve(), target)
    except OSError:
        shutil.copyfile(path, target)


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file of a folder."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


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
        length = min(PIECE, count - start)
        if name.endswith("norm.weight"):
            values = np.ones(length, np.float32)
        else:
            values = generator.standard_normal(length, np.float32) * deviation
        file.write(stored(values, dtype).tobytes())


def stored(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """``values`` as safetensors' F32, F16 or BF16, the last one as words of 16 bits, rounded to nearest even."""
    if dtype != "BF16":
        return values.astype({"F32": np.float32, "F16": np.float16}[dtype])
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
