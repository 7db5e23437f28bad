"""Which attention TensorRT-RTX computes with one kernel: the edges of the table in recipes/gpu.md, on all its GPUs."""

from dataclasses import replace

import pytest
from doubles.engines import build_decoder
from onnx import parser

from llmc.bundle import Profile
from llmc.runtime.sessions.tensorrt.library import nameable_gpus

CAUSAL = "mask = LessOrEqual (cache_slots, ends)"
WINDOW = """causal = LessOrEqual (cache_slots, ends)
    oldest = Sub (ends, width)
    inside = Greater (cache_slots, oldest)
    mask = And (causal, inside)"""
GRAPH = """
<ir_version: 11, opset_import: ["" : 24]>
attention ({kind}[batch, {heads}, sequence, {dim}] q,
           {kind}[batch, {kv}, sequence, {dim}] k, {kind}[batch, {kv}, sequence, {dim}] v,
           int64[batch] past_lengths, int64[attended] cache_slots,
           {kind}[batch, {kv}, 1024, {dim}] past_key, {kind}[batch, {kv}, 1024, {dim}] past_value)
    => ({kind}[batch, {heads}, sequence, {dim}] mixed,
        {kind}[batch, {kv}, 1024, {dim}] present_key, {kind}[batch, {kv}, 1024, {dim}] present_value)
{{
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    ahead = Constant <value_ints = [1, 3]> ()
    first = Constant <value_int = 0> ()
    step = Constant <value_int = 1> ()
    width = Constant <value_int = 128> ()
    tokens = Shape <start = 2, end = 3> (q)
    count = Squeeze (tokens, zero)
    steps = Range (first, count, step)
    starts = Unsqueeze (past_lengths, one)
    positions = Add (starts, steps)
    ends = Unsqueeze (positions, ahead)
    {mask}
    attended_length = Shape (cache_slots)
    present_key = TensorScatter <axis = 2> (past_key, k, past_lengths)
    present_value = TensorScatter <axis = 2> (past_value, v, past_lengths)
    keys = Slice (present_key, zero, attended_length, two)
    values = Slice (present_value, zero, attended_length, two)
    mixed = Attention <scale = 1.0> (q, keys, values, mask)
}}
"""


@pytest.mark.parametrize(
    ("kind", "heads", "kv", "dim", "mask", "attention"),
    [
        # Head sizes, groups and masks make no difference within these bounds.
        ("float16", 8, 8, 64, CAUSAL, "fused"),
        ("float16", 8, 2, 80, WINDOW, "fused"),
        ("float16", 7, 1, 96, CAUSAL, "fused"),
        ("float16", 8, 1, 256, WINDOW, "fused"),
        ("float16", 8, 2, 16, CAUSAL, "fused"),
        ("bfloat16", 8, 2, 128, CAUSAL, "fused"),
        ("float16", 8, 2, 8, CAUSAL, "decomposed"),
        ("float16", 8, 2, 288, CAUSAL, "decomposed"),
        # Decode takes four heads.
        ("float16", 4, 4, 64, CAUSAL, "fused"),
        ("float16", 3, 3, 64, CAUSAL, "decomposed"),
        # Prefill takes 16 bits.
        ("float", 8, 2, 128, CAUSAL, "decomposed"),
    ],
)
def test_attention_is_one_kernel_within_the_bounds_of_the_page(
    rtx, config, tmp_path, kind, heads, kv, dim, mask, attention
):
    path = tmp_path / "decoder.onnx"
    text = GRAPH.format(kind=kind, heads=heads, kv=kv, dim=dim, mask=mask)
    path.write_bytes(parser.parse_model(text).SerializeToString())
    gpus = tuple(gpu for gpu in nameable_gpus(rtx) if kind != "bfloat16" or gpu != "7.5")
    assert len(gpus) >= 5
    asked = replace(
        config, buckets=(256, 512, 1024), decode=Profile(4, 1, 1), prefill=Profile(1, 128, 1), compute_capabilities=gpus
    )
    assert build_decoder(rtx, path, asked).attention == attention
