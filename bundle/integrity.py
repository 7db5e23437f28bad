"""Hashes of a bundle's files: all of them, or samples that a first load can afford."""

import hashlib
import heapq
import json
import os
import random
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from llmc.bundle.manifest import ADAPTERS_FOLDER, BUNDLE_MANIFEST, CHUNKS_FILE, STAGE_FOLDER, Manifest
from llmc.errors import BundleError
from llmc.strict import decode, open_regular, read_json

# Hashes of pieces of large files, so that some bytes can be checked without reading all. 64 bits are enough against
# accidents; whoever changes a file on purpose can change its hash too.
CHUNK, CHUNK_DIGITS = 4 << 20, 16
SAMPLED_CHUNKS = 16  # of one file, 64 MiB: 50 ms of hashing


def verify_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Hash every file and yield its name once it is proven whole.
    Raises BundleError: a file cannot be read, or its hash differs from the manifest."""
    for name, entry in manifest.files.items():
        try:
            digest = sha256_file(folder / name)
        except (OSError, ValueError) as error:
            raise BundleError(
                f"{name} cannot be read ({getattr(error, 'strerror', error)})", "build the bundle again", path=folder
            ) from error
        if digest != entry.sha256:
            raise _corrupt(folder, name)
        yield name


def list_unlisted_files(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Sorted names of files in the folder that neither the manifest lists nor adapters are in; 16 at most."""
    names = (entry.name for entry in os.scandir(folder))
    listed = {STAGE_FOLDER.format(number) for number in range(len(manifest.stage.before))}
    listed |= {ADAPTERS_FOLDER, *(name.partition("/")[0] for name in manifest.files)}
    return tuple(heapq.nsmallest(16, (name for name in names if name not in listed and name != BUNDLE_MANIFEST)))


def verify_samples(folder: Path, manifest: Manifest, chance: random.Random) -> Iterator[str]:
    """Hash 64 MiB of every file at random places (all of a smaller file), and yield its name.
    Raises BundleError: a file cannot be read, or a hash differs."""
    largest = SAMPLED_CHUNKS * CHUNK
    small = {name: entry for name, entry in manifest.files.items() if entry.size <= largest or name == CHUNKS_FILE}
    yield from verify_files(folder, replace(manifest, files=small))
    if CHUNKS_FILE not in small:
        return
    try:
        recorded: dict[str, str] = decode(dict[str, str], read_json(folder / CHUNKS_FILE))
        for name in sorted(manifest.files.keys() - small.keys()):
            hashes = textwrap.wrap(recorded.get(name, ""), CHUNK_DIGITS)
            count = -(-manifest.files[name].size // CHUNK)
            if len(hashes) != count:
                raise BundleError(f"{CHUNKS_FILE} does not cover {name}", "build the bundle again", path=folder)
            with open_regular(folder / name) as file:
                for number in sorted(chance.sample(range(count), SAMPLED_CHUNKS)):
                    file.seek(number * CHUNK)
                    if _chunk_hash(file.read(CHUNK)) != hashes[number]:
                        raise _corrupt(folder, name)
            yield name
    except (OSError, ValueError) as error:
        raise BundleError(
            f"its files cannot be read ({getattr(error, 'strerror', error)})",
            "copy or build the bundle again",
            path=folder,
        ) from error


def write_chunks(folder: Path, names: Iterable[str]) -> None:
    """Write :data:`CHUNKS_FILE`, if there are files with more bytes than :func:`verify_samples` reads of each."""
    hashes: dict[str, str] = {}
    for name in names:
        if (folder / name).stat().st_size > SAMPLED_CHUNKS * CHUNK:
            with (folder / name).open("rb") as file:
                hashes[name] = "".join(map(_chunk_hash, iter(lambda: file.read(CHUNK), b"")))
    (folder / CHUNKS_FILE).unlink(missing_ok=True)  # it may be a hard link to another bundle's
    if hashes:
        (folder / CHUNKS_FILE).write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")


def _chunk_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:CHUNK_DIGITS]


def _corrupt(folder: Path, name: str) -> BundleError:
    return BundleError(f"{name} is corrupt (its SHA-256 changed)", "copy or build the bundle again", path=folder)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a regular file, read in pieces of 1 MiB. Raises OSError, ValueError: it cannot be read."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
