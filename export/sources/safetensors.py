"""Read safetensors headers: where each tensor's bytes are. No weight is read.

Format: 8 bytes of header length (little endian), the header as JSON, then the tensors without gaps.
Source: https://github.com/huggingface/safetensors#format
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError, format_name, format_value
from llmc.origin import MOST_HEADER, find_own_file
from llmc.strict import open_regular, parse_json, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")
# Tensor types; I4 is llmc's own, safetensors has none.
DTYPE_NAMES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8",
    "F8_E8M0": "float8 exponents",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "I4": "int4",
    "BOOL": "bool",
}
ITEM_BITS = {"F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I4": 4}
ITEM_BITS |= dict.fromkeys(("F8_E4M3", "F8_E8M0", "I8", "U8", "BOOL"), 8)
SUFFIX = ".safetensors"
# Most dimensions of a tensor; decoders have one or two.
MOST_DIMENSIONS = 8
# Most characters of a tensor's name, which errors repeat; decoders have about fifty.
LONGEST_NAME = 500


@dataclass(frozen=True)
class StoredTensor:
    """Location of a weight: ``length`` bytes at ``offset`` of ``file``; ``dtype`` is safetensors' name, such as F32."""

    file: str
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.length


@dataclass(frozen=True)
class Shard:
    """One safetensors file, and its tensors in the order of its header."""

    path: Path
    tensors: dict[str, StoredTensor]


def read_shards(folder: Path) -> list[Shard]:
    """Read the headers of ``model.safetensors``, or of all files in its index."""
    if (folder / SINGLE_FILE).is_file():
        return [read_shard(folder / SINGLE_FILE)]
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(_no_weights(folder))
    index = _read_index(folder / INDEX_FILE)
    names = sorted(set(index.values()))
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder}: shard {format_name(name)} is missing, but {INDEX_FILE} names it; download it again"
            )
    shards = [read_shard(folder / name) for name in names]
    _compare_with_index(folder, index, shards)
    return shards


def read_shard(path: Path) -> Shard:
    """Read one file's header and check it against the file's size."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_HEADER):
                raise CheckpointError(f"{path} is truncated or not safetensors ({size} bytes); download it again")
            header = file.read(length)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    entries = _parse_header(path, header)
    start = 8 + length
    tensors = {name: _locate_tensor(path, name, entry, start) for name, entry in entries.items()}
    _check_layout(path, tensors, start, size)
    return Shard(path, tensors)


def _parse_header(path: Path, header: bytes) -> dict[str, Any]:
    try:
        entries = parse_json(header)
    except ValueError as error:
        raise CheckpointError(f"{path} has a corrupt safetensors header ({error}); download it again") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} has a corrupt safetensors header (not a JSON object); download it again")
    entries.pop("__metadata__", None)
    return entries


def _locate_tensor(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise CheckpointError(
            f"{path}: {name[:50]!r}... is a tensor's name of {len(name)} characters, expected at most {LONGEST_NAME} "
            "printable ones; get the checkpoint from another source"
        )
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        sound = len(shape) <= MOST_DIMENSIONS and all(type(n) is int and n >= 0 for n in numbers)
        if not isinstance(dtype, str) or not sound:
            raise TypeError("not a dtype, a shape and two offsets")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header's entry for {name} is corrupt; download the file again") from error
    if dtype not in ITEM_BITS or dtype == "I4":
        known = ", ".join(name for name in ITEM_BITS if name != "I4")
        raise CheckpointError(
            f"{path}: {name} has dtype {format_name(dtype)}, expected one of {known}; export the checkpoint that it "
            "was made from"
        )
    if 8 * (end - begin) != math.prod(shape) * ITEM_BITS[dtype]:
        raise CheckpointError(
            f"{path}: {name} takes {end - begin} bytes, but {dtype} {list(shape)} needs "
            f"{math.prod(shape) * ITEM_BITS[dtype] // 8}; the file is corrupt, download it again"
        )
    return StoredTensor(path.name, start + begin, end - begin, dtype, shape)


def _check_layout(path: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """Check that tensors follow each other without gap or overlap, and that the last one ends the file."""
    position = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.length)):
        if tensor.offset != position:
            raise CheckpointError(f"{path} has a corrupt safetensors header (tensors overlap or leave gaps)")
        position += tensor.length
    if position != size:
        state = "truncated" if size < position else "corrupt"
        raise CheckpointError(f"{path} is {state}: it has {size} bytes, its header says {position}; download it again")


def _read_index(path: Path) -> dict[str, str]:
    try:
        file_path = find_own_file(path.parent, path.name) or path
        index = dict(read_json(file_path)["weight_map"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is corrupt (no weight_map in it); download it again") from error
    for name, file in index.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(SUFFIX):
            expected = f"a file name in the same folder that ends in {SUFFIX}"
            raise CheckpointError(f"{path}: {format_name(name)} is listed in {format_value(file)}, expected {expected}")
    return index


def _compare_with_index(folder: Path, index: dict[str, str], shards: list[Shard]) -> None:
    files = {name: tensor.file for shard in shards for name, tensor in shard.tensors.items()}
    for name, file in index.items():
        if files.get(name) != file:
            raise CheckpointError(
                f"{folder}: {INDEX_FILE} says that {format_name(name)} is in {format_name(file)}, where it is not; "
                "download again"
            )
    for name, file in files.items():
        if name not in index:
            raise CheckpointError(
                f"{folder}: {file} holds {format_name(name)}, which {INDEX_FILE} does not name; download again"
            )


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern))
    if not pickles:
        return f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is here; expected a Hugging Face checkpoint folder"
    return (
        f"{folder}: only pickled weights ({pickles[0]}), which can run code when opened, so llmc does not read them; "
        f'convert them where you trust them: python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )
