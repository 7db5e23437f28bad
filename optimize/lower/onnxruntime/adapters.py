"""Linears that adapters change at run time: each adds ``x @ a @ b``, with the factors of every row as inputs.

Linears with the same input share one product with their ``a`` side by side; a packed linear has a ``b`` for each part.
"""

from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir

from llmc.bundle import ADAPTERS_FOLDER, FACTOR_A, FACTOR_B, Recipe
from llmc.errors import BuildError
from llmc.optimize.lower.context import HEAD_BLOCK, GraphPlan, LoweringContext, quant_configs
from llmc.optimize.lower.onnxruntime.attention import before_sorting
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import LLMC, Emitter, node_after, nodes_of


def without_rotation(recipe: Recipe) -> Recipe:
    """The recipe of the graph for adapters, whose factors are in the basis of the checkpoint. Without rotation, nearest
    rounding needs smaller blocks, and activations stay floats."""
    block = min(recipe.block_size, HEAD_BLOCK) if recipe.rotates("decode") else recipe.block_size
    return replace(recipe, block_size=block, rotated=(), activations="none")


def plan_opened(base: LoweringContext, recipe: Recipe, passes: str) -> Iterator[GraphPlan]:
    """The graph of both phases for calls with adapters, if the bundle has room for some."""
    if base.limits.adapters:
        *_, (phase, stored) = quant_configs(without_rotation(recipe), base.geometry).items()
        own = replace(base, phase=phase, quant=stored, opened=True)
        name = ADAPTERS_FOLDER
        yield GraphPlan(name, f"{name}.onnx", f"the {name} graph", passes, own)


def open_linears(graph: ir.Graph, context: LoweringContext) -> int:
    """Let every open linear add the product with its factors, in the graph for adapters; the number of linears."""
    if not context.opened:
        return 0
    readers: dict[ir.Value | None, list[Linear]] = {}
    for node in nodes_of(graph, "Linear", LLMC):
        linear = Linear.of(node)
        if context.geometry.linear[linear.module].is_open:
            readers.setdefault(before_sorting(node.inputs[0]), []).append(linear)
    opened = [module for linears in readers.values() for linear in linears for module in linear.modules]
    if missing := {linear.name for linear in context.geometry.linears if linear.is_open} - {*opened}:
        raise BuildError(f"{min(missing)} cannot be changed by adapters: the graph has no such linear; export again")
    for x, linears in readers.items():
        _open(graph, x, linears)
    return len(opened)


def _open(graph: ir.Graph, x: ir.Value | None, linears: list[Linear]) -> None:
    modules = [module for linear in linears for module in linear.modules]
    name, inputs = "+".join(modules), linears[0].inputs
    emit = Emitter(linears[0].node, f"{linears[0].name}.adapters")
    inner = emit("MatMul", x, _factor(graph, f"{FACTOR_A}{name}", inputs, f"{len(modules)} * rank"))
    if len(modules) > 1:
        parts = emit.many("Split", [inner], len(modules), axis=-1, num_outputs=len(modules))
    else:
        parts = [inner]
    changes = dict(zip(modules, parts, strict=True))
    for linear in linears:
        output = linear.node.outputs[0]
        emit = Emitter(node_after(output), f"{linear.name}.adapter")
        uses = list(output.uses())
        products = [
            emit("MatMul", changes[module], _factor(graph, f"{FACTOR_B}{module}", "rank", size))
            for module, size in zip(linear.modules, linear.part_sizes, strict=True)
        ]
        change = emit("Concat", *products, axis=-1) if len(products) > 1 else products[0]
        changed = emit("Add", output, change)
        for node, index in uses:
            node.replace_input_with(index, changed)


def _factor(graph: ir.Graph, name: str, rows: int | str, columns: int | str) -> ir.Value:
    """A new input, float32 [batch, rows, columns]."""
    value = ir.val(name, ir.DataType.FLOAT, ["batch", rows, columns])
    graph.inputs.append(value)
    return value
