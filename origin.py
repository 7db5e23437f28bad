"""Files of a checkpoint or an export: taken from their own folder only, and known again after they were exported."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from llmc.bundle import CONFIG_FILE, MADE_FILE, TOKENIZER_FILES, ExportManifest, MergedAdapter
from llmc.errors import CheckpointError
from llmc.strict import MOST_JSON, open_regular, parse_json, read_bytes

# Of each of three places of every tensor, for the fingerprint: a page costs no more to read than a byte.
SAMPLED_BYTES = 4096
# Parts of a file whose tensors are not known here, each of which is sampled like a tensor.
SAMPLED_PARTS = 1024
# Of a header: the limit of the safetensors library.
MOST_HEADER = 100_000_000


def find_own_file(folder: Path, name: str) -> Path | None:
    """The regular file ``name`` of a checkpoint or an export, or None where it has none.

    What lies elsewhere is none of theirs, and might be somebody's key: a link is followed as far as it stays in the
    folder or, in Hugging Face's cache, which keeps the files of ``models--*/snapshots/*`` as links to its ``blobs``,
    in the folder of the model.

    Raises:
        CheckpointError: a link leads out of the folder or nowhere, or something else than a regular file is there.
    """
    path = folder / name
    try:
        found = path.resolve(strict=True)
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        raise CheckpointError(f"{path} is a link to nowhere; put the file itself there, or remove the link") from None
    except (OSError, RuntimeError) as error:  # a loop of links is the one or the other
        raise CheckpointError(f"{path} cannot be followed ({error}); put the file itself there") from error
    if not found.is_relative_to(_home(folder.resolve())):
        raise CheckpointError(
            f"{path} is a link to {found}, out of its folder, and may be there to get a copy of somebody's file; if it "
            "belongs to the model, put the file itself there"
        )
    if not found.is_file():
        raise CheckpointError(f"{path} is no regular file; put the file itself there, or remove it")
    return found


def _home(folder: Path) -> Path:
    for inner in (folder, *folder.parents):
        if inner.parent.name == "snapshots" and inner.parent.parent.name.startswith("models--"):
            return inner.parent.parent
    return folder


def copy_own(source: Path, names: Iterable[str], target: Path) -> int:
    """Copy those of the files that ``source`` has into the folder ``target``; return how many bytes they have.
    Raises CheckpointError: see :func:`find_own_file`; OSError: one cannot be read or written."""
    count = 0
    for name in names:
        if found := find_own_file(source, name):
            shutil.copyfile(found, target / name)
            count += found.stat().st_size
    return count


def copy_tokenizer(source: Path, target: Path) -> int:
    """:func:`copy_own` of whatever the runtime may need to speak the model's language."""
    return copy_own(source, TOKENIZER_FILES, target)


# ------------------------------------------------------------------------------------------------------- fingerprint


def fingerprint(config: bytes, shards: Iterable[Path], adapters: tuple[MergedAdapter, ...] = ()) -> str:
    """A hash of ``config.json``, of merged adapters, and of the header, the size and samples of every tensor of each
    safetensors file.

    A GGUF file is taken for 1024 tensors of one size. Of a tensor it reads 4 KiB at the beginning, in the middle and at
    the end: milliseconds for a small model, and no more for larger weights. It sees a model that was trained on; a
    change between the samples it does not see.

    Raises:
        OSError: a file cannot be read.
        ValueError: one has no sound header.
    """
    digest = hashlib.sha256(config)
    for adapter in adapters:
        digest.update(f"{adapter.sha256} {adapter.scale!r}".encode())
    for path in shards:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            header, places = (b"", _parts(size)) if path.suffix == ".gguf" else _places(file)
            digest.update(header)
            digest.update(str(size).encode())
            for start, length in places:
                for offset in (0, length // 2, max(0, length - SAMPLED_BYTES)):
                    sample = os.pread(file.fileno(), min(SAMPLED_BYTES, length - offset), start + offset)
                    digest.update(hashlib.sha256(sample).digest())
    return digest.hexdigest()


def _places(file: BinaryIO) -> tuple[bytes, list[tuple[int, int]]]:
    """The header of a safetensors file, and offset and length of each tensor in the header's order."""
    length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER:
        raise ValueError("its header is too long")
    header = file.read(length)
    try:
        entries: Any = parse_json(header)
        offsets = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        return header, [(8 + length + begin, end - begin) for begin, end in offsets]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("its header is corrupt") from error


def _parts(size: int) -> list[tuple[int, int]]:
    """Offset and length of equal parts of a file."""
    part = max(SAMPLED_BYTES, -(-size // SAMPLED_PARTS))
    return [(start, min(part, size - start)) for start in range(0, size, part)]


def weight_files(folder: Path) -> list[Path]:
    """Files of a checkpoint or an export that hold weights, sorted by name."""
    return sorted(path for pattern in ("*.safetensors", "*.gguf", MADE_FILE) for path in folder.glob(pattern))


def check_unchanged(folder: Path, manifest: ExportManifest) -> None:
    """Refuse an export whose weights somebody overwrote: as hard links they are the checkpoint's own.

    Weights that are a copy, which nobody else has a name for, are not read.

    Raises:
        CheckpointError: the fingerprint is another one, or cannot be computed.
    """
    shards = [path for path in weight_files(folder) if path.name != MADE_FILE]
    try:
        if all(path.stat().st_nlink == 1 for path in shards):
            return
        found = fingerprint(read_bytes(folder / CONFIG_FILE, MOST_JSON), shards, manifest.source.adapters)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: its weights cannot be read ({error}); export the checkpoint again") from error
    if found != manifest.source.fingerprint:
        raise CheckpointError(
            f"{folder}: its weights, which it shares with the checkpoint by hard links, were overwritten after the "
            "export; export the checkpoint again"
        )
