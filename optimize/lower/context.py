"""The order for a lowering: the model's shapes, its limits, and the storage of each weight."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import ml_dtypes
import numpy as np
import onnx_ir as ir

from llmc.bundle import DECODER_FILE, Geometry, Limits, Recipe
from llmc.bundle.model.attention import Attention
from llmc.bundle.model.encoder import SCORE
from llmc.bundle.model.experts import Experts
from llmc.bundle.model.kinds import find_evidence
from llmc.bundle.model.linear import Linear
from llmc.bundle.model.names import EMBEDDING, HEAD, SENSITIVE
from llmc.errors import BuildError, UsageError
from llmc.exported import CodedTensor
from llmc.optimize.quantize.grid import Float, Grid
from llmc.optimize.weights.file import WeightFile
from llmc.optimize.weights.store import Calibrated

# Types of activations.
ARRAY_TYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Float32:
    """Keep weights as float32."""


@dataclass(frozen=True)
class Float16:
    """Keep weights as float16 and compute in float32."""


@dataclass(frozen=True)
class Computed:
    """Keep weights in the type that the graph computes in."""


@dataclass(frozen=True)
class WeightOnly:
    """Integer weights in blocks, float activations (the engine may quantize them per block inside its kernel)."""

    grid: Grid


@dataclass(frozen=True)
class Mxfp4:
    """Keep experts in MXFP4 as the checkpoint has them."""


@dataclass(frozen=True)
class OwnCodes:
    """Rows of a table as the checkpoint's codes, in the fewest bits that hold them, with its scales and offsets."""


@dataclass(frozen=True)
class PerToken:
    """int8 weights with a scale per output, int8 activations with a scale per token (W8A8)."""

    grid: Grid = Grid(8)


@dataclass(frozen=True)
class Static:
    """int8 weights with a scale per output, int8 activations with one calibrated scale per tensor (W8A8)."""

    grid: Grid = Grid(8)


# Inputs that share a scale in a head of 8 bits beside a body of 8 bits, at most.
HEAD_BLOCK = 32
# Values from which a head is worth a call of its own in each step, of 0.05 ms: a tenth of a small model's weights.
LARGE_HEAD = 2**24

QuantConfig = Float32 | Float16 | Computed | WeightOnly | Mxfp4 | OwnCodes | PerToken | Static


@dataclass(frozen=True)
class QuantConfigs:
    """The storage of a graph's linears: the body's config, the head's, and those of patterns; the last match wins.

    Where ``w8a8`` is given it takes the place of integer weights of ``w8a8_bits`` everywhere but in the head.
    """

    body: QuantConfig
    head: QuantConfig
    layers: tuple[tuple[str, QuantConfig], ...] = ()
    w8a8: PerToken | Static | None = None
    w8a8_bits: tuple[int, ...] = (2, 4, 8)

    def stored(self, module: str) -> QuantConfig:
        """The config of a linear, or of experts, without quantized activations."""
        matches = [config for pattern, config in self.layers if fnmatchcase(module, pattern)]
        return matches[-1] if matches else self.head if module == HEAD else self.body

    def of(self, module: str) -> QuantConfig:
        """The config of the linear called ``module``, for example ``model.layers.0.mlp.down_proj``."""
        config = self.stored(module)
        if module.startswith(f"{SCORE}."):  # a row, of which a score is made: nothing is saved by rounding it
            return Float32()
        replaced = (
            self.w8a8 and module != HEAD and isinstance(config, WeightOnly) and config.grid.bits in self.w8a8_bits
        )
        return self.w8a8 if self.w8a8 and replaced else config


@dataclass(frozen=True)
class LoweringContext:
    """One graph to make."""

    phase: str
    geometry: Geometry
    limits: Limits
    quant: QuantConfigs
    weights: WeightFile  # the file that packed weights go into
    calibrated: Calibrated  # float weights as calibration left them, and the integers and scales that it chose
    cache: str = "float32"  # type of the KV cache, see :class:`llmc.bundle.Recipe`
    compute: str = "float32"  # type of activations: float32, float16 or bfloat16
    linear_done: Callable[[], None] = lambda: None  # called after each linear, for progress
    # whether the engine's attention takes several tokens in each of several rows, of any lengths; where it does, the
    # cache holds floats
    ragged_rows: bool = False
    # positions behind a step's token that its folded heads write over, 0 where heads are not folded
    overwritten: int = 0
    # whether the residual stream is in another basis, see :mod:`llmc.optimize.lower.onnxruntime.rotation`
    rotated: bool = False
    opened: bool = False  # whether calls bring factors that change its linears
    unsigned: bool = False  # whether the weights of integer products are uint8, see :class:`llmc.bundle.Target`
    hidden: tuple[int, ...] = ()  # borders of the hidden states that the graph gives to a draft head
    # weights of the norms of a rotated stream, by their names, once these are lowered
    gains: dict[str, Float] = field(default_factory=dict)

    @property
    def takes_prompts(self) -> bool:
        """True if calls may have many tokens."""
        return self.phase != "decode" or self.opened

    @property
    def table_rows(self) -> int:
        """Positions that rotary tables cover: the context, and positions behind it that the last step overwrites, for
        which ONNX Runtime needs rows, too."""
        return self.limits.max_context + self.overwritten

    @property
    def array_type(self) -> np.dtype[np.generic]:
        """The type of activations, for arrays."""
        return ARRAY_TYPES[self.compute]

    @property
    def type(self) -> ir.DataType:
        """The type of activations, for the graph."""
        return ir.DataType.from_numpy(self.array_type)

    @property
    def attention_type(self) -> ir.DataType:
        """Type of the inputs and outputs of attention over the cache: float16 if the cache is float16, even if
        activations are float32."""
        return ir.DataType.FLOAT16 if self.cache == "float16" else self.type

    def keeps(self, module: str, tensor: CodedTensor) -> bool:
        """True if the linear called ``module`` is stored as the checkpoint's own integers."""
        config = self.quant.of(module)
        return isinstance(config, WeightOnly) and self.calibrated.keeps(tensor, config.grid)

    def attention(self, node: ir.Node) -> Attention:
        """The inventory's entry of a ``llmc::CachedAttention``; BuildError if it has other heads or another window."""
        entry = self.geometry.attention.get(node.name or "")
        listed = entry and (entry.heads, entry.kv_heads, entry.window)
        if not entry or listed != tuple(node.attributes[name].as_int() for name in ("num_heads", "kv_heads", "window")):
            raise BuildError(f"{node.name} is not as the manifest lists it ({entry}); export the checkpoint again")
        return entry


@dataclass(frozen=True)
class GraphPlan:
    """A graph of the export to lower, and its place in the bundle."""

    name: str  # in the manifest
    file: str
    words: str  # for progress
    passes: str  # key of :data:`llmc.optimize.passes.PASSES`
    context: LoweringContext
    source: str = DECODER_FILE  # the export's graph


def choose_table_config(stored: QuantConfigs, geometry: Geometry, table: Linear) -> QuantConfig:
    """The storage of one of :attr:`Geometry.tables`. A tied embedding shares the head's bytes; any other table keeps
    the checkpoint's codes or, if it has none and the head has integers, 8 bits.

    TensorRT gathers no integers: its tables have the type of activations.
    """
    head, tied = stored.of(HEAD), geometry.tied_head and table.name == EMBEDDING
    if isinstance(head, Computed) or (isinstance(head, WeightOnly) and head.grid.positive):
        return Computed()
    if table.codes is not None and not tied:
        return OwnCodes()
    return WeightOnly(Grid(8, head.grid.block)) if isinstance(head, WeightOnly) and not tied else head


def quant_configs(recipe: Recipe, geometry: Geometry) -> dict[str, QuantConfigs]:
    """The graphs to make, by phase, and how each stores its weights."""
    single, static = recipe.phases == "single", recipe.activations == "static"
    weights: dict[str, QuantConfig] = {
        "fp32": Float32(),
        "fp16": Float16(),
        "int8": WeightOnly(Grid(8, recipe.block_size)),  # a zero point gains nothing at 8 bits
        "int4": WeightOnly(Grid(4, recipe.block_size, recipe.symmetric)),
    }
    # Linears that the checkpoint does not store as integers.
    weights["source"] = weights["int8"]
    if single:  # engines want int8 weights with a scale per output; TensorRT refuses scales that are not above zero
        weights = {
            **dict.fromkeys(("fp32", "fp16", "bf16"), Computed()),
            **dict.fromkeys(("int8", "source"), WeightOnly(Grid(8, positive=True))),
            "int4": WeightOnly(Grid(4, recipe.block_size, positive=True)),
        }
    head = weights[recipe.head]
    if recipe.precision == recipe.head == "int8" and not single:  # a large part of what a small model loses
        head = WeightOnly(Grid(8, min(recipe.block_size, HEAD_BLOCK)))
    layers = tuple(
        (name, weights[precision])
        for pattern, precision in recipe.layers.items()
        for name in (geometry.sensitive if pattern == SENSITIVE else (pattern,))
    )
    if recipe.precision == "source":
        gpu = single or recipe.compute != "float32"
        layers = (*((part.name, _find_own_grid(part, single, gpu)) for part in geometry.coded), *layers)
    layers += tuple((it.name, Computed() if single else Float32()) for it in geometry.every_linear if it.exact)
    stored = QuantConfigs(weights[recipe.precision], head, layers)
    if single:
        w8a8 = Static(Grid(8, positive=True)) if static else None
        return {"single": replace(stored, w8a8=w8a8, w8a8_bits=(8,))}
    prompts = replace(stored, w8a8=PerToken() if recipe.activations == "per-token" else None)
    return {"shared": prompts} if recipe.phases == "shared" else {"prefill": prompts, "decode": stored}


def _find_own_grid(linear: Linear | Experts, single: bool, gpu: bool) -> WeightOnly | Mxfp4:
    """The grid that holds a linear's own codes; blocks of the engine lie within blocks of the checkpoint."""
    codes = linear.codes
    assert codes is not None
    if isinstance(linear, Experts):
        if codes.kind == "mxfp4":
            return Mxfp4()
        # Minima become zero points, which a 4-bit grid needs. QMoE takes no 2 bits.
        plain = codes.bits != 4 or not (codes.zero_points or codes.offsets)
        return WeightOnly(Grid(max(codes.bits, 4), codes.block, plain))
    row = codes.block == linear.inputs
    if single and codes.bits == 8 and row and not codes.zero_points:
        return WeightOnly(Grid(8, positive=True))
    bits = max(codes.bits, 4) if gpu else codes.bits  # engines of GPUs have no 2 bits
    # Kernels of 2 bits in other blocks make floats of all weights in each call.
    blocks = (128, 64, 32) if single or bits == 2 else (256, 128, 64, 32, 16)
    block = next((block for block in blocks if codes.block % block == 0), 128 if row and not single else 0)
    if not block or (single and (codes.bits == 8 or codes.zero_points or codes.offsets)):
        terms = " with zero points" if codes.zero_points else " with minima" if codes.offsets else ""
        kind = f"{codes.bits} bits in blocks of {codes.block}{terms}"
        raise UsageError(
            "precision",
            f"is 'source', but this target takes no integers like those of {linear.name} ({kind})",
            f"build with --int{max(codes.bits, 4)}, which chooses them anew",
        )
    return WeightOnly(Grid(bits, block, not codes.zero_points, single, codes.offsets))


def shares_head(recipe: Recipe, geometry: Geometry) -> bool:
    """True if both phases end in the same large head, which is then a graph of its own: memory holds it once."""
    graphs = quant_configs(recipe, geometry).values()
    head = geometry.linear.get(HEAD)
    alike = len(graphs) == 2 and len({stored.of(HEAD) for stored in graphs}) == 1
    return alike and find_evidence(geometry) == "prompts" and head is not None and head.size >= LARGE_HEAD


def check_patterns(recipe: Recipe, modules: list[str]) -> None:
    """Raise UsageError for patterns of the recipe that match no linear, with some names."""
    for pattern in recipe.layers:
        if pattern != SENSITIVE and not any(fnmatchcase(module, pattern) for module in modules):
            raise UsageError(
                f"layers.{pattern}",
                f"matches no linear of this model, expected a pattern of names like {modules[0]}, "
                f"{modules[-2]} or {modules[-1]}",
            )
