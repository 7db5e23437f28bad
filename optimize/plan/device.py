"""Memory that a bundle takes on a GPU, from geometry and recipe alone. Nothing here was measured on a GPU yet."""

from pathlib import Path

from llmc.bundle import CACHE_BYTES, MOST_CANDIDATES, EngineConfig, Geometry, Limits, MemoryPlan, Part, Recipe
from llmc.bundle.model.names import HEAD
from llmc.optimize.lower.context import Computed, Float16, Float32, choose_table_config, quant_configs
from llmc.optimize.plan.memory import HOST, LOGITS_COPIES
from llmc.optimize.plan.sizes import INTERPRETER, MB, activation_bytes, linear_bytes, table_bytes
from llmc.runtime.bench.phases import TOKENIZER_FACTOR
from llmc.runtime.sessions.tensorrt.steps import KEPT_STEPS

# The driver's context and the libraries' kernels: 300 to 600 MB are usual.
CONTEXT = 500 * MB
FLOATS = (Computed, Float16, Float32)
# Arrays of scores that attention made of basic operators keeps: TensorRT's at most the products and their softmax, ONNX
# Runtime's the masked ones, too. In float16 ONNX Runtime's kernels keep none.
SCORES, MASKED_SCORES = 2, 3
# ONNX Runtime's CUDA kernels expand integer weights in pieces of at most so much where a call has several rows.
EXPANDED = 256 * MB
# While it loads, it times its fast kernels with as many rows, for each product on a copy of its weights.
TIMED_ROWS = 2048
# A recorded step of TensorRT holds so much for each layer: for Llama 3.2 1B, of 16 layers, vLLM took 0.21 GiB for 35 of
# them (its pull request 11349).
RECORDED_LAYER = 400_000
# Logits and their exponentials, which are made in place of distances.
ROW_COPIES = 2
CANDIDATE = 4 + 8  # a logit and an id


def host_plan(geometry: Geometry, tokenizer_bytes: int) -> MemoryPlan:
    """The machine's memory that a process takes whose model lies on a GPU."""
    return MemoryPlan().add(
        Part("engine", INTERPRETER + HOST),
        Part("tokenizer", TOKENIZER_FACTOR * tokenizer_bytes),
        Part("logits", per_row=LOGITS_COPIES * 4 * geometry.vocab_size),
    )


def device_plan(geometry: Geometry, limits: Limits, recipe: Recipe) -> MemoryPlan:
    """The GPU's memory that loading and running a bundle takes."""
    size = CACHE_BYTES[recipe.compute]
    stored = next(iter(quant_configs(recipe, geometry).values()))
    table = geometry.tables[0]
    shared = geometry.tied_head and isinstance(stored.of(HEAD), FLOATS)  # the head reads the table, transposed
    chunk = min(limits.prefill_chunk, limits.max_context)
    attention = attention_bytes(geometry, recipe, chunk, limits.max_context)
    blocked = recipe.phases == "shared" and recipe.block_size > 0
    largest = max(geometry.linears, key=lambda linear: linear.size)
    expanded = min(EXPANDED, size * largest.size) if blocked else 0
    timed = size * TIMED_ROWS * (largest.inputs + largest.outputs) + largest.size if blocked else 0
    recorded = KEPT_STEPS * RECORDED_LAYER * geometry.layers if recipe.phases == "single" else 0
    held = [(linear, stored.of(linear.name)) for linear in geometry.linears]
    rows = 0 if shared else table_bytes(table, choose_table_config(stored, geometry, table), compute=size)
    return MemoryPlan().add(
        Part("context", CONTEXT),
        Part("weights", sum(linear_bytes(linear, config, compute=size) for linear, config in held) + rows),
        Part("workspace", max(activation_bytes(geometry, chunk, size) + attention + expanded + recorded, timed)),
        Part("cache", per_position=geometry.cache_bytes(1, bytes_per_value=size)),
        Part("logits", per_row=ROW_COPIES * 4 * geometry.vocab_size + CANDIDATE * MOST_CANDIDATES),
    )


def attention_bytes(geometry: Geometry, recipe: Recipe, chunk: int, context: int) -> int:
    """Bytes that attention takes beside inputs and outputs: ``chunk`` tokens of a row of ``context`` positions."""
    size = CACHE_BYTES[recipe.compute]
    if recipe.phases == "shared" and recipe.compute == "float16":
        # Wide heads, and GPUs before 8.0, have a kernel that wants keys and values for every head.
        return 2 * size * max((each.heads * each.head_dim for each in geometry.attentions), default=0) * context
    arrays = MASKED_SCORES if recipe.phases == "shared" else SCORES
    return size * arrays * geometry.most_heads * chunk * context


def with_engine(plan: MemoryPlan, folder: Path, engine: EngineConfig | None) -> MemoryPlan:
    """The plan with the weights that the engine really holds: it may keep a layout for each profile."""
    if engine is None or not engine.file:
        return plan
    return plan.without("weights").add(Part("weights", (folder / engine.file).stat().st_size))
