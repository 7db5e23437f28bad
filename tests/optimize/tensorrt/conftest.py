"""A decoder of one layer written by hand, and the real TensorRT-RTX to build it with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from doubles.plans import PLAN
from onnx import StringStringEntryProto, TensorProto, parser

from llmc.bundle import EngineConfig, Profile
from llmc.runtime.sessions.tensorrt.library import load_library

EXTERNAL = TensorProto.EXTERNAL
VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 96, 32, 4, 2, 16, 32
GRAPH = """
<ir_version: 11, opset_import: ["" : 24]>
decoder (int64[batch, sequence] input_ids, int64[batch] past_lengths, int64[batch, outputs] logit_indices,
         int64[attended] cache_slots,
         float16[batch, 2, capacity, 16] past_key, float16[batch, 2, capacity, 16] past_value)
    => (float[batch, outputs, 96] logits,
        float16[batch, 2, capacity, 16] present_key, float16[batch, 2, capacity, 16] present_value)
{
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    ahead = Constant <value_ints = [1, 3]> ()
    first = Constant <value_int = 0> ()
    step = Constant <value_int = 1> ()
    q_shape = Constant <value_ints = [0, 0, 4, 16]> ()
    kv_shape = Constant <value_ints = [0, 0, 2, 16]> ()
    o_shape = Constant <value_ints = [0, 0, 64]> ()
    tokens = Shape <start = 1, end = 2> (input_ids)
    tokens_scalar = Squeeze (tokens, zero)
    steps = Range (first, tokens_scalar, step)
    starts = Unsqueeze (past_lengths, one)
    positions = Add (starts, steps)
    ends = Unsqueeze (positions, ahead)
    mask = LessOrEqual (cache_slots, ends)
    attended_length = Shape (cache_slots)
    x = Gather <axis = 0> (embed, input_ids)
    normed = RMSNormalization <axis = -1> (x, norm)
    q_flat = MatMul (normed, q_weight)
    k_flat = MatMul (normed, k_weight)
    v_flat = MatMul (normed, v_weight)
    q_split = Reshape (q_flat, q_shape)
    k_split = Reshape (k_flat, kv_shape)
    v_split = Reshape (v_flat, kv_shape)
    q = Transpose <perm = [0, 2, 1, 3]> (q_split)
    k = Transpose <perm = [0, 2, 1, 3]> (k_split)
    v = Transpose <perm = [0, 2, 1, 3]> (v_split)
    q_turned = RotaryEmbedding (q, cos, sin, positions)
    k_turned = RotaryEmbedding (k, cos, sin, positions)
    present_key = TensorScatter <axis = 2> (past_key, k_turned, past_lengths)
    present_value = TensorScatter <axis = 2> (past_value, v, past_lengths)
    keys = Slice (present_key, zero, attended_length, two)
    values = Slice (present_value, zero, attended_length, two)
    mixed = Attention <scale = 1.0> (q_turned, keys, values, mask)
    mixed_back = Transpose <perm = [0, 2, 1, 3]> (mixed)
    mixed_flat = Reshape (mixed_back, o_shape)
    projected = MatMul (mixed_flat, o_weight)
    summed = Add (x, projected)
    final = RMSNormalization <axis = -1> (summed, norm)
    wanted = Unsqueeze (logit_indices, two)
    chosen = GatherND <batch_dims = 1> (final, wanted)
    scores = MatMul (chosen, head)
    logits = Cast <to = 1> (scores)
}
"""
# Names that the text form of ONNX cannot write.
NAMES = {
    "past_key": "past_key_values.0.key",
    "past_value": "past_key_values.0.value",
    "present_key": "present.0.key",
    "present_value": "present.0.value",
}
SHAPES = {
    "embed": (VOCAB, HIDDEN),
    "norm": (HIDDEN,),
    "q_weight": (HIDDEN, HEADS * HEAD_DIM),
    "k_weight": (HIDDEN, KV_HEADS * HEAD_DIM),
    "v_weight": (HIDDEN, KV_HEADS * HEAD_DIM),
    "o_weight": (HEADS * HEAD_DIM, HIDDEN),
    "head": (HIDDEN, VOCAB),
    "cos": (CAPACITY, HEAD_DIM // 2),
    "sin": (CAPACITY, HEAD_DIM // 2),
}


def save_graph(path: Path, text: str, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Path:
    """Write a graph whose weights lie in weights.bin beside it; nodes are named after their outputs."""
    model = parser.parse_model(text)
    rng = np.random.default_rng(0)
    used = {name for node in model.graph.node for name in node.input}
    with (path.parent / "weights.bin").open("wb") as file:
        for name, shape in shapes.items():
            if name not in used:
                continue
            values = (rng.standard_normal(shape) * 0.1).astype(np.float16)
            where = {"location": "weights.bin", "offset": str(file.tell()), "length": str(values.nbytes)}
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT16, dims=shape, data_location=EXTERNAL)
            tensor.external_data.extend(StringStringEntryProto(key=key, value=value) for key, value in where.items())
            file.write(values.tobytes())
            model.graph.initializer.append(tensor)
    for value in (*model.graph.input, *model.graph.output):
        value.name = NAMES.get(value.name, value.name)
    for node in model.graph.node:
        node.name = f"n.{node.output[0]}"
        node.input[:] = [NAMES.get(name, name) for name in node.input]
        node.output[:] = [NAMES.get(name, name) for name in node.output]
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture(scope="session")
def graph_text() -> str:
    """The decoder, to be changed."""
    return GRAPH


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Writes a graph given as text, with random weights."""
    return lambda text, **shapes: save_graph(tmp_path / "decoder.onnx", text, {**SHAPES, **shapes})


@pytest.fixture
def decoder(save: Callable[..., Path], graph_text: str) -> Path:
    """The decoder's file."""
    return save(graph_text)


@pytest.fixture
def config() -> EngineConfig:
    """What to build of it."""
    return replace(
        PLAN, buckets=(8, 16, CAPACITY), decode=Profile(4, 1, 1), prefill=Profile(1, 8, 2), compute_capabilities=()
    )


@pytest.fixture(scope="session")
def rtx() -> Any:
    """TensorRT-RTX, which parses and builds without a GPU."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this machine")
    return load_library("tensorrt-rtx")


@pytest.fixture
def model(decoder: Path) -> onnx.ModelProto:
    """The decoder without its weights."""
    return onnx.load(decoder, load_external_data=False)
