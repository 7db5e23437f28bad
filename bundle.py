"""Contract 2: what a folder written by llmc holds, and how it is written and checked.

Two kinds of folder exist, each with a manifest of frozen dataclasses: an *export* (``export.json``: the portable
decoder, weights by reference) and a *bundle* (``llmc.json``: graphs and weights for one target). Both are published
atomically by :func:`staged`, so a folder with a manifest is complete.
"""

import errno
import glob
import hashlib
import json
import os
import shutil
import stat
import types
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from llmc.errors import BundleError, LlmcError, ResourceError, UsageError

SCHEMA_VERSION = 1
GRAPH_CONTRACT_VERSION = 1
EXPORT_MANIFEST = "export.json"
BUNDLE_MANIFEST = "llmc.json"
DECODER_FILE = "decoder.onnx"
WEIGHTS_FILE = "weights.bin"
TOKENIZER_FILE = "tokenizer.json"
# Everything the runtime may need to speak the model's language; only the first one must exist.
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

# What a folder of llmc's may hold; anything else in it is somebody's own.
OUR_SUFFIXES = (".json", ".onnx", ".bin", ".safetensors", ".jinja")

T = TypeVar("T")


@dataclass(frozen=True)
class Geometry:
    """Shapes of a decoder. ``windows`` has one entry per layer: 0 attends to everything, W to the last W positions."""

    model_type: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied_head: bool
    windows: tuple[int, ...]

    def cache_bytes(self, positions: int, batch: int = 1, bytes_per_value: int = 4) -> int:
        """Bytes of keys and values: 2 x layers x kv_heads x head_dim x positions x batch x bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * positions * batch * bytes_per_value


@dataclass(frozen=True)
class Source:
    """Where the weights came from. ``fingerprint`` covers config.json and every shard's header and size."""

    name: str
    fingerprint: str
    dtype: str
    parameters: int


@dataclass(frozen=True)
class Generation:
    """Defaults of the checkpoint's generation_config.json; None where it says nothing."""

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    do_sample: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class ExportManifest:
    """``export.json``: what the portable decoder in this folder is."""

    schema_version: int
    llmc_version: str
    graph_contract: int
    geometry: Geometry
    source: Source
    generation: Generation


@dataclass(frozen=True)
class Graph:
    """One compiled graph: its file, its weights in bytes, and the CPU features without which it would be wrong.

    ``multi_row_prefill`` tells whether several rows may be fed more than one token each in one call.
    """

    file: str
    weight_bytes: int
    step_weight_bytes: int
    cpu_features: tuple[str, ...]
    multi_row_prefill: bool


@dataclass(frozen=True)
class Target:
    """Engine the graphs were built for; ``engine_version`` is the one that built and verified them."""

    name: str
    engine: str
    engine_version: str
    engine_minimum: str


@dataclass(frozen=True)
class Recipe:
    """How the weights were compiled: the body's linears in ``precision``, the head and a tied embedding in ``head``.
    ``phases`` is split (a graph each for prefill and decode) or shared (one)."""

    name: str
    precision: str
    block_size: int
    head: str
    phases: str


@dataclass(frozen=True)
class Limits:
    """What the bundle was planned for, in tokens and rows."""

    max_context: int
    max_batch: int
    prefill_chunk: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes: packed weights of all graphs, cache per token and row, workspace of the largest call (a fixed part and
    a part per cached token)."""

    weights: int
    cache_per_token: int
    workspace: int
    workspace_per_token: int

    def total(self, positions: int, batch: int = 1) -> int:
        """Bytes needed with ``positions`` cached tokens in each of ``batch`` rows."""
        return self.weights + self.workspace + (self.cache_per_token * batch + self.workspace_per_token) * positions


@dataclass(frozen=True)
class GoldenPrompt:
    """One self-test case. Logits belong to the position after the prompt, ``top_logits`` through the prefill path and
    ``decode_logits`` of the same ids through the decode path; ``margins`` are the gaps in logits between the first and
    second choice at each generated token (a tie may fall the other way elsewhere)."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    top_ids: tuple[int, ...]
    top_logits: tuple[float, ...]
    decode_logits: tuple[float, ...]
    reference_ids: tuple[int, ...]
    reference_logits: tuple[float, ...]


@dataclass(frozen=True)
class Quality:
    """Bundle against the unquantized model, over ``positions`` positions of the golden prompts, per path."""

    positions: int
    prefill_mean_kl: float
    decode_mean_kl: float
    prefill_top1_agreement: float
    decode_top1_agreement: float


@dataclass(frozen=True)
class Manifest:
    """``llmc.json``: all that a runtime must know before it opens a graph."""

    schema_version: int
    llmc_version: str
    graph_contract: int
    geometry: Geometry
    source: Source
    generation: Generation
    target: Target
    recipe: Recipe
    limits: Limits
    memory: MemoryPlan
    graphs: dict[str, Graph]
    quality: Quality | None
    golden: tuple[GoldenPrompt, ...]
    files: dict[str, FileEntry]


# ---------------------------------------------------------------------------------------------- reading and writing


def write_manifest(manifest: ExportManifest | Manifest, folder: Path) -> None:
    """Write the manifest into ``folder`` as indented JSON."""
    name = BUNDLE_MANIFEST if isinstance(manifest, Manifest) else EXPORT_MANIFEST
    text = json.dumps(asdict(manifest), indent=1, ensure_ascii=False, allow_nan=False)
    (folder / name).write_text(text + "\n", encoding="utf-8")


def read_bundle(folder: Path) -> Manifest:
    """Read a bundle's manifest and check that every file is there with its size (hashes are :func:`verify_files`' job).

    Raises:
        BundleError: not a bundle, written by a newer llmc, or files are missing or truncated.
    """
    manifest = _read(folder, BUNDLE_MANIFEST, Manifest, "llmc build CHECKPOINT -o BUNDLE")
    _check_values(folder, manifest)
    for name in (*manifest.files, *(graph.file for graph in manifest.graphs.values())):
        if name not in manifest.files or name.startswith("/") or ".." in name.split("/"):
            raise BundleError(f"{folder}: {BUNDLE_MANIFEST} names {name!r}, which is unlisted or lies outside; refused")
    for name, entry in manifest.files.items():
        found = _size(folder / name)
        if found != entry.size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise BundleError(f"{folder}: {name} {state}, {entry.size} expected; copy or build the bundle again")
    return manifest


def _check_values(folder: Path, manifest: Manifest) -> None:
    """Refuse numbers that no build writes, before anything is computed from them."""
    g, limits, memory = manifest.geometry, manifest.limits, manifest.memory
    sizes = (g.layers, g.hidden_size, g.intermediate_size, g.heads, g.kv_heads, g.head_dim, g.vocab_size)
    sound = {
        "geometry": min(sizes) > 0 and g.heads % max(1, g.kv_heads) == 0 and len(g.windows) == g.layers,
        "limits": 0 < limits.prefill_chunk <= limits.max_context <= g.max_positions and limits.max_batch > 0,
        "memory": min(memory.weights, memory.cache_per_token, memory.workspace, memory.workspace_per_token) >= 0,
        "graphs": "decode" in manifest.graphs and manifest.graphs.keys() <= {"prefill", "decode"},
        "target": all(part.isdigit() for part in manifest.target.engine_minimum.split(".")),
    }
    for part, holds in sound.items():
        if not holds:
            raise BundleError(f"{folder}: the {part} in {BUNDLE_MANIFEST} cannot be right; build the bundle again")


def read_export(folder: Path) -> ExportManifest:
    """Read an export's manifest.

    Raises:
        BundleError: not an export, or written by a newer llmc.
    """
    manifest = _read(folder, EXPORT_MANIFEST, ExportManifest, "llmc export CHECKPOINT -o DIR")
    for name in (DECODER_FILE, TOKENIZER_FILE):
        if _size(folder / name) is None:
            raise BundleError(f"{folder}: {name} is missing; export the checkpoint again")
    return manifest


def verify_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Hash every file and yield its name once it is proven whole.

    Raises:
        BundleError: a file cannot be read, or its hash differs from the manifest.
    """
    for name, entry in manifest.files.items():
        try:
            found = sha256_file(folder / name)
        except OSError as error:
            raise BundleError(f"{folder}: {name} cannot be read ({error.strerror}); build the bundle again") from error
        if found != entry.sha256:
            raise BundleError(f"{folder}: {name} is corrupt (its SHA-256 changed); build the bundle again")
        yield name


def file_entries(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Size and SHA-256 of each named file of ``folder``."""
    return {name: FileEntry((folder / name).stat().st_size, sha256_file(folder / name)) for name in names}


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def staged(target: Path, *, force: bool = False) -> Iterator[Path]:
    """Give an empty folder to write into, and publish it as ``target`` when the block ends without an error.

    The folder lies beside the target. On any error, Ctrl-C included, it is removed and the target is untouched.
    With ``force`` an existing target is replaced, and only at the end.

    Raises:
        UsageError: the target exists and ``force`` is false, or is no folder of llmc's, or cannot be written.
        ResourceError: the disk is full.
    """
    place = Path(os.path.realpath(target))  # through a link: what it points to is replaced, not the link
    _recover(place)
    refuse_to_overwrite(target, force)
    made = [parent for parent in place.parents if not parent.exists()]
    staging = place.parent / f".{place.name}.{os.getpid()}.staging"
    writing = True  # whether an error is of our own writing; those of the caller's block keep their own names
    try:
        staging.mkdir(parents=True)
        writing = False
        yield staging
        writing = True
        _sync(staging)
        refuse_to_overwrite(target, force)  # it may have appeared meanwhile
        _swap(staging, place)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"{target}: the disk is full; free some space and run again") from error
        if writing:
            raise UsageError(f"{target}: cannot write here ({error.strerror}); choose another output folder") from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        with suppress(OSError):
            for parent in made:  # goes as far up as they are empty
                parent.rmdir()


def refuse_to_overwrite(target: Path, force: bool) -> None:
    """Check before any work that :func:`staged` may publish to ``target``.

    Raises:
        UsageError: the target exists and ``force`` is false, or is no folder of llmc's.
    """
    if not target.exists():
        return
    if not force:
        raise UsageError(f"{target} exists; choose another output folder, or pass --force to replace it")
    ours = target.is_dir() and any((target / name).exists() for name in (BUNDLE_MANIFEST, EXPORT_MANIFEST))
    if not ours and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target} is not llmc's, so --force does not replace it; choose another output folder")
    # A checkpoint or notes that somebody keeps in there would go with the old folder.
    others = sorted(path.name for path in target.iterdir() if path.is_dir() or path.suffix not in OUR_SUFFIXES)
    if others:
        raise UsageError(
            f"{target} also holds {others[0]!r}, which llmc did not write, so --force does not replace it; "
            "move that away or choose another output folder"
        )


def _recover(place: Path) -> None:
    """Clear away what a killed process left beside ``place``; a folder it had set aside comes back where it was."""
    for folder in place.parent.glob(f".{glob.escape(place.name)}.*"):
        pid, _, kind = folder.name.removeprefix(f".{place.name}.").partition(".")
        if kind not in ("staging", "old") or not pid.isdigit() or _alive(int(pid)):
            continue
        with suppress(OSError):
            if kind == "old" and not place.exists():
                folder.rename(place)
            else:
                shutil.rmtree(folder)


def _alive(pid: int) -> bool:
    """Whether another process runs under ``pid``; our own number is one that a container gave to each run in turn."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(staging: Path, place: Path) -> None:
    """Put ``staging`` in its place; the folder that was there comes back if that fails."""
    old = staging.with_suffix(".old")
    try:
        if place.exists():
            place.rename(old)
        staging.rename(place)
        _sync_one(place.parent)
    finally:
        if not place.exists() and old.exists():
            old.rename(place)
        shutil.rmtree(old, ignore_errors=True)


def _size(path: Path) -> int | None:
    """Size of a regular file, None for anything else."""
    try:
        info = path.stat()
    except (OSError, ValueError):
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def _read(folder: Path, name: str, kind: type[T], remedy: str) -> T:
    path = folder / name
    data = _load(path, remedy)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int) or version < 1:
        raise BundleError(f"{path} is corrupt (no schema_version); make it again with: {remedy}")
    if version > SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema version {version}, written by llmc {data.get('llmc_version')}; this llmc reads up to "
            f"{SCHEMA_VERSION}: upgrade it with pip install -U llmc"
        )
    try:
        manifest: T = decode(kind, data)
    except (LlmcError, OverflowError) as error:
        raise BundleError(f"{path} is corrupt ({error}); make it again with: {remedy}") from error
    if data["graph_contract"] != GRAPH_CONTRACT_VERSION:
        found = f"graph contract {data['graph_contract']}, not {GRAPH_CONTRACT_VERSION}"
        raise BundleError(f"{path} follows {found}; make it again with: {remedy}")
    return manifest


def _load(path: Path, remedy: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(f"{path.parent}: no {path.name} here, not written by llmc; make it with: {remedy}") from None
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is corrupt ({error}); make it again with: {remedy}") from error


def decode(kind: Any, data: Any, where: str = "") -> Any:
    """Turn parsed JSON into the dataclass, tuple, dict or scalar that ``kind`` names, strictly.

    Raises:
        BundleError: a field is missing, unknown or of another type; the message names its place.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, data, where)
    if origin is tuple and isinstance(data, list):
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict and isinstance(data, dict):
        return {key: decode(arguments[1], value, f"{where}.{key}") for key, value in data.items()}
    if origin is types.UnionType:
        return None if data is None else decode(arguments[0], data, where)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(kind, type) and type(data) is kind:
        return data
    raise BundleError(f"{where or 'value'} is {data!r:.60}, expected {getattr(kind, '__name__', kind)}")


def _decode_dataclass(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise BundleError(f"{where or kind.__name__} is {data!r:.60}, expected an object")
    hints = typing.get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    for problem, keys in (("unknown", data.keys() - names), ("missing", names - data.keys())):
        if keys:
            raise BundleError(f"{problem} field {where}{'.' if where else ''}{min(keys)}")
    return kind(**{name: decode(hints[name], data[name], f"{where}.{name}".lstrip(".")) for name in names})
