"""The unquantized model run layer by layer says what the whole graph and transformers say."""

import os
import shutil

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import difference

from llmc.optimize.judge.reference import Reference, keep_states, open_part

# Largest absolute difference of logits (up to 9) in float32: both sides sum in different orders, which costs 2e-5.
LOGIT_TOLERANCE = 1e-4
# The same against transformers, as in the tests of the exporter.
TRANSFORMERS_TOLERANCE = 2e-4


def logits_of(reference, sequences):
    return [reference.project(rows) for rows in reference.compute_normed(sequences)]


def test_logits_equal_transformers(case, ids):
    [logits] = logits_of(Reference(case.export), [ids])
    assert difference(logits, case.reference(np.array([ids]))[0]) <= TRANSFORMERS_TOLERANCE


def test_sequences_run_in_groups_are_as_in_one(exported, monkeypatch, ids):
    reference = Reference(exported("llama-biases").export)
    sequences = [ids, ids[:7], ids[3:], ids[:1]]
    together = logits_of(reference, sequences)
    monkeypatch.setattr("llmc.optimize.judge.reference.TOKENS_PER_CALL", 2 * len(ids))
    for one, other in zip(together, logits_of(reference, sequences), strict=True):
        assert difference(one, other) <= LOGIT_TOLERANCE


def test_each_layer_is_opened_once_for_all_groups(exported, monkeypatch, ids):
    opened, at = [], "llmc.optimize.judge.reference"
    monkeypatch.setattr(f"{at}.TOKENS_PER_CALL", 1)
    monkeypatch.setattr(f"{at}.open_part", lambda *part: opened.append(part) or open_part(*part))
    reference = Reference(exported("llama-biases").export)
    logits_of(reference, [ids, ids])
    assert len(opened) == reference.manifest.geometry.layers + 1  # and the last norm


@pytest.fixture
def windows(ids):
    return np.array([ids[:9], ids[9:18]])


def test_kept_states_are_read_and_not_computed_again(exported, windows, tmp_path, monkeypatch):
    reference = Reference(exported("llama-biases").export)
    first = keep_states(reference, windows, tmp_path / "cache")
    monkeypatch.setattr(Reference, "compute_normed", None)
    np.testing.assert_array_equal(keep_states(reference, windows, tmp_path / "cache"), first)


def test_new_weights_of_the_old_shape_are_computed(copied, windows, tmp_path):
    keep_states(Reference(copied), windows, tmp_path / "cache")
    os.utime(copied / "model.safetensors", ns=(0, 0))
    keep_states(Reference(copied), windows, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"\x93NUMPY\x01\x00"])
def test_a_broken_file_is_replaced(exported, windows, tmp_path, content):
    reference = Reference(exported("llama-biases").export)
    wanted = keep_states(reference, windows, tmp_path)
    [path] = tmp_path.iterdir()
    path.write_bytes(content)
    np.testing.assert_array_equal(keep_states(reference, windows, tmp_path), wanted)
    np.testing.assert_array_equal(np.load(path), wanted)


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
    [logits] = logits_of(reference, [ids])
    assert difference(logits, portable_logits(case)) > LOGIT_TOLERANCE
    assert difference(logits, case.reference(np.array([ids]))[0]) > TRANSFORMERS_TOLERANCE


@pytest.fixture
def copied(exported, tmp_path):
    return shutil.copytree(exported("llama-biases").export, tmp_path / "copy")
