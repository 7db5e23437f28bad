"""Folders read and checked: manifests, links that lead out, and bundles that are replaced meanwhile."""

import math
import os
import re
import stat
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from llmc.bundle.manifest import (
    BUNDLE_MANIFEST,
    CACHE_BYTES,
    DECODER_FILE,
    EXPORT_MANIFEST,
    GRAPH_CONTRACT_VERSION,
    LARGEST_TOLERANCE,
    LM_HEAD,
    MOST_MANIFEST,
    REPLAY,
    SCHEMA_VERSION,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    ExportManifest,
    Manifest,
)
from llmc.errors import BundleError, LlmcError, format_value
from llmc.strict import decode, read_json

# A bundle is replaced in two steps, between which the folder is missing for at most this long.
SWAP_S = 0.02
MOST_TRIES = 10
TICK_S = 0.02  # longer than that of any kernel's clock for files: 1 to 10 ms

T = TypeVar("T")


def read_bundle(folder: Path, *, engine_matters: bool = True) -> Manifest:
    """Read a bundle's manifest and check that every file is there with its size (hashes are :func:`verify_files`' job).

    Without ``engine_matters`` the files of an engine, which is about to be replaced, may be missing or damaged.

    Raises:
        BundleError: not a bundle, written by a newer llmc, or files are missing or truncated, or lie elsewhere.
    """
    return read_undisturbed(folder, lambda place: _read_bundle(place, engine_matters))


def _read_bundle(folder: Path, engine_matters: bool) -> Manifest:
    refuse_to_leave(folder, BUNDLE_MANIFEST)
    manifest = _read(folder, BUNDLE_MANIFEST, Manifest, "llmc build SOURCE -o BUNDLE")
    _check_values(folder, manifest)
    for name in (*manifest.files, *manifest.list_files()):
        if name not in manifest.files or name.startswith("/") or ".." in name.split("/"):
            raise BundleError(
                f"{BUNDLE_MANIFEST} names {name!r}, which is unlisted or lies outside", "refused", path=folder
            )
    for name in TOKENIZER_FILES:
        if name not in manifest.files and os.path.lexists(folder / name):
            raise BundleError(
                f"{name} is not in {BUNDLE_MANIFEST}, so it came later, and would be used",
                "remove it, or build the bundle again",
                path=folder,
            )
    for name, entry in manifest.files.items():
        refuse_to_leave(folder, name)
        size = _size(folder / name)
        remade = name in manifest.engine_files()
        if size != entry.size and (engine_matters or not remade):
            state = "is missing" if size is None else f"has {size} bytes"
            remedy = f"llmc build --rebuild {folder}" if remade else "copy or build the bundle again"
            raise BundleError(f"{name} {state}, {entry.size} expected", remedy, path=folder)
    return manifest


def publication(folder: Path) -> tuple[int, ...] | None:
    """Identity of what is published in ``folder``, another one for every build; None where there is no bundle."""
    try:
        info = (folder / BUNDLE_MANIFEST).stat()
    except (OSError, ValueError):
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def read_undisturbed(folder: Path, work: Callable[[Path], T], undo: Callable[[T], object] = lambda result: None) -> T:
    """Call ``work`` on a bundle, again if the bundle was replaced meanwhile, and return its result.

    Args:
        work: gets the folder, without links that might lead elsewhere while it works.
        undo: gets a result that is thrown away.

    Raises:
        BundleError: the bundle is replaced again and again.
        LlmcError: whatever ``work`` raises, unless the bundle was replaced.
    """
    for _ in range(MOST_TRIES):
        place = Path(os.path.realpath(folder))
        place = folder if place == Path(os.path.abspath(folder)) else place
        before = identify_folder(place)
        try:
            result = work(place)
        except LlmcError:
            if before is None:
                time.sleep(SWAP_S)
            if identify_folder(place) == before:
                raise
        else:
            if identify_folder(place) == before:
                return result
            undo(result)
    raise BundleError(f"{folder} was replaced {MOST_TRIES} times while it was read; let the build end, and try again")


def read_same(folder: Path, known: tuple[int, ...] | None, work: Callable[[Path], T]) -> T:
    """Call ``work`` on ``folder`` if it still holds the :func:`publication` ``known``, and return its result.
    Raises BundleError: another one has taken its place."""

    def run_checked(place: Path) -> T:
        if publication(place) != known:
            raise BundleError(
                f"{folder} was replaced since it was loaded, and its chat template with it; load it again"
            )
        return work(place)

    return read_undisturbed(folder, run_checked)


def identify_folder(folder: Path) -> tuple[int, ...] | None:
    """Identity of what is published in ``folder``; it also changes if a folder is moved away and comes back.

    A change in the same tick of the file system's clock would be missed, so this waits until a change is older."""
    try:
        info = folder.stat()
        if 0 <= time.time_ns() - info.st_ctime_ns < TICK_S * 1e9:
            time.sleep(TICK_S)
            info = folder.stat()
    except (OSError, ValueError):
        return None
    published = publication(folder)
    return None if published is None else (*published, info.st_dev, info.st_ino, info.st_ctime_ns)


def _check_values(folder: Path, manifest: Manifest) -> None:
    """Refuse numbers that no build writes, before anything is computed from them."""
    g, limits, generation = manifest.geometry, manifest.limits, manifest.generation
    staged = manifest.stage.is_sound(g.layers)
    kinds = {cache.kind for cache in manifest.list_caches()} if staged else set()
    banned = generation.banned_tokens, *generation.bad_words
    sound = {
        "stage": staged,
        "geometry": g.is_sound,
        "memory": manifest.memory.is_sound and (manifest.device is None or manifest.device.is_sound),
        "limits": limits.prefill_chunk <= limits.max_context <= g.max_positions,
        "graphs": manifest.graphs.keys() == {"encode"}
        if g.encoder
        else manifest.graphs.keys() - {LM_HEAD}
        == {"prefill", "decode"} | ({g.tower.graph} if g.tower else set()) | ({REPLAY} if "state" in kinds else set()),
        "generation": max(chain(generation.eos_token_ids, [generation.bos_token_id or 0], *banned)) < g.vocab_size
        and (generation.temperature or 0) >= 0
        and (generation.repetition_penalty is None or 0.01 <= generation.repetition_penalty <= 100)
        and all(0 <= (share or 0) <= 1 for share in (generation.top_p, generation.min_p, generation.typical_p)),
        "adapters": bool(limits.adapters) == bool(limits.rank) == (manifest.adapter_graph is not None),
        "cache": manifest.cache in CACHE_BYTES,
        "hidden": all(0 < border <= g.layers for border in manifest.hidden),
        "golden_spread": 0 <= manifest.golden_spread < math.inf,
        "golden_tolerance": 0 < manifest.golden_tolerance <= LARGEST_TOLERANCE,
        "quality": manifest.quality is None or manifest.quality.phases.keys() == {"prefill", "decode"},
        "device": (manifest.device is None) == (manifest.target.engine == "onnxruntime"),
        "engine": manifest.engine is None
        or manifest.engine.is_sound(limits.max_context, limits.max_batch, limits.prefill_chunk),
        "target": re.fullmatch(r"\d{1,9}(\.\d{1,9})*", manifest.target.engine_minimum, re.ASCII) is not None,
    }
    for part, holds in sound.items():
        if not holds:
            raise BundleError(f"the {part} in {BUNDLE_MANIFEST} cannot be right", "build the bundle again", path=folder)


def read_export(folder: Path) -> ExportManifest:
    """Read an export's manifest. Raises BundleError: not an export, damaged, or written by a newer llmc."""
    manifest = _read(folder, EXPORT_MANIFEST, ExportManifest, "llmc export CHECKPOINT -o DIR")
    if not manifest.geometry.is_sound:
        raise BundleError(
            f"the geometry in {EXPORT_MANIFEST} cannot be right", "export the checkpoint again", path=folder
        )
    tower = manifest.geometry.tower
    for name in (DECODER_FILE, TOKENIZER_FILE, *([f"{tower.graph}.onnx"] if tower else [])):
        if _size(folder / name) is None:
            raise BundleError(f"{name} is missing", "export the checkpoint again", path=folder)
    return manifest


def _size(path: Path) -> int | None:
    try:
        info = path.stat()
    except (OSError, ValueError):
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def refuse_to_leave(folder: Path, name: str) -> None:
    """Refuse a link that leads out of a folder, where it could show any file of whoever runs the bundle."""
    path = folder / name
    if "/" not in name and not os.path.islink(path):
        return
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    if not any(target.is_relative_to(home) for home in find_homes(root)):
        raise BundleError(f"{path} is a link that leads out of the bundle; refused: put the file itself there")


def find_snapshot(path: Path) -> Path | None:
    """The folder ``models--ORG--NAME/snapshots/COMMIT`` of Hugging Face's cache that ``path`` is or is in."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
            return folder
    return None


def find_homes(folder: Path) -> list[Path]:
    """The folders whose files belong to a folder without links in its path: itself or, for a snapshot in Hugging
    Face's cache, whose files are links, the model's folder and the store that the cache's models share."""
    snapshot = find_snapshot(folder)
    if snapshot is None:
        return [folder]
    model = snapshot.parent.parent
    return [model, *(mark.parent for mark in model.parent.glob("blobs/.huggingface-shared-blobs"))]


def _read(folder: Path, name: str, kind: type[T], remedy: str) -> T:
    data = _load(folder / name, remedy)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is not int or version < 1:
        raise BundleError(f"{name} is corrupt (no schema_version)", f"make it again with: {remedy}", path=folder)
    writer = ascii(data.get("llmc_version"))[:40].strip("'")
    if version < SCHEMA_VERSION:
        raise BundleError(
            f"{name} has schema version {version} of an older llmc ({writer}), this one reads {SCHEMA_VERSION}",
            f"{_name_origin(data)}make it again with: {remedy}",
            path=folder,
        )
    if version > SCHEMA_VERSION:
        raise BundleError(
            f"{name} has schema version {version}, written by llmc {writer}; this llmc reads up to {SCHEMA_VERSION}",
            "use that version of llmc or a newer one",
            path=folder,
        )
    contract = data.get("graph_contract", GRAPH_CONTRACT_VERSION)
    if type(contract) is int and contract != GRAPH_CONTRACT_VERSION:  # first: its manifest may have other fields, too
        difference = f"graph contract {contract}, not {GRAPH_CONTRACT_VERSION}"
        raise BundleError(f"{name} follows {difference}", f"make it again with: {remedy}", path=folder)
    try:
        manifest: T = decode(kind, data)
    except LlmcError as error:
        raise BundleError(f"{name} is corrupt ({error})", f"make it again with: {remedy}", path=folder) from error
    return manifest


def _name_origin(data: dict[str, Any]) -> str:
    """Source, recipe and target that an older manifest names, as far as its keys are today's."""
    places = {"made of {}": ("source", "name"), "by the recipe {}": ("recipe", "name")}
    places |= {"in {}": ("recipe", "precision"), "for {}": ("target", "name")}
    words = []
    for word, (table, key) in places.items():
        value = data[table].get(key) if isinstance(data.get(table), dict) else None
        if isinstance(value, str) and value:
            words.append(word.format(format_value(value)))
    return f"it was {' '.join(words)}; " if words and words[0].startswith("made") else ""


def _load(path: Path, remedy: str) -> Any:
    try:
        return read_json(path, MOST_MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(
            f"no {path.name} here, not written by llmc", f"make it with: {remedy}", path=path.parent
        ) from None
    except OSError as error:
        raise BundleError(f"{path.name} cannot be read ({error.strerror})", path=path.parent) from error
    except ValueError as error:
        raise BundleError(
            f"{path.name} is corrupt ({error})", f"make it again with: {remedy}", path=path.parent
        ) from error
