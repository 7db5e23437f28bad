"""A token alone after many is computed with folded heads: the same numbers, the same cache, nothing else touched."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import difference

from llmc.bundle import DECODER_FILE
from llmc.optimize.build import build
from llmc.optimize.judge.reference import empty_caches
from llmc.optimize.lower.onnxruntime import lone_steps, packed_rows
from llmc.runtime.selftest import QUICK_POSITIONS

pytest.importorskip("onnxruntime", "1.31", reason="older engines attend to no queries without new keys")

# As in test_lowering.py.
FLOAT_TOLERANCE = 1e-4
# So few that the tiny decoders have as many behind them, and as many as a group has heads.
FROM_POSITIONS = 8
CAPACITY = 24


@pytest.fixture
def folding(monkeypatch, lowering):
    """A lowering of decode for an engine that folds."""
    monkeypatch.setattr(lone_steps, "FROM_POSITIONS", FROM_POSITIONS)

    def start(export):
        lowered = lowering(export)
        lowered.context = replace(lowered.context, phase="decode", folds_lone_steps=True)
        return lowered

    return start


def groups(lowered) -> int:
    """Attentions whose heads share keys and values, and that see all positions."""
    return sum(item.heads > item.kv_heads and not item.window for item in lowered.geometry.attentions)


def test_token_by_token_equals_the_portable_graph_in_every_family(case, folding, decoder, portable_logits, ids):
    lowered = folding(case.export)
    folder = lowered.save()
    assert len(lowered.nodes("If")) == groups(lowered)
    logits = decoder(folder, lowered.geometry)(ids, [7, *[1] * (len(ids) - 7)])
    assert difference(logits, portable_logits(case)) <= FLOAT_TOLERANCE


def test_the_check_at_a_first_load_takes_the_folded_branch():
    assert QUICK_POSITIONS == lone_steps.FROM_POSITIONS


def tables_swapped(branch: ir.Graph) -> None:
    attention = next(node for node in branch if node.op_type == "GroupQueryAttention")
    cos, sin = attention.inputs[7:9]
    attention.replace_input_with(7, sin)
    attention.replace_input_with(8, cos)


def groups_mixed_up(branch: ir.Graph) -> None:
    turned = next(node for node in branch if node.op_type == "Transpose")
    turned.outputs[0].replace_all_uses_with(turned.inputs[0])


def values_not_cached(branch: ir.Graph) -> None:
    written = [node for node in branch if node.op_type == "ScatterND"][1]
    written.replace_input_with(2, next(node for node in branch if node.op_type == "ScatterND").inputs[2])


@pytest.mark.parametrize("plant", [tables_swapped, groups_mixed_up, values_not_cached])
def test_a_planted_error_exceeds_the_tolerance(exported, folding, decoder, portable_logits, ids, plant):
    case = exported("llama-biases")
    lowered = folding(case.export).finish()
    plant(lowered.nodes("If")[0].attributes["then_branch"].as_graph())
    logits = decoder(lowered.write(), lowered.geometry)(ids, [7, *[1] * (len(ids) - 7)])
    assert difference(logits, portable_logits(case)) > 10 * FLOAT_TOLERANCE


def test_the_cache_is_written_in_place_at_the_new_position_alone(exported, folding, session, ids):
    """As a runtime binds it: the buffer that comes in is the one that goes out, and no row is copied."""
    lowered = folding(exported("llama-biases").export)
    decode = session(lowered.save() / DECODER_FILE)
    position, caches = 11, empty_caches(lowered.geometry.caches, 1, CAPACITY, "float32")
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
        assert np.unique(np.nonzero((array != 0).any(-1))[2]).tolist() == [position]


@pytest.mark.parametrize(
    "options",
    [{"folds_lone_steps": False}, {"phase": "prefill"}, {"phase": "shared"}],
    ids=["an engine that does not fold", "a graph that feeds chunks", "a graph for both"],
)
def test_graphs_that_gain_nothing_stay_as_they_are(exported, folding, options):
    lowered = folding(exported("llama-biases").export)
    lowered.context = replace(lowered.context, **options)
    assert lowered.apply("fold lone steps") == 0


def test_attention_with_a_window_stays_as_it_is(exported, folding):
    lowered = folding(exported("mistral-window-wide-heads").export)
    assert lowered.apply("fold lone steps") == groups(lowered) < lowered.geometry.layers


@pytest.mark.parametrize(("precision", "minimum"), [("int8", "1.31"), ("fp32", "1.23")], ids=["folded", "one graph"])
def test_a_bundle_says_which_engine_it_needs(exported, tmp_path, monkeypatch, precision, minimum):
    monkeypatch.setattr(packed_rows, "packable", lambda cache: False)
    manifest = build(exported("llama-biases").export, tmp_path / "bundle", precision=precision, max_context=64).manifest
    assert manifest.target.engine_minimum == minimum
