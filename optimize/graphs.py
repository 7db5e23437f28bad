"""Lowers a bundle's graphs, writes them beside their weights, and compiles the engine from them."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from llmc.bundle import ADAPTERS_FOLDER as ADAPTERS
from llmc.bundle import REPLAY, VISION_FILE, EngineConfig, Graph
from llmc.inventory import Vision
from llmc.optimize.lower.context import (
    Float32,
    LoweringContext,
    QuantConfigs,
    choose_tower_configs,
    quant_configs,
    without_rotation,
)
from llmc.optimize.lower.onnxruntime.recurrent import extract_replay
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
    """Lower the decoder once per phase, and once for adapters; the graphs share one weight file."""
    graphs, geometry = {}, order.export.geometry
    with closing(WeightFile(folder)) as weights:
        context = LoweringContext(
            "",
            geometry,
            order.limits,
            QuantConfigs(Float32(), Float32()),
            weights,
            calibrated,
            order.recipe.cache,
            order.recipe.compute,
            ragged_rows=order.ragged_rows,
            overwritten=order.overwritten,
        )
        for phase, stored in quant_configs(order.recipe, geometry).items():
            whole = "encoder" if geometry.encoder else "decoder"
            name = f"{phase if phase in ('prefill', 'decode') else whole}.onnx"
            own = replace(context, phase=phase, quant=stored, rotated=order.recipe.rotates(phase))
            graphs[phase] = _compile(order, folder, own, name)
        if len(graphs) == 1:
            graphs = dict.fromkeys(("encode",) if geometry.encoder else ("prefill", "decode"), *graphs.values())
        if geometry.has_states:
            graphs[REPLAY] = _cut_replay(folder, graphs["decode"].file)
        if order.limits.adapters:
            *_, (phase, stored) = quant_configs(without_rotation(order.recipe), geometry).items()
            own = replace(context, phase=phase, quant=stored, adapters=True)
            graphs[ADAPTERS] = _compile(order, folder, own, f"{ADAPTERS}.onnx")
        if geometry.vision is not None:
            graphs["vision"] = _compile_tower(order, folder, geometry.vision, weights)
    return graphs


def _compile(order: Order, folder: Path, context: LoweringContext, name: str) -> Graph:
    shown = f"lowering and quantizing the {ADAPTERS if context.adapters else context.phase} graph"
    count = make_counter(order.progress, shown, len(context.geometry.linears))
    model = read_graph(order.source)
    lower(model, order.passes, replace(context, linear_done=count))
    _declare_opsets(model, order)
    ir.save(model, folder / name)
    return _describe_graph(model.graph, name, context.quant, order, context.phase)


def _cut_replay(folder: Path, decoder: str) -> Graph:
    model, name = read_graph(folder, decoder), f"{REPLAY}.onnx"
    part = ir.Model(extract_replay(model.graph), ir_version=model.ir_version)
    part.graph.opset_imports.update(model.graph.opset_imports)
    ir.save(part, folder / name)
    return Graph(file=name, weight_bytes=0, step_weight_bytes=0)


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
