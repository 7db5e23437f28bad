"""``llmc inspect``: show what a folder holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from llmc.cli import output as show
from llmc.cli.options import debug_option, json_option, source_argument

if TYPE_CHECKING:
    from llmc.bundle import EngineConfig, Geometry, Manifest, Source, Target
    from llmc.bundle.model.encoder import Encoder
    from llmc.cli.summary import Memory, StageSummary, Summary
    from llmc.sources import Located


NO_VERSION = "none"  # version of a library that has not built the engine yet
NOT_BUILT = "none yet: llmc build --rebuild makes it on the machine that is to run it"
VERIFIED = {
    "device": "on the GPU that it was built on",
    "cpu": "its graph on the CPU; the engine itself has not been run",
    "float32": "its graph on the CPU, computing in float32; the engine itself has not been run",
    "no": "not yet; run llmc verify on its GPU",
}
ATTENTION = {
    "fused": "fused: one kernel for each attention",
    "decomposed": "decomposed: the library has no fused kernel for some attention, and may take several",
    "basic": "basic operators: the library's own attention lacks what this model needs",
}


@click.command("inspect", short_help="Show what PATH holds, and the memory that it takes to run.")
@source_argument("path")
@json_option
@debug_option
def inspect_command(path: Located, as_json: bool) -> None:
    """Show what PATH holds, a bundle, an export, a checkpoint, a GGUF file or a name at the hub, and the memory that it
    takes to run."""
    from llmc.cli.summary import summarize

    summary = summarize(path)
    if as_json:
        show.print_json(summary)
    else:
        print_summary(summary)


def print_summary(summary: Summary) -> None:
    source, device = summary.source, summary.device_memory
    apart = " (this stage alone)" if summary.stages else "" if summary.bundle else " (float32); see llmc plan"
    rows = [
        (summary.kind, str(summary.path)),
        ("model", f"{source.name}, {show.weights_of(source, summary.geometry, summary.bundle is not None)}"),
        *source_rows(source),
        *geometry_rows(summary.geometry),
        *(bundle_rows(summary.bundle) if summary.bundle else []),
        ("weights", ", ".join(f"{show.size(count)} {dtype}" for dtype, count in summary.weights.items())),
        memory_row("memory", summary.memory, apart),
        *map(stage_row, summary.stages[:-1]),
        *([memory_row("GPU memory", device)] if device else []),
        ("on disk", disk_row(summary.disk)),
        *((name, show.size(count)) for name, count in summary.files.items()),
        *(("note", note) for note in summary.notes),
    ]
    show.print_rows(rows)


def source_rows(source: Source) -> list[tuple[str, str]]:
    """The hub's commit that the weights are from, and the adapters in them."""
    rows = [("adapter", f"{adapter.name}, {adapter.scale:g} times") for adapter in source.adapters]
    if source.origin is None:
        return rows
    name = f"{source.origin.repository}@{source.origin.commit}"
    return [("hub", f"{name}:{source.origin.file}".rstrip(":")), *rows]


def disk_row(parts: Mapping[str, int]) -> str:
    return f"{show.size(sum(parts.values()))} = {' + '.join(f'{show.size(n)} {part}' for part, n in parts.items())}"


def memory_row(name: str, memory: Memory, note: str = "") -> tuple[str, str]:
    parts = " + ".join(f"{show.size(count)} {part}" for part, count in memory.parts.items() if count)
    return f"{name} at {memory.context} tokens x {memory.batch}", f"{show.size(memory.total)} = {parts}{note}"


def stage_row(stage: StageSummary) -> tuple[str, str]:
    takes = "elsewhere" if stage.memory is None else memory_row("", stage.memory)[1]
    return f"stage {stage.number}", f"layers {stage.first} to {stage.last}: {takes}"


def geometry_rows(geometry: Geometry) -> list[tuple[str, str]]:
    inner = by_layers([f"inner size {mlp.inner}" for mlp in geometry.mlps]) or "no MLPs"
    chosen = [f"{mix.chosen} of {mix.count} for each token, inner size {mix.inner}" for mix in geometry.mixtures]
    states = [
        f"{layer.rule} of {' and '.join('x'.join(map(str, shape)) for shape in layer.state_shapes)} values"
        for layer in geometry.recurrents
    ]
    tables = [f"{geometry.vocab_size} rows of {geometry.layers} x {geometry.per_layer}"] if geometry.per_layer else []
    layers = geometry.attentions
    shapes = [f"{layer.heads} heads of {layer.head_dim}, {layer.kv_heads} for keys and values" for layer in layers]
    reach = [f"the last {layer.window} positions" if layer.window else "all positions" for layer in layers]
    head = f", head {'tied to' if geometry.tied_head else 'apart from'} the embedding"
    end = [] if geometry.encoder is None else [("result", result_of(geometry.encoder))]
    return [
        ("family", geometry.model_type),
        ("layers", f"{geometry.layers} of hidden size {geometry.hidden_size}, {inner}"),
        ("attention", by_layers(shapes)),
        ("window", by_layers(reach)),
        *((name, by_layers(rows)) for name, rows in (("experts", chosen), ("states", states)) if rows),
        *(("per-layer table", rows) for rows in tables),
        ("vocabulary", f"{geometry.vocab_size}{'' if geometry.encoder else head}"),
        ("positions", str(geometry.max_positions)),
        *end,
    ]


def result_of(encoder: Encoder) -> str:
    pooled = "the mean of all tokens" if encoder.pooling == "mean" else f"the {encoder.pooling} token"
    if encoder.result == "scores":
        return f"a score, made at {pooled}"
    return f"an embedding of {encoder.width} values{', of length one' if encoder.normalized else ''}, from {pooled}"


def by_layers(values: Sequence[str]) -> str:
    """The value of all layers, or each value with its number of layers: ``all positions (12 layers)``."""
    counts = Counter(values)
    return ", ".join(value if len(counts) == 1 else f"{value} ({count} layers)" for value, count in counts.items())


def bundle_rows(manifest: Manifest) -> list[tuple[str, str]]:
    target, stage, span = manifest.target, manifest.stage, manifest.list_layers()
    layers = f"layers {span[0]} to {span[-1]}"
    name = f"{stage.number}{', the last' if stage.is_last else ''}"  # numbers begin with 0
    return [
        ("target", f"{target.name}, {engine_of(target)}"),
        *(engine_rows(manifest.engine) if manifest.engine else []),
        ("recipe", show.recipe(manifest.recipe)),
        *prompt_rows(manifest),
        *show.calibration_rows(manifest.recipe),
        *([("stage", f"{name} of {len(stage.borders)}: {layers}")] if stage.borders[1:] else []),
        ("limits", limits_of(manifest)),
        *show.quality_rows(manifest.quality),
        *_tower_rows(manifest),
    ]


def _tower_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """The tokens of an image or a minute of audio, and the tower's quality: for an encoder, the distance of its
    vectors."""
    vision, audio = manifest.geometry.vision, manifest.geometry.audio
    quality = show.similarity_rows(manifest.similarity, "tower's rows")
    if audio is not None:
        tokens = audio.count_rows(60 * audio.spectrum.rate // audio.spectrum.hop)
        return [("audio", f"{tokens} tokens for a minute"), *quality]
    if vision is None:
        return [*show.similarity_rows(manifest.similarity), *show.ranking_rows(manifest.ranking)]
    some = "a token" if vision.tokens == 1 else f"{vision.tokens} tokens"
    images = f"{some} for {vision.tile} x {vision.tile} pixels, at most {vision.most_tokens:,} for each"
    return [("images", images), *quality]


def prompt_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """The way the build reduces outliers, if activations of prompts are rounded token by token."""
    recipe = manifest.recipe
    if recipe.activations != "per-token":
        return []
    treatment = f"smoothed by {recipe.smoothing:g}" if recipe.smoothing else "neither rotated nor smoothed"
    treatment = "mixed in blocks" if manifest.geometry.encoder else treatment
    return [("prompts", f"8-bit activations, {'rotated' if 'prefill' in recipe.rotated else treatment}")]


def limits_of(manifest: Manifest) -> str:
    limits = manifest.limits
    if manifest.geometry.encoder:
        return f"texts of {limits.max_context} tokens, short ones together in calls of {limits.prefill_chunk}"
    room = f", {limits.adapters} adapters of rank {limits.rank}" if limits.adapters else ""
    return f"{limits.max_context} tokens x {limits.max_batch}, prefill in chunks of {limits.prefill_chunk}{room}"


def engine_of(target: Target) -> str:
    """The library and version that built a bundle, if any, and the version that it needs."""
    if target.engine_version == NO_VERSION:
        return f"{target.engine} {target.engine_minimum} or newer"
    return f"{target.engine} {target.engine_version} (needs {target.engine_minimum} or newer)"


def describe_attention(engine: EngineConfig) -> str:
    wide = f", with {engine.border} at its border" if engine.border else ""
    return ATTENTION.get(engine.attention, engine.attention) + wide


def engine_rows(engine: EngineConfig) -> list[tuple[str, str]]:
    gpus = f"{engine.platform}, compute capability {engine.gpus}"
    decode, prefill = engine.decode, engine.prefill
    return [
        ("engine", engine.file or NOT_BUILT),
        ("engine runs on", gpus if engine.file else "the machine that it will be built on"),
        ("computes in", engine.compute),
        *([("compiler flags", engine.flags)] if engine.flags else []),
        *([("engine attention", describe_attention(engine))] if engine.attention else []),
        ("buckets", f"{', '.join(map(str, engine.buckets))} positions"),
        (
            "calls",
            f"decode of {decode.batch} rows, prefill of {prefill.sequence} tokens with logits of {prefill.outputs}",
        ),
        ("verified", VERIFIED.get(engine.verified, engine.verified)),
    ]
