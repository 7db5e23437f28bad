"""Memory of builds and of the bundles they make, from geometry and recipe alone, before anything is read.

Every constant below was measured as resident memory on Linux x86-64, with onnxruntime 1.31 and Python 3.11, on the
geometries of Qwen2.5-0.5B and Llama-3.2-1B.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from llmc.bundle import CACHE_BYTES, Geometry, Limits, Manifest, MemoryPlan, Part, Recipe
from llmc.bundle.model.experts import Experts
from llmc.bundle.model.kinds import takes_whole_texts
from llmc.bundle.model.linear import Linear
from llmc.bundle.model.names import EMBEDDING, HEAD, PER_LAYER
from llmc.optimize.calibrate.text import JUDGED_WINDOW
from llmc.optimize.lower.context import Mxfp4, QuantConfig, choose_table_config, quant_configs, shares_head
from llmc.optimize.plan.adapters import count_opened_bytes, plan_factors
from llmc.optimize.plan.sizes import (
    BLOCK_COPIES,
    INTERPRETER,
    MB,
    OPENED_GRAPH,
    activation_bytes,
    coded_bytes,
    expert_bytes,
    file_bytes,
    linear_bytes,
    offset_bytes,
    reference_bytes,
    table_bytes,
    weight_bytes,
)
from llmc.optimize.plan.vision import count_reference_bytes, count_tower_bytes, plan_tower
from llmc.optimize.recipe import needs_calibration
from llmc.runtime.bench.phases import TOKENIZER_FACTOR
from llmc.runtime.kv.budget import MemoryEstimate

# The engine's logits, and probabilities and their order while sampling.
LOGITS_COPIES = 3

# A build adds: onnx, onnx-ir, the graphs, click and rich.
BUILDER = 35 * MB
TORCH = 260 * MB
# GPTQ factorizes the widest moment, which is turned for prompts: besides, it holds that reversed, its factor, and the
# factor turned back.
GPTQ_MATRICES = 4
# Quantizing the largest matrix holds its integers (1 byte) in pieces, joined, and unpacked and packed again.
QUANTIZING = 4
# Rotating the largest matrix of a layer holds it in float32 before and after, and its integers.
ROTATING = 2 * 4 + 2
# The allocator gives back only part of that; what remains stays resident beside the finished bundle. The Q4_K_M file of
# Qwen2.5-Coder-0.5B, whose largest matrix has 136 million weights, takes 1.84 GB to build.
RETAINED = 2
# TensorRT-RTX 1.7's builder with its kernels, and what it holds of each byte of weights beside the mapped file: slopes
# between one layer and three of an 8B model. Floats are laid out anew, nibbles unpacked.
ENGINE_LIBRARY = 350 * MB
# Memory of the machine, not the GPU, that the driver, the engine's library and its kernels take; not measured yet.
HOST = 600 * MB
ENGINE_COPIES = {"int8": 1.1, "int4": 2.0}
ENGINE_FLOAT_COPIES = 1.7
# A golden prompt and its answer; with a text, one of its windows.
GOLDEN_TOKENS = 40
# Logits of these tokens at a time: the reference's, the engine's, and a copy of each call's and of all calls'.
LOGITS_HELD = 4


def bundle_bytes(geometry: Geometry, recipe: Recipe, limits: Limits, tokenizer_bytes: int) -> int:
    """Bytes of a bundle on disk. Weights that both graphs store alike count once."""
    stored = dict[tuple[str, QuantConfig, bool], int]()
    for phase, configs in quant_configs(recipe, geometry).items():
        rotated = recipe.rotates(phase)
        for linear in geometry.linears:
            config = configs.of(linear.name)
            stored[linear.name, config, rotated and linear.name != HEAD] = file_bytes(linear, config)
        for item in geometry.mixtures:
            config = configs.stored(item.name)
            parts = item.count * sum(file_bytes(part, config) for part in item.parts)
            stored[item.name, config, rotated] = coded_bytes(item) if isinstance(config, Mxfp4) else parts
        for table in geometry.tables:
            config = choose_table_config(configs, geometry, table)
            shares = geometry.tied_head and table.name == EMBEDDING
            stored[table.name, config, False] = (offset_bytes if shares else table_bytes)(table, config)
    beside = (
        count_tower_bytes(geometry, configs) + count_opened_bytes(geometry, limits, recipe) + _count_small(geometry)
    )
    return sum(stored.values()) + beside + tokenizer_bytes


def memory_plan(geometry: Geometry, limits: Limits, recipe: Recipe, tokenizer_bytes: int) -> MemoryPlan:
    """Memory that loading and running a bundle takes; ``tokenizer_bytes`` is the size of tokenizer.json.

    The embedding's table is counted whole (reading a row makes a page of 2 MiB resident), which also covers the head
    while the engine packs it. A table of inputs for each layer is not: its rows are read from a mapped file, whose
    pages the system takes back when memory is short.
    """
    graphs = quant_configs(recipe, geometry)
    chunk = limits.max_context if takes_whole_texts(geometry) else min(limits.prefill_chunk, limits.max_context)
    tables = {
        table.name: sum(table_bytes(table, form) for form in forms)
        for table in geometry.tables
        for forms in [{choose_table_config(each, geometry, table) for each in graphs.values()}]
    }
    experts = sum(expert_bytes(it, stored.stored(it.name)) for stored in graphs.values() for it in geometry.mixtures)
    first = next(iter(graphs.values()))
    # Kernels read them in the mapped file, once for all graphs.
    mapped = sum(coded_bytes(item) for item in geometry.mixtures if first.stored(item.name) == Mxfp4())
    shared = 0
    if shares_head(recipe, geometry):
        shared = linear_bytes(geometry.linear[HEAD], graphs["decode"].of(HEAD), copies=BLOCK_COPIES)
    ropes = {
        item.rope: item.rotary_dim * (2 if 0 < item.grows_after < limits.max_context else 1)
        for item in geometry.attentions
        if item.rope is not None
    }
    # Scores of a chunk against all that is cached, a cosine and a sine for each half of a head, and rows of
    # embeddings, in float32.
    biases = geometry.encoder is not None and geometry.encoder.biased  # as many as scores of a row
    per_length = 4 * (
        geometry.most_heads * chunk * (1 + biases) + sum(ropes.values()) * len(graphs) + geometry.row_width
    )
    logits = LOGITS_COPIES * 4 * geometry.result_width * geometry.most_results
    return MemoryPlan().add(
        Part("engine", INTERPRETER + OPENED_GRAPH * len(graphs)),
        Part("tokenizer", TOKENIZER_FACTOR * tokenizer_bytes),
        Part("weights", sum(weight_bytes(geometry, recipe, BLOCK_COPIES).values()) - experts - shared, of_layers=True),
        Part("experts", experts, of_layers=True),
        Part("mapped experts", mapped, of_layers=True),
        Part("embedding", tables[EMBEDDING] + _count_small(geometry), of_layers=True),
        Part("workspace", activation_bytes(geometry, chunk, 4), per_length=per_length),
        *_plan_caches(geometry, CACHE_BYTES[recipe.cache_type()], chunk),
        Part("logits", per_row=logits),
        *plan_factors(geometry, limits, recipe),
        Part("per-layer table", tables.get(PER_LAYER, 0), beside=True),
        *plan_tower(geometry, limits, first),
    )


def _count_small(geometry: Geometry) -> int:
    """Bytes of the small tables, in float32."""
    return sum(4 * rows * width for rows, width in geometry.small_tables.values())


def _plan_caches(geometry: Geometry, size: int, chunk: int) -> Iterator[Part]:
    """Keys and values of ``size`` bytes, by the positions that a row holds of them; and states."""
    held = Counter[int]()
    for cache in geometry.caches:
        held[cache.count_held(chunk)] += cache.bytes(1, size) if cache.kind == "kv" else 0
    yield from (Part("cache", per_position=count, window=most, of_layers=True) for most, count in held.items())
    states = sum(cache.bytes(0, size) for cache in geometry.caches)
    yield Part("states", per_row=states, of_layers=True)


def plan_build(
    geometry: Geometry,
    recipe: Recipe,
    limits: Limits,
    tokenizer_bytes: int,
    samples: int = 0,
    length: int = 0,
    judged: bool = False,
    device: MemoryPlan | None = None,
    one_memory: bool = False,
) -> MemoryEstimate:
    """The peak of a build: the largest of calibrating, quantizing, and judging the finished bundle.

    Args:
        samples, length: of the calibration text, if the recipe calibrates.
        judged: whether quality is judged on a text.
        device: of a bundle for a GPU, which is judged on the CPU only where that fits as well.
        one_memory: whether the GPU that an engine is built on has no memory of its own.
    """
    if device is not None:
        steps = [_estimate_quantizing(geometry, recipe), _engine(device, recipe, one_memory)]
    else:
        judging = _estimate_judging(
            geometry, recipe, limits, tokenizer_bytes, JUDGED_WINDOW if judged else GOLDEN_TOKENS
        )
        steps = [_estimate_quantizing(geometry, recipe), judging]
    if needs_calibration(recipe):  # torch stays in memory after it
        steps = [{**step, "torch": TORCH} for step in steps]
        steps.append(_estimate_calibrating(geometry, recipe, samples, length))
    parts = max(steps, key=lambda step: sum(step.values()))
    total = sum(parts.values())
    # The context makes a bundle no larger to build, and neither does the batch.
    return MemoryEstimate("build", parts, limits.max_context, limits.max_batch, limits, lambda context, batch: total)


def plan_rebuild(manifest: Manifest, one_memory: bool = False) -> MemoryEstimate:
    """The peak of making a bundle's engine anew: nothing is calibrated this time; ``one_memory`` as above."""
    recipe = replace(manifest.recipe, scheme="rtn", smoothing=0.0, activations="none", sparsity="", pruning="")
    device = manifest.device
    plan = plan_build(manifest.geometry, recipe, manifest.limits, 0, device=device, one_memory=one_memory)
    return replace(plan, phase="rebuild")


def _estimate_quantizing(geometry: Geometry, recipe: Recipe) -> dict[str, int]:
    inner = max(linear.size for linear in geometry.linears if linear.layer is not None)
    rotating = ROTATING * inner if recipe.rotated else 0
    return {"engine": INTERPRETER + BUILDER, "largest matrix": max(QUANTIZING * _largest(geometry), rotating)}


def _engine(device: MemoryPlan, recipe: Recipe, one_memory: bool) -> dict[str, int]:
    """An engine's builder; on the GPU it holds at most the weights of all kernels that it times: counted, not
    measured."""
    copies = ENGINE_COPIES.get(recipe.precision, ENGINE_FLOAT_COPIES)
    host = {"engine": INTERPRETER + BUILDER + ENGINE_LIBRARY, "weights": round(copies * device["weights"].fixed)}
    if not one_memory:
        return host
    host["engine"] += HOST - ENGINE_LIBRARY
    return {**host, **{f"GPU {name}": device[name].fixed for name in ("context", "weights", "workspace")}}


def _largest(geometry: Geometry) -> int:
    parts: list[Linear | Experts] = [*geometry.linears, *geometry.mixtures]
    return max(coded_bytes(part) if isinstance(part, Experts) and part.codes else part.size for part in parts)


def _estimate_judging(
    geometry: Geometry, recipe: Recipe, limits: Limits, tokenizer_bytes: int, tokens: int
) -> dict[str, int]:
    """The finished bundle, loaded, beside what quantizing left, and the reference or its logits, which take turns."""
    plan = memory_plan(geometry, limits, recipe, tokenizer_bytes)
    run = plan.parts(min(limits.max_context, tokens))
    layer = _largest_layer(geometry, reference_bytes)
    return {
        **run,
        "engine": run["engine"] + BUILDER,
        "left from quantizing": RETAINED * _largest(geometry),
        "reference": max(layer, count_reference_bytes(geometry), LOGITS_HELD * 4 * tokens * geometry.vocab_size),
    }


def _largest_layer(geometry: Geometry, count: Callable[[Linear | Experts], int] = lambda part: part.size) -> int:
    layers = range(geometry.layers)
    parts: list[Linear | Experts] = [*geometry.linears, *geometry.mixtures]
    return max(sum(count(part) for part in parts if part.layer == index) for index in layers)


def _estimate_calibrating(geometry: Geometry, recipe: Recipe, samples: int, length: int) -> dict[str, int]:
    """torch, a layer in float32 and what it is decided with, and the activations between two layers."""
    # Second moments of what linears of a layer read, where the scheme looks at them.
    read = [(group[0].layer, group[0].inputs) for group in geometry.readers if group[0].layer is not None]
    moments = max(sum(inputs**2 for layer, inputs in read if layer == index) for index in range(geometry.layers))
    # Experts' moments are made one after the other, of rows that are kept.
    rows = max((sum(part.inputs for part in item.parts) * item.chosen for item in geometry.mixtures), default=0)
    inverse = GPTQ_MATRICES * 4 * max(inputs for _, inputs in read) ** 2
    return {
        "engine": INTERPRETER + BUILDER,
        "torch": TORCH,
        "layer": 2 * 4 * _largest_layer(geometry),
        "second moments": 4 * moments + inverse + 4 * samples * length * rows if recipe.scheme != "rtn" else 0,
        "activations": 2 * 4 * samples * length * geometry.hidden_size,
    }
