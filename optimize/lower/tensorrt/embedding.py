"""Tables of rows for TensorRT, in the type of activations: only the rows asked for are read."""

from collections.abc import Callable

import onnx_ir as ir

from llmc.bundle.model.names import EMBEDDING, POSITIONS
from llmc.exported import Weight
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.linears import replace_gather
from llmc.optimize.lower.rewrite import Emitter, initializer
from llmc.optimize.lower.tensorrt import weights
from llmc.optimize.lower.tensorrt.slots import token_positions


def lower_embedding(graph: ir.Graph, context: LoweringContext) -> int:
    """Gather(embedding, ids) -> a gather of rows in the compute type."""
    return _lower_table(graph, EMBEDDING, context, lambda emit: emit.anchor.inputs[1])


def lower_positions(graph: ir.Graph, context: LoweringContext) -> int:
    """The same for a table of learned positions."""
    return _lower_table(graph, POSITIONS, context, token_positions)


def _lower_table(
    graph: ir.Graph, name: str, context: LoweringContext, ids: Callable[[Emitter], ir.Value | None]
) -> int:
    def rows(emit: Emitter, table: Weight) -> ir.Value:
        return emit("Gather", initializer(graph, weights.float_rows(table, context)), ids(emit), axis=0)

    return replace_gather(graph, name, rows)
