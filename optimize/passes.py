"""The order of work: for each target, the literal list of passes from the portable decoder to its lowered graph.

A pass rewrites the graph and returns how often it applied; a step whose count follows from the geometry says it, so a
lowering that finds nothing to lower is an error and never a slow or wrong graph.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from llmc.bundle import GRAPH_CONTRACT_VERSION, Geometry
from llmc.bundle.model.audio import CONVOLUTIONS
from llmc.errors import BuildError
from llmc.optimize.lower import candidates, packing, raising, rotary, types
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.onnxruntime import (
    adapters,
    attention,
    cpu_attention,
    cpu_linears,
    cuda_attention,
    embedding,
    experts,
    folded_heads,
    hidden,
    image_attention,
    linears,
    norms,
    packed_rows,
    recurrent,
    rotation,
    self_attention,
    vision,
)
from llmc.optimize.lower.rewrite import remove_dead
from llmc.optimize.lower.tensorrt import embedding as tensorrt_embedding
from llmc.optimize.lower.tensorrt import linears as tensorrt_linears
from llmc.optimize.lower.tensorrt import native

log = logging.getLogger(__name__)


Pass = Callable[[ir.Graph, LoweringContext], int]


@dataclass(frozen=True)
class Step:
    """A pass, its name in dumps and messages, and how often it must apply to a decoder of a given geometry."""

    name: str
    run: Pass
    times: Callable[[Geometry], int] | None = None


# Everything else works on whole linears instead of Transpose, MatMul and Add.
RAISE = Step("raise linears", raising.raise_linears, lambda g: len(g.linears))
# Before attention is lowered: it is the CachedAttention node that tells which three linears belong together.
# Ropes with other factors for long texts.
FIX_FACTORS = Step("fix factors of ropes", rotary.fix_factors)
PACK_PROJECTIONS = Step("pack projections", attention.pack_projections, lambda g: len(g.writing))
LOWER_NORMS = Step("lower norms", norms.lower_norms, lambda g: len(g.norms))
FUSE_SILU = Step("fuse SiLU", norms.fuse_silu, lambda g: g.silus)
LOWER_EMBEDDING = (
    Step("lower embedding", embedding.lower_embedding, lambda g: 1 + (g.per_layer > 0)),
    Step("lower positions", embedding.lower_positions, lambda g: len(g.small_tables)),
)
LOWER_EXPERTS = Step("lower experts", experts.lower_experts, lambda g: len(g.mixtures))
# Last: what passes made has the type that they gave it, and what the export left has float32.
TYPE_VALUES = Step("type values", types.type_values)
# After the logits are float32.
RANK_LOGITS = Step("rank logits", candidates.rank_logits, lambda _: 1)
REMOVE_DEAD = Step("remove dead nodes", lambda graph, _: remove_dead(graph))


def _tensorrt(pack: Pass) -> tuple[Step, ...]:
    return (
        RAISE,
        FIX_FACTORS,
        # Query, key and value, gate and up.
        Step("pack linears", pack),
        Step("lower attention", native.lower_attention, lambda g: len(g.attentions)),
        # After attention, which looks through the norms of qk-norm.
        Step("lower norms", native.lower_norms, lambda g: len(g.norms)),
        Step("lower linears", tensorrt_linears.lower_linears, lambda g: len(g.linears)),
        Step("lower embedding", tensorrt_embedding.lower_embedding, lambda _: 1),
        Step("lower positions", tensorrt_embedding.lower_positions, lambda g: int(g.learned_positions)),
        TYPE_VALUES,
        RANK_LOGITS,
        REMOVE_DEAD,
    )


PASSES: dict[str, tuple[Step, ...]] = {
    "cpu": (
        RAISE,
        Step("switch factors of ropes", rotary.switch_factors),
        PACK_PROJECTIONS,
        Step("lower attention", cpu_attention.lower_attention, lambda g: len(g.attentions)),
        Step("type cache", attention.type_cache),
        # Before the linears: what it splits is still packed.
        Step("fold heads", folded_heads.fold_heads),
        # Not with the sums before them: here the kernel that adds first takes longer than two nodes, twice as long
        # before a norm by the root mean square, and ten times before a layer norm (128 rows, onnxruntime 1.31, 1.32).
        LOWER_NORMS,
        FUSE_SILU,
        LOWER_EXPERTS,
        # After the norms, whose weights the linears take, and before the linears.
        Step("rotate residual stream", rotation.rotate_stream),
        Step("open linears", adapters.open_linears),
        # After all fusions: a quantized activation is shared by the linears that read it.
        Step("lower linears", cpu_linears.lower_linears, lambda g: len(g.linears)),
        # After the linears: it moves scales that only per-token activations have.
        Step("defer token scales", cpu_linears.defer_token_scales),
        *LOWER_EMBEDDING,
        # After all that reads ids and positions is there.
        Step("pack rows", packed_rows.pack_rows),
        # After these and the rotation, both of which it undoes.
        Step("give hidden states", hidden.give_hidden),
        # After rows are packed and heads folded: it puts attentions into branches.
        Step("attend both ways", image_attention.attend_both_ways),
        # After rows are packed: convolutions and recurrences run over each row by itself.
        Step("inline scalars", norms.inline_scalars, lambda g: g.scalars),
        Step("lower recurrences", recurrent.lower_recurrences, lambda g: len(g.recurrents)),
        REMOVE_DEAD,
    ),
    # A model that embeds or ranks.
    "cpu-encoder": (
        Step("attend without a past", self_attention.as_cached, lambda g: len(g.attentions)),
        RAISE,
        PACK_PROJECTIONS,
        Step("lower attention", self_attention.lower_attention, lambda g: len(g.attentions)),
        LOWER_NORMS,
        FUSE_SILU,
        LOWER_EXPERTS,
        Step("lower linears", cpu_linears.lower_linears, lambda g: len(g.linears)),
        *LOWER_EMBEDDING,
        REMOVE_DEAD,
    ),
    # A tower for images or audio.
    "cpu-tower": (
        RAISE,
        Step("attend to patches", vision.attend_to_patches, lambda g: g.tower.attentions if g.tower else 0),
        Step("turn patches", vision.turn_patches, vision.count_turns),
        Step("lower norms", norms.lower_norms, lambda g: g.tower.norms if g.tower else 0),
        Step("fuse SiLU", norms.fuse_silu, vision.count_silus),
        Step("inline bounds", vision.inline_bounds),
        Step("inline convolutions", vision.inline_convolutions, vision.count_convolutions),
        Step("store positions", vision.store_positions, lambda g: int(vision.has_table(g))),
        Step("store kernels", vision.store_kernels, lambda g: CONVOLUTIONS * (g.audio is not None)),
        Step("lower linears", cpu_linears.lower_linears, lambda g: len(g.linears)),
        REMOVE_DEAD,
    ),
    "tensorrt": _tensorrt(packing.pack_linears),
    "tensorrt-rtx": _tensorrt(packing.pack_integers),
    "cuda": (
        RAISE,
        FIX_FACTORS,
        PACK_PROJECTIONS,
        # One product of gate and up: for one row the kernels are far from the memory's bandwidth, the farther the
        # fewer outputs (onnxruntime issue 32382).
        Step("pack gate and up", packing.pack_linears),
        Step("lower attention", cuda_attention.lower_attention, lambda g: len(g.attentions)),
        Step("gather logit rows", cuda_attention.gather_logit_rows, lambda _: 1),
        LOWER_NORMS,
        # Not the first norm, which has no residual before it, and not the last: logits are gathered before it.
        Step("fuse skip norms", norms.fuse_skip_norms, lambda g: sum(norm.follows_residual for norm in g.norms)),
        FUSE_SILU,
        Step("lower linears", linears.lower_cuda_linears, lambda g: len(g.linears)),
        *LOWER_EMBEDDING,
        TYPE_VALUES,
        RANK_LOGITS,
        REMOVE_DEAD,
    ),
}


def lower(model: ir.Model, target: str, plan: LoweringContext) -> None:
    """Run the target's passes on ``model`` in place.

    Raises:
        BuildError: a pass did not apply as often as the geometry demands.
    """
    for step in PASSES[target]:
        times = step.run(model.graph, plan)
        log.info("%s: applied %d times", step.name, times)
        if step.times is not None and times != step.times(plan.geometry):
            raise BuildError(
                f"pass '{step.name}' applied {times} times to the {plan.phase} graph, {step.times(plan.geometry)} "
                f"expected for {plan.geometry.layers} layers; the export does not follow graph contract "
                f"{GRAPH_CONTRACT_VERSION}: export the checkpoint again"
            )
