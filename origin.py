"""Files of a checkpoint or an export: find only its own files, and detect whether its weights have changed."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from llmc.bundle import CONFIG_FILE, MADE_FILE, TOKENIZER_FILES, ExportManifest, MergedAdapter, Origin
from llmc.bundle.reading import find_homes, find_snapshot
from llmc.errors import CheckpointError
from llmc.strict import MOST_JSON, open_regular, parse_json, read_bytes

# Bytes of each of three samples of every tensor for the fingerprint: reading a page costs no more than a byte.
SAMPLED_BYTES = 4096
# Parts of a file with unknown tensors; each is sampled like a tensor.
SAMPLED_PARTS = 1024
# Bytes of a header: the limit of the safetensors library.
MOST_HEADER = 100_000_000
COMMIT = re.compile("[0-9a-f]{40}")
_CACHED = re.compile(r"models--([\w.-]+)", re.ASCII)  # a repository's folder in the hub's cache


def find_own_file(folder: Path, name: str) -> Path | None:
    """The regular file ``name`` of a checkpoint or an export, or None if it has none.

    A file elsewhere does not belong to it, and might be a private key: links are only followed within
    :func:`llmc.bundle.reading.find_homes`.

    Raises:
        CheckpointError: a link leads out of the folder or nowhere, or the file is not regular.
    """
    path = folder / name
    try:
        resolved = path.resolve(strict=True)
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        raise CheckpointError(f"{path} is a broken link; put the file itself there, or remove the link") from None
    except (OSError, RuntimeError) as error:  # a loop of links raises either
        raise CheckpointError(f"{path} cannot be followed ({error}); put the file itself there") from error
    if not any(resolved.is_relative_to(home) for home in find_homes(folder.resolve())):
        raise CheckpointError(
            f"{path} is a link to {resolved}, outside its folder, which could expose a private file; if it belongs to "
            "the model, put the file itself there"
        )
    if not resolved.is_file():
        raise CheckpointError(f"{path} is not a regular file; put the file itself there, or remove it")
    return resolved


def read_origin(path: Path) -> Origin | None:
    """The hub's repository and commit of a folder or GGUF file in Hugging Face's cache, as its path names them;
    nothing proves them. None for other paths, and for names that the hub does not allow."""
    path = path.parent.resolve() / path.name  # a file is a link to blobs
    snapshot = find_snapshot(path)
    cached = _CACHED.fullmatch(snapshot.parent.parent.name) if snapshot else None
    file = "" if snapshot is None or path.is_dir() else path.relative_to(snapshot).as_posix()
    if snapshot is None or cached is None or not COMMIT.fullmatch(snapshot.name) or not file.isprintable():
        return None
    return Origin(cached[1].replace("--", "/"), snapshot.name, file)


def copy_own(source: Path, names: Iterable[str], target: Path) -> int:
    """Copy the named files that ``source`` has into the folder ``target``; return the number of bytes.
    Raises CheckpointError: see :func:`find_own_file`; OSError: a file cannot be read or written."""
    count = 0
    for name in names:
        if file := find_own_file(source, name):
            shutil.copyfile(file, target / name)
            count += file.stat().st_size
    return count


def copy_tokenizer(source: Path, target: Path) -> int:
    """:func:`copy_own` the tokenizer files that the runtime may need."""
    return copy_own(source, TOKENIZER_FILES, target)


# ------------------------------------------------------------------------------------------------------- fingerprint


def fingerprint(config: bytes, shards: Iterable[Path], adapters: tuple[MergedAdapter, ...] = ()) -> str:
    """A hash of ``config.json``, of merged adapters, and of each safetensors file: header, size, samples of every
    tensor.

    A GGUF file counts as 1024 tensors of equal size. 4 KiB are read at the beginning, in the middle and at the end of a
    tensor: this takes milliseconds, whatever the size of the weights. Training changes the hash; a change between the
    samples does not.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file has no valid header.
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
    """The header of a safetensors file, and each tensor's offset and length in the header's order."""
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
    part = max(SAMPLED_BYTES, -(-size // SAMPLED_PARTS))
    return [(start, min(part, size - start)) for start in range(0, size, part)]


def weight_files(folder: Path) -> list[Path]:
    """Files of a checkpoint or an export that hold weights, sorted by name."""
    return sorted(path for pattern in ("*.safetensors", "*.gguf", MADE_FILE) for path in folder.glob(pattern))


def check_unchanged(folder: Path, manifest: ExportManifest) -> None:
    """Refuse an export whose weights were overwritten: hard links share them with the checkpoint.

    Weights that are copies, without another name, are not read.

    Raises:
        CheckpointError: the fingerprint differs, or cannot be computed.
    """
    shards = [path for path in weight_files(folder) if path.name != MADE_FILE]
    try:
        if all(path.stat().st_nlink == 1 for path in shards):
            return
        current = fingerprint(read_bytes(folder / CONFIG_FILE, MOST_JSON), shards, manifest.source.adapters)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: its weights cannot be read ({error}); export the checkpoint again") from error
    if current != manifest.source.fingerprint:
        raise CheckpointError(
            f"{folder}: its weights, which it shares with the checkpoint by hard links, were overwritten after the "
            "export; export the checkpoint again"
        )
