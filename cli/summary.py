"""Summarize a checkpoint, an export or a bundle without an engine: the library part of ``llmc inspect``."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmc import bundle
from llmc.bundle import Geometry, Manifest, Source
from llmc.export.sources.checkpoint import Checkpoint, read_checkpoint
from llmc.runtime.kv.budget import plan_load, round_up
from llmc.runtime.sessions.staged import find_stages
from llmc.sources import Kind, Located

# Kinds of files by suffix; all others are text: tokenizer, templates, manifest, hashes.
DISK_KINDS = {"weights": (".bin", ".safetensors", ".gguf"), "graphs": (".onnx",), "engine": (".plan",)}


@dataclass(frozen=True)
class Memory:
    """Bytes to run ``batch`` sequences of ``context`` tokens, by purpose.

    For a bundle this is its own plan; otherwise, the stored weights and a float32 cache.
    """

    context: int
    batch: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class StageSummary:
    """A stage of a model, with its ``first`` and ``last`` layer and its memory; None if it is elsewhere."""

    number: int
    first: int
    last: int
    memory: Memory | None


@dataclass(frozen=True)
class Summary:
    """A checkpoint, export or bundle. ``weights``: bytes by dtype, for a bundle by graph. ``bundle``: its manifest.

    ``disk``: bytes of its files by kind, largest first. ``device_memory``: a GPU bundle's memory on the GPU;
    ``memory``: on the machine. ``stages``: all stages of a model, if this is its last one; ``files`` then includes
    those of the other stages that are here, ``memory`` only the last one's.
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


def summarize(source: Located) -> Summary:
    path = source.path
    if source.kind is Kind.BUNDLE:
        return _of_bundle(path)
    if source.kind is Kind.EXPORT:
        return _summarize_unbuilt("export", path, bundle.read_export(path))
    return _summarize_unbuilt("checkpoint", path, read_checkpoint(path))


def _of_bundle(path: Path) -> Summary:
    manifest = bundle.read_bundle(path)
    context = manifest.limits.max_context
    files, weights, stages = dict[str, int](), dict[str, int](), list[StageSummary]()
    memory = Memory(context, 1, plan_load(manifest).parts)
    for number, part in find_stages(path, manifest).items():
        layers, takes = manifest.list_layers(number), None
        if part is not None:
            prefix = "" if part is manifest else f"{bundle.STAGE_FOLDER.format(number)}/"
            takes = Memory(context, 1, plan_load(part).parts)
            files[prefix + bundle.BUNDLE_MANIFEST] = (path / prefix / bundle.BUNDLE_MANIFEST).stat().st_size
            files |= {prefix + name: entry.size for name, entry in part.files.items()}
            weights |= {prefix + graph.file: graph.weight_bytes for graph in part.graphs.values()}
        stages.append(StageSummary(number, layers[0], layers[-1], takes))
    device = None
    if manifest.device is not None:
        positions = round_up(manifest.engine, context)
        device = Memory(positions, 1, manifest.device.parts(positions, 1))
    parts = manifest.geometry, manifest.source, files, disk_bytes(files), weights, memory, manifest, manifest.notes
    return Summary("bundle", path, *parts, device, tuple(stages) if manifest.stage.before else ())


def disk_bytes(files: Mapping[str, int]) -> dict[str, int]:
    """Bytes on disk by kind, largest first, from the sizes of files by name."""
    sizes: Counter[str] = Counter()
    for name, size in files.items():
        sizes[next((kind for kind, ends in DISK_KINDS.items() if name.endswith(ends)), "text")] += size
    return dict(sizes.most_common())


def _summarize_unbuilt(kind: str, path: Path, found: Checkpoint | bundle.ExportManifest) -> Summary:
    geometry = found.geometry
    context = geometry.max_positions
    here = sorted(path.iterdir()) if path.is_dir() else [path]
    files = {file.name: file.stat().st_size for file in here if file.is_file()}
    parts = {"weights": sum(found.weights.values()), "cache": geometry.cache_bytes(context, 1)}
    memory = Memory(context, 1, parts)
    on_disk = disk_bytes(files)
    return Summary(kind, path, geometry, found.source, files, on_disk, found.weights, memory, None, found.notes)
