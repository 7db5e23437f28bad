"""Lowers a bundle's graphs, writes them beside their weights, and compiles the engine from them."""

from contextlib import closing
from pathlib import Path

import onnx_ir as ir

from llmc.bundle import EngineConfig, Graph
from llmc.optimize.lower.context import LoweringContext, QuantConfigs, quant_configs
from llmc.optimize.lower.rewrite import read_decoder
from llmc.optimize.order import Order
from llmc.optimize.passes import lower
from llmc.optimize.progress import make_counter
from llmc.optimize.targets import NATIVE, OLD
from llmc.optimize.weights.file import WeightFile
from llmc.optimize.weights.store import Calibrated


def build_graphs(order: Order, folder: Path, calibrated: Calibrated) -> tuple[dict[str, Graph], EngineConfig | None]:
    graphs = compile_graphs(order, folder, calibrated)
    if order.engine is None:
        return graphs, None
    from llmc.optimize.tensorrt.engine import compile_engine

    graph = folder / graphs["decode"].file
    return graphs, compile_engine(order.engine, graph, order.export.geometry, order.progress)


def compile_graphs(order: Order, folder: Path, calibrated: Calibrated) -> dict[str, Graph]:
    """Lower the decoder once per phase; the graphs share one weight file."""
    graphs, geometry = {}, order.export.geometry
    with closing(WeightFile(folder)) as weights:
        for phase, stored in quant_configs(order.recipe, geometry).items():
            model = read_decoder(order.source)
            context = LoweringContext(
                phase,
                geometry,
                order.limits,
                stored,
                weights,
                calibrated,
                order.recipe.cache,
                order.recipe.compute,
                make_counter(order.progress, f"lowering and quantizing the {phase} graph", len(geometry.linears)),
                ragged_rows=order.ragged_rows,
                overwritten=order.overwritten,
                rotated=order.recipe.rotates(phase),
            )
            lower(model, order.passes, context)
            _declare_opsets(model, order)
            whole = "encoder" if geometry.encoder else "decoder"
            name = f"{phase if phase in ('prefill', 'decode') else whole}.onnx"
            ir.save(model, folder / name)
            graphs[phase] = _describe_graph(model.graph, name, stored, order, phase)
    if len(graphs) == 1:
        return dict.fromkeys(("encode",) if geometry.encoder else ("prefill", "decode"), *graphs.values())
    return graphs


def _declare_opsets(model: ir.Model, order: Order) -> None:
    """Declare the target's opset, so that older engines load the graph; it has no newer operators."""
    model.functions.clear()
    model.opset_imports.clear()
    model.opset_imports[""], model.ir_version = NATIVE if order.target.makes_engine else OLD
    if not order.target.makes_engine:
        model.opset_imports["com.microsoft"] = 1


def _describe_graph(graph: ir.Graph, name: str, stored: QuantConfigs, order: Order, phase: str) -> Graph:
    """Bytes of weights in memory and per token; embedding rows stay on disk until read."""
    sizes = {
        name: value.const_value.nbytes
        for name, value in graph.initializers.items()
        if value.const_value is not None and not all("Gather" in node.op_type for node, _ in value.uses())
    }
    tables = sum(size for name, size in sizes.items() if name.startswith("rotary_emb."))
    return Graph(
        file=name,
        weight_bytes=sum(sizes.values()),
        step_weight_bytes=sum(sizes.values()) - tables,
        overwritten=order.overwritten if phase == "decode" else 0,
    )
