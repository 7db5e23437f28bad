"""Experts compute on CPUs what the portable operator computes with the weights that they are stored as."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import open_session, relative_difference, stood_for

from llmc.bundle.model.experts import Experts
from llmc.errors import BuildError
from llmc.export import expert_ops
from llmc.optimize.lower.context import Float16, Float32, QuantConfig, QuantConfigs, WeightOnly
from llmc.optimize.lower.onnxruntime.experts import lower_experts
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.weights.file import WeightFile
from llmc.optimize.weights.store import Calibrated, Store, arrays_of

ITEM = Experts(name="model.layers.0.experts", layer=0, count=8, chosen=3, inner=32, width=64)
ITEMS = {"silu": ITEM, "gelu": replace(ITEM, activation="gelu_tanh")}
TOKENS = 7
# Root mean square of the difference over that of the result. Floats are summed in another order; 8-bit activations, of
# which QMoE has 8-bit experts alone, are rounded to a 127th of the largest of 32. Planted errors cost 0.1 and more.
FLOAT_TOLERANCE, ROUNDING_TOLERANCE = 2e-6, 0.02
INT4 = WeightOnly(Grid(4, 32, symmetric=False))
FORMS: dict[str, tuple[QuantConfig, float]] = {
    "fp32": (Float32(), FLOAT_TOLERANCE),
    "fp16": (Float16(), FLOAT_TOLERANCE),
    "int4": (INT4, FLOAT_TOLERANCE),
    "int4-symmetric": (WeightOnly(Grid(4, 16)), FLOAT_TOLERANCE),
    "int8": (WeightOnly(Grid(8, 64)), ROUNDING_TOLERANCE),
}


def softmax() -> tuple[np.ndarray, np.ndarray]:
    logits = np.random.default_rng(1).normal(0, 1, (1, TOKENS, ITEM.count))
    weights = (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).astype(np.float32)
    return weights, weights


def sigmoid_and_bias() -> tuple[np.ndarray, np.ndarray]:
    """Of which the bias, as large as the weights, only chooses."""
    weights = (1 / (1 + np.exp(-np.random.default_rng(2).normal(0, 1, (1, TOKENS, ITEM.count))))).astype(np.float32)
    return weights + np.linspace(1, 0, ITEM.count, dtype=np.float32), weights


def ties() -> tuple[np.ndarray, np.ndarray]:
    """All experts score the same: the first ones are chosen."""
    return (np.full((1, TOKENS, ITEM.count), 1 / ITEM.count, np.float32),) * 2


ROUTERS = [softmax, sigmoid_and_bias, ties]


class Graph:
    """One mixture with random weights in a file of ``folder``."""

    def __init__(self, folder: Path, normalized: bool, item: Experts = ITEM) -> None:
        self.folder, self.item = folder, item
        generator = np.random.default_rng(0)
        self.stacks = {
            part.name: generator.normal(0, 0.2, (item.count, part.outputs, part.inputs)).astype(np.float32)
            for part in item.parts
        }
        self.x = generator.normal(0, 1, (1, TOKENS, item.width)).astype(np.float32)
        self.normalized = normalized

    def model(self, stored: Callable[[np.ndarray], np.ndarray] = lambda matrix: matrix) -> ir.Model:
        """The portable operator, with each expert's matrix as ``stored`` makes it."""
        given = [
            ir.val(name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, TOKENS, width]))
            for name, width in (("x", self.item.width), ("scores", self.item.count), ("weights", self.item.count))
        ]
        file, offset, values = self.folder / "checkpoint", 0, []
        with file.open("wb") as out:
            for name, stack in self.stacks.items():
                data = np.stack([stored(matrix) for matrix in stack])
                out.write(data.tobytes())
                place = {"shape": ir.Shape(data.shape), "name": f"{name}.weight", "base_dir": self.folder}
                tensor = ir.ExternalTensor(file.name, offset, data.nbytes, ir.DataType.FLOAT, **place)
                values.append(ir.val(f"{name}.weight", const_value=tensor))
                offset += data.nbytes
        gelu = self.item.activation == "gelu_tanh"
        attributes = {"chosen": self.item.chosen, "normalized": int(self.normalized)}
        attributes |= {"activation": self.item.activation} if gelu else {}
        node = ir.node("Experts", [*given, *values], attributes, domain="llmc", name=self.item.name)
        node.outputs[0].name, node.outputs[0].type = "y", given[0].type
        opsets = {"": 24, "llmc": 1, "com.microsoft": 1}
        graph = ir.Graph(given, node.outputs, nodes=[node], initializers=values, opset_imports=opsets, name="experts")
        form = ir.serde.deserialize_function(expert_ops.functions()[gelu])
        return ir.Model(graph, ir_version=12, functions=[form])

    def lower(self, form: QuantConfig, calibrated: Calibrated | None = None) -> ir.Model:
        model, listed = self.model(), SimpleNamespace(mixtures=(self.item,))
        with closing(WeightFile(self.folder)) as weights:
            context: Any = SimpleNamespace(
                geometry=listed, quant=QuantConfigs(form, form), weights=weights, calibrated=calibrated or Calibrated()
            )
            assert lower_experts(model.graph, context) == 1
        model.functions.clear()
        for node in model.graph:
            if node.op_type in ("QMoE", "MatMulNBits"):  # float activations, where its kernels have them
                node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
        return model

    def run(self, model: ir.Model, router: Callable[[], tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        path = self.folder / f"{len(list(self.folder.iterdir()))}.onnx"
        ir.save(model, path)
        scores, weights = router()
        [y] = open_session(path).run(None, {"x": self.x, "scores": scores, "weights": weights})
        return y

    def torch(self, router: Callable[[], tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        import torch

        x, scores, weights, *stacks = map(torch.from_numpy, (self.x, *router(), *self.stacks.values()))
        knobs = expert_ops.Knobs(self.item.chosen, self.normalized, 1.0, 0.0, self.item.activation)
        return expert_ops.experts(x, scores, weights, stacks, [], knobs).numpy()


# Experts are chosen alike whatever they are stored as, and stored alike whoever chooses.
CHOSEN = [(form, softmax, True) for form in FORMS]
CHOSEN += [("int4", router, normalized) for router in ROUTERS for normalized in (True, False)][1:]


@pytest.mark.parametrize(("form", "router", "normalized"), CHOSEN)
@pytest.mark.parametrize("item", ITEMS)
def test_lowered_experts_equal_the_portable_operator(tmp_path, item, form, router, normalized):
    graph, (config, tolerance) = Graph(tmp_path, normalized, ITEMS[item]), FORMS[form]
    wanted = graph.run(graph.model(lambda matrix: stood_for(matrix, config, "float32")), router)
    assert relative_difference(graph.run(graph.lower(config), router), wanted) <= tolerance


def test_integers_that_calibration_chose_are_stored(tmp_path):
    graph, arrays = Graph(tmp_path, normalized=True), dict[str, np.ndarray]()
    for name, stack in graph.stacks.items():
        arrays |= arrays_of(f"{name}.weight", rtn.quantize(-stack.reshape(-1, stack.shape[-1]), INT4.grid))
    store = Store(tmp_path)
    store.write("layer-000", arrays)
    wanted = graph.run(graph.model(lambda matrix: stood_for(-matrix, INT4, "float32")), softmax)
    found = graph.run(graph.lower(INT4, Calibrated(store)), softmax)
    assert relative_difference(found, wanted) <= FLOAT_TOLERANCE


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("router", [softmax, sigmoid_and_bias])  # which of equals torch chooses nobody says
def test_the_portable_operator_equals_torch(tmp_path, router, item):
    graph = Graph(tmp_path, False, ITEMS[item])
    assert relative_difference(graph.run(graph.model(), router), graph.torch(router)) <= FLOAT_TOLERANCE


def all_considered(node: ir.Node) -> None:
    """QMoE chooses by itself, of ties others."""
    scores = node.inputs[1].producer().inputs[0].producer()
    node.inputs[1].producer().replace_input_with(0, next(v for v in node.graph.inputs if v.name == "scores"))
    assert scores.op_type == "ScatterElements"


def normalized_anyway(node: ir.Node) -> None:
    """The factor that takes the normalization back is left out."""
    [(product, _)] = node.outputs[0].uses()
    product.replace_input_with(1, ir.val("one", const_value=ir.tensor(np.ones(1, np.float32), name="one")))
    node.graph.register_initializer(product.inputs[1])


def gate_for_up(node: ir.Node) -> None:
    value = node.inputs[2]
    codes = value.const_value.numpy()
    turned = codes.reshape(ITEM.count, -1, 2, codes.shape[2])[:, :, ::-1].reshape(codes.shape)
    value.const_value = ir.tensor(np.ascontiguousarray(turned), name=value.name)


def without_zero_points(node: ir.Node) -> None:
    node.replace_input_with(11, None)


def weights_of_another(node: ir.Node) -> None:
    """The first expert has those of the last."""
    node.replace_input_with(1, node.graph.initializers[node.inputs[1].name.removesuffix("0") + "7"])


def rows_left_in_order(node: ir.Node) -> None:
    """Products are not put back in the order of the tokens."""
    *_, places = (it for it in node.graph if it.op_type == "TopK")
    [(gather, index)] = places.outputs[1].uses()
    gather.replace_input_with(index, places.inputs[0])


PLANTS = {
    "silu": [all_considered, normalized_anyway, gate_for_up, without_zero_points],
    "gelu": [weights_of_another, rows_left_in_order],
}


@pytest.mark.parametrize(("item", "plant"), [(item, plant) for item, plants in PLANTS.items() for plant in plants])
def test_a_planted_error_exceeds_the_tolerances(tmp_path, item, plant):
    graph = Graph(tmp_path, False, ITEMS[item])
    wanted, model = graph.run(graph.model(lambda matrix: stood_for(matrix, INT4, "float32")), ties), graph.lower(INT4)
    plant(next(node for node in model.graph if node.op_type in ("QMoE", "MatMulNBits")))
    assert relative_difference(graph.run(model, ties), wanted) > 5 * ROUNDING_TOLERANCE


def test_a_block_divides_both_widths_or_is_refused(tmp_path):
    graph = Graph(tmp_path, True, replace(ITEM, inner=24))
    with pytest.raises(BuildError, match=r"experts of 24 x 64 values.*at least 16.*fp32"):
        graph.lower(INT4)
