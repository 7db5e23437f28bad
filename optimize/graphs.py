"""Lowers a bundle's graphs, writes them beside their weights, and compiles the engine from them."""

import platform
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from llmc.bundle import VISION_FILE, EngineConfig, Graph
from llmc.inventory import Vision
from llmc.optimize.lower.context import LoweringContext, QuantConfigs, choose_tower_configs, quant_configs
from llmc.optimize.lower.rewrite import read_graph
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
            model = read_graph(order.source)
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
            graphs = dict.fromkeys(("encode",) if geometry.encoder else ("prefill", "decode"), *graphs.values())
        if geometry.vision is not None:
            graphs["vision"] = _compile_tower(order, folder, geometry.vision, weights)
    return graphs


def _compile_tower(order: Order, folder: Path, vision: Vision, weights: WeightFile) -> Graph:
    stored = choose_tower_configs(next(iter(quant_configs(order.recipe, order.export.geometry).values())))
    geometry = replace(order.export.geometry, layers=vision.layers, linears=vision.linears, caches=(), attentions=())
    count = make_counter(order.progress, "lowering and quantizing the tower for images", len(vision.linears))
    model = read_graph(order.source, VISION_FILE)
    plan = LoweringContext("vision", geometry, order.limits, stored, weights, Calibrated(), linear_done=count)
    lower(model, f"{order.target.name}-vision", plan)
    _declare_opsets(model, order)
    ir.save(model, folder / VISION_FILE)
    return _describe_graph(model.graph, VISION_FILE, stored, order, "vision")


def _declare_opsets(model: ir.Model, order: Order) -> None:
    """Declare the target's opset, so that older engines load the graph; it has no newer operators."""
    model.functions.clear()
    model.opset_imports.clear()
    model.opset_imports[""], model.ir_version = NATIVE if order.target.makes_engine else OLD
    if not order.target.makes_engine:
        model.opset_imports["com.microsoft"] = 1


def _describe_graph(graph: ir.Graph, name: str, stored: QuantConfigs, order: Order, phase: str) -> Graph:
    """Bytes of weights in memory and per token (embedding rows stay on disk until read), and the CPU features
    needed."""
    sizes = {
        name: value.const_value.nbytes
        for name, value in graph.initializers.items()
        if value.const_value is not None and not all("Gather" in node.op_type for node, _ in value.uses())
    }
    tables = sum(size for name, size in sizes.items() if name.startswith("rotary_emb."))
    integers = stored.w8a8 is not None and any(node.op_type == "MatMulIntegerToFloat" for node in graph)
    return Graph(
        file=name,
        weight_bytes=sum(sizes.values()),
        step_weight_bytes=sum(sizes.values()) - tables,
        cpu_features=order.target.w8a8_features.get(platform.machine(), ()) if integers else (),
        overwritten=order.overwritten if phase == "decode" else 0,
    )
