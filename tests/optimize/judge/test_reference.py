"""The unquantized model run layer by layer says what the whole graph and transformers say."""

import json
import os
import shutil

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import difference

from llmc.bundle import GRAPH_CONTRACT_VERSION
from llmc.errors import BundleError, CheckpointError
from llmc.optimize.judge.reference import Reference, kept_states, open_part

# Largest absolute difference of logits (up to 9) in float32: both sides sum in different orders, which costs 2e-5.
LOGIT_TOLERANCE = 1e-4
# The same against transformers, as in the tests of the exporter.
TRANSFORMERS_TOLERANCE = 2e-4


def test_logits_equal_the_whole_graph(case, portable_logits, ids):
    [logits] = Reference(case.export).logits([ids])
    assert logits.dtype == np.float32
    assert difference(logits, portable_logits(case)) <= LOGIT_TOLERANCE


def test_logits_equal_transformers(case, ids):
    [logits] = Reference(case.export).logits([ids])
    assert difference(logits, case.reference(np.array([ids]))[0]) <= TRANSFORMERS_TOLERANCE


def test_sequences_of_any_length_are_as_alone(case, ids):
    reference = Reference(case.export)
    sequences = [ids[:3], ids, ids[4:5], ids[7:19]]
    together = reference.logits(sequences)
    assert [len(logits) for logits in together] == [3, 20, 1, 12]
    for sequence, logits in zip(sequences, together, strict=True):
        assert difference(logits, reference.logits([sequence])[0]) <= LOGIT_TOLERANCE


def test_a_head_multiplied_in_pieces_equals_the_whole(exported, monkeypatch, ids):
    whole = Reference(exported("llama-biases").export).logits([ids])[0]
    monkeypatch.setattr("llmc.optimize.judge.reference.HEAD_PIECE", 64 * 7)
    assert difference(Reference(exported("llama-biases").export).logits([ids])[0], whole) <= LOGIT_TOLERANCE


def test_progress_counts_the_layers(exported, ids):
    steps: list[float | None] = []
    Reference(exported("llama-biases").export).logits([ids], lambda step, fraction=None: steps.append(fraction))
    assert steps == [0.0, 0.5, 1.0]


def test_sequences_run_in_groups_are_as_in_one(exported, monkeypatch, ids):
    reference = Reference(exported("llama-biases").export)
    sequences = [ids, ids[:7], ids[3:], ids[:1]]
    together = reference.logits(sequences)
    monkeypatch.setattr("llmc.optimize.judge.reference.TOKENS_PER_CALL", 2 * len(ids))
    for one, other in zip(together, reference.logits(sequences), strict=True):
        assert difference(one, other) <= LOGIT_TOLERANCE


def test_each_layer_is_opened_once_for_all_groups(exported, monkeypatch, ids):
    opened, at = [], "llmc.optimize.judge.reference"
    monkeypatch.setattr(f"{at}.TOKENS_PER_CALL", 1)
    monkeypatch.setattr(f"{at}.open_part", lambda *part: opened.append(part) or open_part(*part))
    reference = Reference(exported("llama-biases").export)
    reference.logits([ids, ids])
    assert len(opened) == reference.manifest.geometry.layers + 1  # and the last norm


def test_states_are_those_between_the_layers(case, ids):
    reference = Reference(case.export)
    groups = [np.array([ids, ids[::-1]])]
    states = [hidden for [hidden] in reference.states(groups)]
    assert len(states) == reference.manifest.geometry.layers + 1
    logits = reference.project(reference.last_norm(states[-1])[0])
    assert difference(logits, reference.logits([ids])[0]) <= LOGIT_TOLERANCE


def test_a_value_inside_a_layer_may_take_the_place_of_what_makes_it(case, ids):
    """Every linear's own output put back in changes nothing; another one changes the layer."""
    reference = Reference(case.export)
    before, after = (hidden for [hidden], _ in zip(reference.states([np.array([ids])]), range(2), strict=False))
    linears = list(reference.linears(0))
    assert [name for name, _, _ in linears] == [
        linear.name for linear in reference.manifest.geometry.linears if linear.layer == 0
    ]
    for _, _, output in linears:
        made = reference.inside(0, {"hidden.0": before}, output)
        again = reference.inside(0, {"hidden.0": before, output: made}, "hidden.1")
        assert difference(again, after) <= LOGIT_TOLERANCE
        other = reference.inside(0, {"hidden.0": before, output: made[..., ::-1].copy()}, "hidden.1")
        assert difference(other, after) > LOGIT_TOLERANCE


# -------------------------------------------------------------------------------------------- states kept for next time


@pytest.fixture
def windows(ids):
    return np.array([ids[:9], ids[9:18]])


def test_kept_states_are_read_and_not_computed_again(exported, windows, tmp_path, monkeypatch):
    reference = Reference(exported("llama-biases").export)
    first = kept_states(reference, windows, tmp_path / "cache")
    monkeypatch.setattr(Reference, "normed", None)
    np.testing.assert_array_equal(kept_states(reference, windows, tmp_path / "cache"), first)


def test_other_tokens_are_computed(exported, windows, tmp_path):
    reference = Reference(exported("llama-biases").export)
    kept_states(reference, windows, tmp_path)
    found = kept_states(reference, windows[:, ::-1].copy(), tmp_path)
    np.testing.assert_array_equal(found, kept_states(reference, windows[:, ::-1].copy(), None))
    assert len(list(tmp_path.iterdir())) == 2


def test_new_weights_of_the_old_shape_are_computed(copied, windows, tmp_path):
    kept_states(Reference(copied), windows, tmp_path / "cache")
    os.utime(copied / "model.safetensors", ns=(0, 0))
    kept_states(Reference(copied), windows, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"\x93NUMPY\x01\x00"])
def test_a_broken_file_is_replaced(exported, windows, tmp_path, content):
    reference = Reference(exported("llama-biases").export)
    wanted = kept_states(reference, windows, tmp_path)
    [path] = tmp_path.iterdir()
    path.write_bytes(content)
    np.testing.assert_array_equal(kept_states(reference, windows, tmp_path), wanted)
    np.testing.assert_array_equal(np.load(path), wanted)


def test_a_cache_that_cannot_be_written_is_done_without(exported, windows, tmp_path):
    (tmp_path / "file").write_text("no folder")
    reference = Reference(exported("llama-biases").export)
    found = kept_states(reference, windows, tmp_path / "file")
    np.testing.assert_array_equal(found, kept_states(reference, windows, None))


# ------------------------------------------------------------------------------------- planted errors and broken files


def epsilon_off(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "RMSNormalization":
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-3)


def window_off_by_one(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "CachedAttention":
            node.attributes["window"] = ir.AttrInt64("window", node.attributes["window"].as_int() + 1)


@pytest.mark.parametrize("plant", [epsilon_off, window_off_by_one])
def test_a_planted_error_exceeds_the_tolerances(exported, portable_logits, ids, plant):
    case = exported("mistral-window-wide-heads")
    reference = Reference(case.export)
    plant(reference._model)
    [logits] = reference.logits([ids])
    assert difference(logits, portable_logits(case)) > LOGIT_TOLERANCE
    assert difference(logits, case.reference(np.array([ids]))[0]) > TRANSFORMERS_TOLERANCE


@pytest.fixture
def copied(exported, tmp_path):
    return shutil.copytree(exported("llama-biases").export, tmp_path / "copy")


def test_weights_that_are_no_numbers_are_refused_by_name(copied, ids):
    embedding = next(node for node in Reference(copied)._model.graph if node.name == "model.embed_tokens")
    tensor = embedding.inputs[0].const_value
    with (copied / "model.safetensors").open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.full(96 * 64, np.nan, np.float32).tobytes())
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight holds NaN"):
        Reference(copied).logits([ids])


def test_a_folder_that_is_no_export_is_refused(tmp_path):
    with pytest.raises(BundleError, match="not written by llmc"):
        Reference(tmp_path)


def test_an_export_of_another_graph_contract_is_refused(copied):
    manifest = json.loads((copied / "export.json").read_text())
    (copied / "export.json").write_text(json.dumps(manifest | {"graph_contract": 1}))
    with pytest.raises(BundleError, match=f"follows graph contract 1, not {GRAPH_CONTRACT_VERSION}"):
        Reference(copied)
