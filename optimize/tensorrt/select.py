"""The small engine beside a decoder's: from logits on the device to their largest, so that few bytes leave it."""

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from llmc.optimize.progress import Progress, silent
from llmc.optimize.targets import OLD
from llmc.optimize.tensorrt.builder import EngineReport, build_engine
from llmc.optimize.tensorrt.spec import EngineSpec

# TensorRT's limit on the k of its TopK layer.
CANDIDATES_AT_MOST = 3840


def select_graph(vocab_size: int, candidates: int) -> onnx.ModelProto:
    """``logits`` float32 [rows, vocab] -> the largest: ``values`` float32 and ``indices`` int64 [rows, candidates]."""
    assert 1 <= candidates <= min(vocab_size, CANDIDATES_AT_MOST)
    k = helper.make_tensor("candidates", TensorProto.INT64, [1], [candidates])
    node = helper.make_node("TopK", ["logits", "candidates"], ["values", "indices"], name="select", axis=1)
    graph = helper.make_graph(
        [node],
        "select",
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", vocab_size])],
        [
            helper.make_tensor_value_info("values", TensorProto.FLOAT, ["rows", candidates]),
            helper.make_tensor_value_info("indices", TensorProto.INT64, ["rows", candidates]),
        ],
        [k],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OLD[0])], ir_version=OLD[1])


def build_select(
    spec: EngineSpec, output: Path, *, vocab_size: int, candidates: int, progress: Progress = silent
) -> EngineReport:
    """Build the engine of :func:`select_graph` for as many rows as a decode step has, with one profile."""
    graph = output.with_name(f".{output.name}.onnx")
    profile = {"rows": (1, 1, spec.config.decode.batch)}
    try:
        graph.write_bytes(select_graph(vocab_size, candidates).SerializeToString())
        return build_engine(spec, graph, output, [profile], progress=progress)
    finally:
        graph.unlink(missing_ok=True)
