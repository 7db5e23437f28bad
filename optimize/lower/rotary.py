"""Tables of rotary position embeddings, a pair for each of the decoder's ropes."""

import numpy as np
import onnx_ir as ir

from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.rewrite import initializer


def rotary_tables(node: ir.Node, context: LoweringContext) -> tuple[ir.Value, ir.Value] | None:
    """Cosine and sine [max_context, D/2] in the compute type for a ``llmc::CachedAttention``; None without a rope.

    They cover the planned context, and all graphs and attentions with the same rope share them.
    """
    if context.attention(node).rope is None:
        return None
    inv_freq = node.inputs[6]
    assert node.graph is not None and inv_freq is not None and inv_freq.name and inv_freq.const_value is not None
    frequencies = inv_freq.const_value.numpy().astype(np.float32)
    angles = np.arange(context.limits.max_context, dtype=np.float32)[:, None] * frequencies[None, :]
    dtype, rope = context.array_type, inv_freq.name.removesuffix(".inv_freq")
    names = [f"{rope}.cos", f"{rope}.sin"]
    cos, sin = context.weights.add(
        names, lambda: [table(angles).astype(dtype) for table in (np.cos, np.sin)], frequencies.tobytes()
    )
    return initializer(node.graph, cos), initializer(node.graph, sin)
