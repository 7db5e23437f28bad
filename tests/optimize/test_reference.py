"""The unquantized model run layer by layer says what the whole graph and transformers say."""

import json
import shutil

import numpy as np
import onnx_ir as ir
import pytest

from llmc.errors import BundleError, CheckpointError
from llmc.optimize.reference import Reference

# Largest absolute difference of logits (up to 9) in float32: both sides sum in different orders, which costs 2e-5.
LOGIT_TOLERANCE = 1e-4
# The same against transformers, as in the tests of the exporter.
TRANSFORMERS_TOLERANCE = 2e-4


def difference(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


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
    monkeypatch.setattr("llmc.optimize.weights.PIECE", 64 * 7)
    assert difference(Reference(exported("llama-biases").export).logits([ids])[0], whole) <= LOGIT_TOLERANCE


def test_progress_counts_the_layers(exported, ids):
    steps: list[float | None] = []
    Reference(exported("llama-biases").export).logits([ids], lambda step, fraction=None: steps.append(fraction))
    assert steps == [0.0, 0.5, 1.0]


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
    (copied / "export.json").write_text(json.dumps(manifest | {"graph_contract": 2}))
    with pytest.raises(BundleError, match="follows graph contract 2, not 1"):
        Reference(copied)
