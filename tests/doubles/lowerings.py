"""What tests of every lowering need: an export on its way through the passes, and the portable decoder to equal."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmc.bundle import DECODER_FILE, read_export
from llmc.bundle.model.names import POSITIONS
from llmc.exported import rows_of
from llmc.optimize.lower.context import Computed, Float16, Float32, LoweringContext, QuantConfig, choose_table_config
from llmc.optimize.lower.rewrite import remove_dead
from llmc.optimize.passes import Step
from llmc.optimize.quantize import rtn
from llmc.optimize.weights.file import WeightFile
from llmc.runtime.sessions.onnxruntime.library import multiply_exactly

# Random checkpoints whose graphs differ where lowerings look; those left out differ from one of them in numbers alone.
VARIED = (
    "llama-biases",
    "llama-llama3-rope-tied",
    "mistral-window-wide-heads",
    "phi3-packed-window-fp16",
    "smollm3-every-second-layer-rotated",
    "gemma2-softcaps",
    "gemma3-two-ropes",
    "hunyuan-norm-after-rope",
    "ministral3-growing-queries",
    "ernie4_5-interleaved-rope-biases",
    "granite-multipliers",
    "cohere-parallel",
    "phi-head-bias-fp16",
    "gpt_neox-two-norms",
    "gpt2-scale-by-layer",
)
varied = pytest.mark.parametrize("case", VARIED, indirect=True)


class Lowering:
    """One export on its way through passes, step by step.

    Args:
        export: its folder.
        folder: where its weights and its graph will be.
        steps: the passes.
        opsets: versions by domain, as the build declares them; so with ``ir_version``.
    """

    context: LoweringContext
    """What the passes are given; whoever knows the target makes it."""

    def __init__(
        self, export: Path, folder: Path, steps: Sequence[Step], opsets: Mapping[str, int], ir_version: int
    ) -> None:
        self.export, self.folder = export, folder
        self.model = ir.load(export / DECODER_FILE)
        self.geometry = read_export(export).geometry
        self.weights = WeightFile(folder)
        self.steps = list(steps)
        self._opsets, self._ir_version = opsets, ir_version

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    def node(self, name: str) -> ir.Node:
        return next(node for node in self.graph if node.name == name)

    def nodes(self, op_type: str) -> list[ir.Node]:
        return [node for node in self.graph if node.op_type == op_type]

    def before(self, name: str) -> "Lowering":
        """Run the passes that come before the one called ``name``."""
        while self.steps[0].name != name:
            self.steps.pop(0).run(self.graph, self.context)
        return self

    def apply(self, name: str) -> int:
        """Run the passes up to the one called ``name``, clear dead nodes away, return how often it applied."""
        self.before(name)
        times = self.steps.pop(0).run(self.graph, self.context)
        remove_dead(self.graph)
        return times

    def finish(self, without: Collection[str] = ()) -> "Lowering":
        """Run the remaining passes except ``without``; weights can be read then."""
        assert not set(without) - {step.name for step in self.steps}
        while self.steps:
            step = self.steps.pop(0)
            if step.name not in without:
                step.run(self.graph, self.context)
        self.weights.close()
        return self

    def save(self, without: Collection[str] = ()) -> Path:
        """Run the remaining passes except ``without`` and write the graph."""
        return self.finish(without).write()

    def write(self) -> Path:
        """The folder, with the graph beside its weights, declared as the build declares it."""
        self.weights.close()
        self.model.functions.clear()
        self.model.opset_imports.clear()
        self.model.opset_imports.update(self._opsets)
        self.model.ir_version = self._ir_version
        ir.save(self.model, self.folder / DECODER_FILE)
        return self.folder

    def exact(self) -> None:
        """Ask MatMulNBits for float arithmetic, which is slow and exact."""
        for node in self.nodes("MatMulNBits"):
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)


def open_session(model: Path | bytes, *, optimized: bool = True) -> Any:
    """A model in ONNX Runtime on one thread; without optimization it computes with the operators as written down."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # it warns that the cache is copied, since nothing is bound in place here
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if b"MatMulIntegerToFloat" in (model if isinstance(model, bytes) else Path(model).read_bytes()):
        multiply_exactly(options)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def long_texts(session: Any, rows: int) -> dict[str, np.ndarray]:
    """The input that says, where ropes switch, that the text of each row is long, as all that the tests feed is."""
    names = {value.name for value in session.get_inputs()}
    return {"text_lengths": np.full(rows, 1 << 10)} if "text_lengths" in names else {}


def stood_for(array: np.ndarray, form: QuantConfig, compute: str) -> np.ndarray:
    """The weights that ``array`` becomes in a form: scales have the type of the activations."""
    match form:
        case Float32():
            return array
        case Float16():
            return array.astype(np.float16).astype(np.float32)
        case Computed():
            return array.astype(compute).astype(np.float32)
        case _:
            quantized = rtn.quantize(array, form.grid)
            return replace(quantized, scales=quantized.scales.astype(compute).astype(np.float32)).dequantize()


def portable(lowering: Lowering, folder: Path) -> Path:
    """The portable decoder with the weights that the plan's forms stand for, in ``folder``."""
    context, model = lowering.context, ir.load(lowering.export / DECODER_FILE)
    tables = {it.name: choose_table_config(context.quant, context.geometry, it) for it in context.geometry.tables}

    def stored(module: str, array: np.ndarray) -> np.ndarray:
        form = tables.get(module) or context.quant.of(module)
        return stood_for(array, form, context.compute)

    replace_weights(model, stored)
    folder.mkdir()
    ir.save(model, folder / DECODER_FILE)
    return folder


def replace_weights(model: ir.Model, stored: Callable[[str, np.ndarray], np.ndarray]) -> None:
    """Give a portable decoder its weights in float32: each matrix as ``stored`` makes it of module and matrix."""
    for name, value in model.graph.initializers.items():
        if not isinstance(value.const_value, ir.ExternalTensor):
            continue
        array = rows_of(value.const_value)
        if array.ndim == 2 and name != f"{POSITIONS}.weight":  # a small table, stored as it is computed with
            array = stored(name.removesuffix(".weight"), array)
        value.const_value, value.type = ir.tensor(array, name=name), ir.TensorType(ir.DataType.FLOAT)
        for reader, _ in value.uses():  # a Gather or Transpose hands the type on
            reader.outputs[0].type = value.type


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest absolute one."""
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Root mean square of the difference over that of ``b``."""
    assert a.shape == b.shape
    return float(np.sqrt(np.square(a - b).mean() / np.square(b).mean()))
