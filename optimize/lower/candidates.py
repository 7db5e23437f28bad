"""The most probable tokens of each row of logits, so that a GPU need not hand over the whole row."""

import numpy as np
import onnx_ir as ir

from llmc.bundle import MOST_CANDIDATES, SUM_EXP, TOP_IDS, TOP_LOGITS
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.rewrite import constant


def rank_logits(graph: ir.Graph, context: LoweringContext) -> int:
    """Give beside logits float32 [B, O, V] the K largest of them, ``top_logits`` float32 [B, O, K], their ``top_ids``
    int64 [B, O, K], and ``sum_exp`` float32 [B, O, 1], the sum of exp(logit - largest)."""
    outputs = [value for value in graph.outputs if value.name == "logits"]
    count = min(MOST_CANDIDATES, context.geometry.vocab_size)
    # Kernels read these on the host: nothing that reads them on the device may share them.
    most, first, one, last = (
        constant(graph, f"{TOP_LOGITS}.const.{number}", np.array([number], np.int64)) for number in (count, 0, 1, -1)
    )
    for logits in outputs:
        assert logits.shape is not None
        values, ids = _append(graph, "TopK", [logits, most], [TOP_LOGITS, TOP_IDS], axis=-1, largest=1, sorted=1)
        [peak] = _append(graph, "Slice", [values, first, one, last], [f"{SUM_EXP}.peak"])
        [distances] = _append(graph, "Sub", [logits, peak], [f"{SUM_EXP}.distances"])
        [weights] = _append(graph, "Exp", [distances], [f"{SUM_EXP}.weights"])
        [total] = _append(graph, "ReduceSum", [weights, last], [SUM_EXP], keepdims=1)
        for value, kind, width in ((values, np.float32, count), (ids, np.int64, count), (total, np.float32, 1)):
            value.dtype, value.shape = ir.DataType.from_numpy(np.dtype(kind)), ir.Shape([*logits.shape[:2], width])
            graph.outputs.append(value)
    return len(outputs)


def _append(graph: ir.Graph, op: str, inputs: list[ir.Value], outputs: list[str], **attributes: int) -> list[ir.Value]:
    node = ir.node(op, inputs, attributes, num_outputs=len(outputs), name=f"{outputs[0]}.{op}")
    for value, name in zip(node.outputs, outputs, strict=True):
        value.name = name
    graph.append(node)
    return list(node.outputs)
