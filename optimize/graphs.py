"""Lowers a bundle's graphs and writes them beside their weights."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from llmc.bundle import LM_HEAD, LOGIT_ROWS, REPLAY, Graph
from llmc.bundle.model.names import HEAD
from llmc.errors import BuildError
from llmc.optimize.lower.context import Float32, GraphPlan, LoweringContext, QuantConfigs, shares_head
from llmc.optimize.lower.onnxruntime.adapters import plan_opened
from llmc.optimize.lower.onnxruntime.recurrent import extract_replay
from llmc.optimize.lower.onnxruntime.vision import plan_tower
from llmc.optimize.lower.rewrite import read_graph, write_part
from llmc.optimize.order import Order
from llmc.optimize.passes import lower
from llmc.optimize.progress import make_counter
from llmc.optimize.targets import NATIVE, OLD
from llmc.optimize.weights.file import WeightFile
from llmc.optimize.weights.store import Calibrated


def compile_graphs(order: Order, folder: Path, calibrated: Calibrated) -> dict[str, Graph]:
    """Lower the model's graph once per phase, and what else the bundle has; the graphs share one weight file."""
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
            hidden=order.hidden,
            unsigned=order.unsigned,
        )
        for phase, stored in order.configs.items():
            name = f"{phase if phase in ('prefill', 'decode') else geometry.role}.onnx"
            own = replace(context, phase=phase, quant=stored, rotated=order.recipe.rotates(phase))
            graphs[phase] = _compile(order, folder, GraphPlan(phase, name, f"the {phase} graph", order.passes, own))
        if len(graphs) == 1:
            graphs = dict.fromkeys(("prefill", "decode") if geometry.generates else ("encode",), *graphs.values())
        if geometry.has_states:
            graphs[REPLAY] = cut_replay(folder, graphs["decode"].file)
        if shares_head(order.recipe, geometry):
            graphs |= cut_head(folder, graphs, geometry.hidden_size)
        for plan in (
            *plan_opened(context, order.recipe, order.passes),
            *plan_tower(context, next(iter(order.configs.values())), order.target.name),
        ):
            graphs[plan.name] = _compile(order, folder, plan)
    return graphs


def _compile(order: Order, folder: Path, plan: GraphPlan) -> Graph:
    count = make_counter(order.progress, f"lowering and quantizing {plan.words}", len(plan.context.geometry.linears))
    model = read_graph(order.source, plan.source)
    # Gains of a rotated graph's norms are no other graph's.
    lower(model, plan.passes, replace(plan.context, linear_done=count, gains={}))
    # Declare the target's opset, so that older engines load the graph; it has no newer operators.
    model.functions.clear()
    model.opset_imports.clear()
    model.opset_imports[""], model.ir_version = NATIVE if order.target.makes_engine else OLD
    if not order.target.makes_engine:
        model.opset_imports["com.microsoft"] = 1
    ir.save(model, folder / plan.file)
    return describe_graph(model.graph, plan.file, 0 if plan.context.phase == "prefill" else order.overwritten)


def cut_head(folder: Path, graphs: dict[str, Graph], width: int) -> dict[str, Graph]:
    """Cut the head off the graphs of both phases, as a graph of its own; all three."""
    cut, heads = dict[str, Graph](), list[ir.Graph]()
    for phase in ("prefill", "decode"):
        name = graphs[phase].file
        graph = (model := read_graph(folder, name)).graph
        rows = _find_last_rows(graph)
        rows.name, rows.type = LOGIT_ROWS, ir.TensorType(ir.DataType.FLOAT)
        rows.shape = ir.Shape(["batch", "outputs", width])
        outputs = [LOGIT_ROWS if value.name == "logits" else value for value in graph.outputs]
        body = ir.convenience.extract(graph, list(graph.inputs), outputs)
        heads.append(ir.convenience.extract(graph, [LOGIT_ROWS], ["logits"]))
        write_part(body, model, folder / name)
        cut[phase] = describe_graph(body, name, graphs[phase].overwritten)
    parts = [[(node.op_type, [it.name for it in node.inputs if it]) for node in head] for head in heads]
    if parts[0] != parts[1]:
        raise BuildError("the graphs of prefill and decode end in different heads")
    write_part(heads[-1], model, folder / f"{LM_HEAD}.onnx")
    return cut | {LM_HEAD: describe_graph(heads[-1], f"{LM_HEAD}.onnx", 0)}


def _find_last_rows(graph: ir.Graph) -> ir.Value:
    """The rows that the head multiplies, in the basis of the checkpoint whatever that of the residual stream is."""
    for node in graph:
        rows = node.inputs[0] if (node.name or "").startswith(HEAD) and node.inputs else None
        if rows is not None and rows.const_value is None and not (node.name or "").startswith(f"{HEAD}.input"):
            return rows
    raise BuildError("a graph has no head")


def cut_replay(folder: Path, decoder: str) -> Graph:
    model, name = read_graph(folder, decoder), f"{REPLAY}.onnx"
    write_part(extract_replay(model.graph), model, folder / name)
    return Graph(file=name, weight_bytes=0, step_weight_bytes=0)


def describe_graph(graph: ir.Graph, name: str, overwritten: int) -> Graph:
    """Bytes of weights in memory and per token; embedding rows stay on disk until read."""
    sizes = {
        name: value.const_value.nbytes
        for name, value in graph.initializers.items()
        if value.const_value is not None and not all("Gather" in node.op_type for node, _ in value.uses())
    }
    tables = sum(size for name, size in sizes.items() if name.startswith("rotary_emb."))
    weights = sum(sizes.values())
    return Graph(name, weight_bytes=weights, step_weight_bytes=weights - tables, overwritten=overwritten)
