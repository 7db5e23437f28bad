"""The order of work: for each target, the literal list of passes from the portable decoder to its lowered graph.

A pass rewrites the graph and returns how often it applied; a step whose count follows from the geometry says it, so a
lowering that finds nothing to lower is an error and never a slow or wrong graph.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from llmc.bundle import Geometry
from llmc.errors import BuildError
from llmc.optimize.lower import raising
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.onnxruntime import (
    attention,
    cpu_attention,
    cpu_linears,
    cuda_attention,
    cuda_linears,
    cuda_outputs,
    embedding,
    norms,
)
from llmc.optimize.lower.rewrite import remove_dead
from llmc.optimize.lower.tensorrt import attention as tensorrt_attention
from llmc.optimize.lower.tensorrt import embedding as tensorrt_embedding
from llmc.optimize.lower.tensorrt import linears as tensorrt_linears
from llmc.optimize.lower.tensorrt import norms as tensorrt_norms
from llmc.optimize.lower.tensorrt import packing, primitives, types

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """A pass, its name in dumps and messages, and to which of :data:`COUNTS` it must apply, each once."""

    name: str
    run: Callable[[ir.Graph, LoweringContext], int]
    each: str | None = None


# What a pass may have to apply to.
COUNTS: dict[str, Callable[[Geometry], int]] = {
    "linears": lambda geometry: len(geometry.linears),
    "attentions": lambda geometry: len(geometry.attentions),
    "norms": lambda geometry: len(geometry.norms),
    "norms after residuals": lambda geometry: sum(norm.follows_residual for norm in geometry.norms),
    "SiLUs": lambda geometry: sum(mlp.activation == "silu" for mlp in geometry.mlps),
    "the model": lambda geometry: 1,
}


PASSES: dict[str, tuple[Step, ...]] = {
    "cpu": (
        # Everything below works on whole linears instead of Transpose, MatMul and Add.
        Step("raise linears", raising.raise_linears, "linears"),
        # Before attention is lowered: it is the CachedAttention node that tells which three linears belong together.
        Step("pack projections", attention.pack_projections, "attentions"),
        Step("lower attention", cpu_attention.lower_attention, "attentions"),
        Step("type cache", attention.type_cache),
        Step("lower norms", norms.lower_norms, "norms"),
        # Not the first norm, which has no residual before it, and not the last: logits are gathered before it.
        Step("fuse skip norms", norms.fuse_skip_norms, "norms after residuals"),
        Step("fuse SiLU", norms.fuse_silu, "SiLUs"),
        # After all fusions: a quantized activation is shared by the linears that read it.
        Step("lower linears", cpu_linears.lower_linears, "linears"),
        # After the linears: it moves scales that only per-token activations have.
        Step("defer token scales", cpu_linears.defer_token_scales),
        Step("lower embedding", embedding.lower_embedding, "the model"),
        Step("remove dead nodes", lambda graph, _: remove_dead(graph)),
    ),
    # TensorRT from 10.15 on and TensorRT-RTX.
    "tensorrt": (
        Step("raise linears", raising.raise_linears, "linears"),
        # Query, key and value, gate and up, where their weights are quantized.
        Step("pack linears", packing.pack_linears),
        Step("lower attention", tensorrt_attention.lower_attention, "attentions"),
        # After attention, which looks through the norms of qk-norm.
        Step("lower norms", tensorrt_norms.lower_norms, "norms"),
        Step("lower linears", tensorrt_linears.lower_linears, "linears"),
        Step("lower embedding", tensorrt_embedding.lower_embedding, "the model"),
        # Last: what passes made has the type that they gave it, and what the export left has float32.
        Step("type values", types.type_values),
        Step("remove dead nodes", lambda graph, _: remove_dead(graph)),
    ),
    # TensorRT 10.3 to 10.13: the same in operators that those have.
    "tensorrt-primitives": (
        Step("raise linears", raising.raise_linears, "linears"),
        Step("pack linears", packing.pack_linears),
        Step("lower attention", primitives.lower_attention, "attentions"),
        Step("lower norms", primitives.lower_norms, "norms"),
        Step("lower linears", tensorrt_linears.lower_linears, "linears"),
        Step("lower embedding", tensorrt_embedding.lower_embedding, "the model"),
        Step("type values", types.type_values),
        Step("remove dead nodes", lambda graph, _: remove_dead(graph)),
    ),
    "cuda": (
        # As on the CPU, in the order of the CPU's passes and for their reasons.
        Step("raise linears", raising.raise_linears, "linears"),
        Step("pack projections", attention.pack_projections, "attentions"),
        Step("lower attention", cuda_attention.lower_attention, "attentions"),
        Step("type cache", attention.type_cache),
        Step("gather logit rows", cuda_outputs.gather_logit_rows, "the model"),
        Step("lower norms", norms.lower_norms, "norms"),
        Step("fuse skip norms", norms.fuse_skip_norms, "norms after residuals"),
        Step("fuse SiLU", norms.fuse_silu, "SiLUs"),
        Step("lower linears", cuda_linears.lower_linears, "linears"),
        Step("lower embedding", embedding.lower_embedding, "the model"),
        # Last: until here outputs are in the type that the graph computes in.
        Step("float32 outputs", cuda_outputs.float32_outputs),
        Step("remove dead nodes", lambda graph, _: remove_dead(graph)),
    ),
}


def lower(model: ir.Model, target: str, plan: LoweringContext, dump: Path | None = None) -> None:
    """Run the target's passes on ``model`` in place; with ``dump`` write the graph's text after each.

    Raises:
        BuildError: a pass did not apply as often as the geometry demands.
    """
    for number, step in enumerate(PASSES[target], 1):
        times = step.run(model.graph, plan)
        log.info("%s: applied %d times", step.name, times)
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{plan.phase}-{number:02d}-{step.name.replace(' ', '-')}.txt").write_text(str(model.graph))
        expected = COUNTS[step.each](plan.geometry) if step.each is not None else times
        if times != expected:
            raise BuildError(
                f"pass '{step.name}' applied {times} times to the {plan.phase} graph, {expected} "
                f"expected for {plan.geometry.layers} layers; the export does not follow graph contract "
                f"{plan.contract}: export the checkpoint again"
            )
