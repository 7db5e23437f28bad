"""One token in each row is computed with folded heads: the same numbers, the same cache, little else touched."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import VARIED, difference

from llmc.bundle import DECODER_FILE
from llmc.optimize.build import build
from llmc.optimize.judge.reference import empty_caches
from llmc.optimize.lower.onnxruntime import folded_heads
from llmc.optimize.recipe import BuildRequest, Request

pytest.importorskip("onnxruntime", "1.32", reason="older engines take one token in each of several rows")

# As in test_lowering.py.
FLOAT_TOLERANCE = 1e-4
CAPACITY = 24
# Attentions of every kind, and what stands in their place.
FAMILIES = (
    *VARIED,
    "gpt_oss-sinks-clamped-experts-bf16",
    "deepseek_v2-latent-keys-grouped-experts",
    "qwen3_5-delta-and-gates",
)


@pytest.fixture
def folding(lowering):
    """A lowering of decode for an engine that folds."""

    def start(export, cache="float32"):
        lowered = lowering(export, cache=cache)
        spare = folded_heads.count_overwritten(lowered.geometry.attentions)
        lowered.context = replace(lowered.context, phase="decode", ragged_rows=True, overwritten=spare)
        return lowered

    return start


def groups(lowered) -> int:
    """Attentions whose heads share keys and values, and that see all positions, without sinks."""
    plain = (item for item in lowered.geometry.attentions if not item.window and not item.sinks)
    return sum(item.heads > item.kv_heads for item in plain)


@pytest.mark.parametrize("case", FAMILIES, indirect=True)
def test_token_by_token_equals_the_portable_graph(case, folding, decoder, portable_logits, ids):
    lowered = folding(case.export)
    folder = lowered.save()
    assert len(lowered.nodes("If")) == groups(lowered)
    logits = decoder(folder, lowered.geometry)(ids, [7, *[1] * (len(ids) - 7)])
    assert difference(logits, portable_logits(case)) <= FLOAT_TOLERANCE


@pytest.mark.parametrize("cache", ["float32", "float16"])
def test_rows_of_any_lengths_have_the_bits_that_each_has_alone(exported, folding, decoder, ids, cache):
    lowered = folding(exported("llama-biases").export, cache)
    decode = decoder(lowered.save(), lowered.geometry, cache)
    lengths = [9, 0, 1, 14]
    caches = [decode.run([ids[:n]], [0], decode.empty_cache())[1] if n else decode.empty_cache() for n in lengths]
    alone = [decode.run([[5]], [n], cache)[0][0] for n, cache in zip(lengths, caches, strict=True)]
    together = {name: np.concatenate([cache[name] for cache in caches]) for name in caches[0]}
    np.testing.assert_array_equal(decode.run([[5]] * len(lengths), lengths, together)[0], np.stack(alone))


def groups_mixed_up(branch: ir.Graph) -> None:
    turned = next(node for node in branch if node.op_type == "Transpose")
    turned.outputs[0].replace_all_uses_with(turned.inputs[0])


def keys_for_values(branch: ir.Graph) -> None:
    chosen = next(node for node in branch if node.op_type == "Gather").inputs[1]
    heads = chosen.const_value.numpy().copy()
    third = heads.shape[1] // 3
    heads[:, -third:] = heads[:, third:-third]
    chosen.const_value = ir.tensor(heads, name=chosen.name)


def later_keys_seen(branch: ir.Graph) -> None:
    next(node for node in branch if node.op_type == "GroupQueryAttention").replace_input_with(10, None)


@pytest.mark.parametrize("plant", [groups_mixed_up, keys_for_values, later_keys_seen])
def test_a_planted_error_exceeds_the_tolerance(exported, folding, decoder, portable_logits, ids, plant):
    case = exported("llama-biases")
    lowered = folding(case.export).finish()
    plant(lowered.nodes("If")[0].attributes["then_branch"].as_graph())
    logits = decoder(lowered.write(), lowered.geometry)(ids, [7, *[1] * (len(ids) - 7)])
    assert difference(logits, portable_logits(case)) > 10 * FLOAT_TOLERANCE


@pytest.mark.parametrize("position", [11, CAPACITY - 1], ids=["amid the context", "its last"])
def test_the_cache_is_written_in_place_and_no_further_than_the_manifest_says(exported, folding, session, ids, position):
    """As a runtime binds it: the buffer that comes in is the one that goes out, and no row is copied."""
    lowered = folding(exported("llama-biases").export)
    spare = folded_heads.count_overwritten(lowered.geometry.attentions)
    assert spare > 0
    decode = session(lowered.save() / DECODER_FILE)
    caches = empty_caches(lowered.geometry.caches, 1, CAPACITY + spare, "float32")
    io = decode.io_binding()
    for name, value in {"input_ids": [ids[:1]], "past_lengths": [position], "logit_indices": [[0]]}.items():
        io.bind_cpu_input(name, np.array(value, np.int64))
    for output in decode.get_outputs():
        if not output.name.startswith("present."):
            io.bind_output(output.name)
    for name, array in caches.items():
        place = "cpu", 0, array.dtype, array.shape, array.ctypes.data
        io.bind_input(name, *place)
        io.bind_output(name.replace("past_key_values.", "present."), *place)
    decode.run_with_iobinding(io)
    for array in caches.values():
        assert np.unique(np.nonzero((array != 0).any(-1))[2]).tolist() == list(range(position, position + 1 + spare))


@pytest.mark.parametrize(
    ("request_", "minimum", "folds"),
    [
        (Request(precision="int8"), "1.32", [True, True]),
        (Request(precision="int8", phases="split"), "1.32", [False, True]),
        (Request(precision="int8", cache="float32"), "1.23", [False, False]),
        (Request(precision="fp32"), "1.23", [False, False]),
    ],
    ids=["one graph", "two graphs", "float32 cache", "floats"],
)
def test_a_bundle_says_which_engine_it_needs(exported, tmp_path, request_, minimum, folds):
    export = exported("llama-biases").export
    manifest = build(BuildRequest(export, tmp_path / "bundle", recipe=request_, max_context=64)).manifest
    assert manifest.target.engine_minimum == minimum
    assert [graph.overwritten > 0 for graph in manifest.graphs.values()] == folds
