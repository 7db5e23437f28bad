"""A checkpoint, an export or a bundle, read without an engine: the library half of ``llmc inspect``."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmc import bundle
from llmc.bundle import CONFIG_FILE, Geometry, Manifest, Source
from llmc.errors import UsageError
from llmc.export.sources.checkpoint import Checkpoint, read_checkpoint
from llmc.runtime.kv.budget import plan_load, round_up
from llmc.runtime.sessions.staged import find_stages

# Kinds of files by the ends of their names; all others are text: tokenizer, templates, manifest, hashes.
DISK_KINDS = {"weights": (".bin", ".safetensors", ".gguf"), "graphs": (".onnx",), "engine": (".plan",)}


@dataclass(frozen=True)
class Memory:
    """Bytes that running takes with ``batch`` sequences of ``context`` tokens, by what they are for.

    For a bundle this is its own plan; before that, weights as they are stored and a float32 cache.
    """

    context: int
    batch: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class StageSummary:
    """A stage of a model, from its ``first`` to its ``last`` layer, and what it takes; None where it is elsewhere."""

    number: int
    first: int
    last: int
    memory: Memory | None


@dataclass(frozen=True)
class Summary:
    """A folder of any kind; ``weights`` is bytes by dtype, of a bundle by graph; ``bundle`` is its manifest.

    ``disk`` is bytes of its files by what they are, largest first. ``device_memory`` is what a bundle for a GPU takes
    there, ``memory`` what it takes beside that of the machine. ``stages`` are all of a model whose last one this is,
    ``files`` also those of the others that are here, and ``memory`` the last one's alone.
    """

    kind: str
    path: Path
    geometry: Geometry
    source: Source
    files: dict[str, int]
    disk: dict[str, int]
    weights: dict[str, int]
    memory: Memory
    bundle: Manifest | None
    notes: tuple[str, ...]
    device_memory: Memory | None = None
    stages: tuple[StageSummary, ...] = ()


def summarize(path: Path) -> Summary:
    """Read a checkpoint, an export or a bundle, whichever ``path`` is."""
    kind = kind_of(path)
    if kind == "bundle":
        return _of_bundle(path)
    if kind == "export":
        return _summarize_unbuilt(kind, path, bundle.read_export(path))
    return _summarize_unbuilt(kind, path, read_checkpoint(path))


def kind_of(path: Path) -> str:
    if path.is_file() and path.suffix == ".gguf":
        return "checkpoint"
    kinds = {bundle.BUNDLE_MANIFEST: "bundle", bundle.EXPORT_MANIFEST: "export", CONFIG_FILE: "checkpoint"}
    kinds[bundle.ADAPTER_FILE] = "checkpoint"  # which is refused as such when it is read
    for name, kind in kinds.items():
        if (path / name).exists():
            return kind
    raise UsageError(
        "path",
        f"{path} has neither {bundle.BUNDLE_MANIFEST} (a bundle), {bundle.EXPORT_MANIFEST} (an export) nor "
        f"{CONFIG_FILE} (a Hugging Face checkpoint)",
        "give a folder with one of them, or a .gguf file",
    )


def _of_bundle(path: Path) -> Summary:
    manifest = bundle.read_bundle(path)
    context = manifest.limits.max_context
    files, weights, stages = dict[str, int](), dict[str, int](), list[StageSummary]()
    memory = Memory(context, 1, plan_load(manifest).parts)
    for number, part in find_stages(path, manifest).items():
        layers, takes = manifest.list_layers(number), None
        if part is not None:
            place = "" if part is manifest else f"{bundle.STAGE_FOLDER.format(number)}/"
            takes = Memory(context, 1, plan_load(part).parts)
            files[place + bundle.BUNDLE_MANIFEST] = (path / place / bundle.BUNDLE_MANIFEST).stat().st_size
            files |= {place + name: entry.size for name, entry in part.files.items()}
            weights |= {place + graph.file: graph.weight_bytes for graph in part.graphs.values()}
        stages.append(StageSummary(number, layers[0], layers[-1], takes))
    device = None
    if manifest.device is not None:
        positions = round_up(manifest.engine, context)
        device = Memory(positions, 1, manifest.device.parts(positions, 1))
    found = manifest.geometry, manifest.source, files, disk_bytes(files), weights, memory, manifest, manifest.notes
    return Summary("bundle", path, *found, device, tuple(stages) if manifest.stage.before else ())


def disk_bytes(files: Mapping[str, int]) -> dict[str, int]:
    """Bytes on disk by what they are, largest first, of the sizes of files by name."""
    found: Counter[str] = Counter()
    for name, size in files.items():
        found[next((kind for kind, ends in DISK_KINDS.items() if name.endswith(ends)), "text")] += size
    return dict(found.most_common())


def _summarize_unbuilt(kind: str, path: Path, found: Checkpoint | bundle.ExportManifest) -> Summary:
    geometry = found.geometry
    context = geometry.max_positions
    here = sorted(path.iterdir()) if path.is_dir() else [path]
    files = {file.name: file.stat().st_size for file in here if file.is_file()}
    parts = {"weights": sum(found.weights.values()), "cache": geometry.cache_bytes(context, 1)}
    memory = Memory(context, 1, parts)
    on_disk = disk_bytes(files)
    return Summary(kind, path, geometry, found.source, files, on_disk, found.weights, memory, None, found.notes)
