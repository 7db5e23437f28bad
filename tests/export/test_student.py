"""A student's checkpoint is its model, and models whose layers make none are refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles.decoders import load_decoder
from doubles.refusals import about

from llmc.errors import CheckpointError, UsageError
from llmc.export.decoder import Decoder
from llmc.export.streaming import StreamedDecoder
from llmc.export.student import WIDTHS, Student, choose_layers

# Largest absolute difference of logits (up to 20) from transformers, as for exported graphs: sums in another order.
LOGIT_TOLERANCE = 2e-4
IDS = np.random.default_rng(1).integers(0, 96, (2, 12))


def logits(model: Decoder) -> np.ndarray:
    ids, start = torch.from_numpy(IDS), torch.zeros(len(IDS), dtype=torch.int64)
    with torch.no_grad():
        return model(ids, start, torch.arange(IDS.shape[1]).expand(2, -1), model.empty_caches(*IDS.shape))[0].numpy()


@pytest.mark.parametrize(
    ("total", "count", "layers"),
    [(30, 4, (0, 10, 19, 29)), (6, 2, (0, 5)), (5, 1, (0,)), (5, 4, (0, 1, 3, 4)), (3, 2, (0, 2))],
)
def test_layers_are_evenly_spread_with_the_first_and_the_last(total: int, count: int, layers: tuple[int, ...]):
    assert choose_layers(total, count) == layers


@pytest.mark.parametrize(
    ("name", "changes", "layers", "narrow"),
    [
        ("llama-biases", {"num_hidden_layers": 5}, (0, 2, 4), None),
        ("qwen3-tied-sharded", {"num_hidden_layers": 4}, (0, 3), None),
        ("llama-linear-rope-no-groups-fp16", {}, (0,), None),
        ("phi-head-bias-fp16", {}, (0,), None),
        ("gemma3-two-ropes", {}, (0,), None),  # stores norms less one, and a list of layers
        ("llama-biases", {"num_hidden_layers": 5}, (0, 4), (48, 2, 1)),
        ("qwen3-tied-sharded", {"num_hidden_layers": 4}, (0, 3), (48, 2, 1)),
        ("olmo2-norms-behind", {}, (0,), (48, 2, 1)),  # normalizes all heads together
        ("mistral-one-kv-head-bf16", {"dtype": "float32"}, (0,), (48, 4, 1)),
    ],
)
def test_a_trained_student_is_the_checkpoint_that_it_writes(
    name, changes, layers, narrow, exported, transformers_model, tmp_path: Path
):
    student = Student(exported(name, **changes).export, len(layers), "cpu", torch.from_numpy(IDS) if narrow else None)
    assert student.layers == layers
    untrained, taught = logits(student.model), logits(student.teacher)
    trained = [it for it in student.model.parameters() if it.requires_grad]
    assert {id(it) for it in trained} == {
        id(it) for part in (student.model.model.layers, student.model.model.norm) for it in part.parameters()
    }
    with torch.no_grad():
        for weight in trained:
            weight += torch.randn(weight.shape, generator=torch.manual_seed(0)) / 16
            weight.copy_(weight.half() if "fp16" in name else weight)
    student.write(tmp_path)
    # llmc's names are not those that transformers expects of every family.
    found = logits(load_decoder(tmp_path)) if name.startswith("phi") else transformers_model(tmp_path)(IDS)
    np.testing.assert_allclose(found, logits(student.model), rtol=0, atol=LOGIT_TOLERANCE)
    assert np.abs(found - untrained).max() > 100 * LOGIT_TOLERANCE
    np.testing.assert_array_equal(logits(student.teacher), taught)  # it shares no weight that is trained
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == len(layers)
    assert narrow is None or tuple(map(config.get, WIDTHS)) == narrow


def test_a_narrow_student_keeps_the_neurons_and_heads_that_do_something(exported, monkeypatch):
    def plant(self: StreamedDecoder, name: str, *rows: int) -> torch.Tensor:
        weight = read(self, name, *rows)
        if name.endswith("down_proj.weight"):
            weight[:, ::2] = 0
        if name.endswith("o_proj.weight"):  # the two heads of the first of two KV heads
            weight[:, : weight.shape[1] // 2] = 0
        return weight

    read = StreamedDecoder.rows
    monkeypatch.setattr(StreamedDecoder, "rows", plant)
    student = Student(exported("llama-biases").export, 1, "cpu", torch.from_numpy(IDS))
    ropes, start = [it.inv_freq for it in student.teacher.rotary_emb], torch.zeros(2, dtype=torch.int64)
    x = torch.randn(2, 12, student.teacher.config.hidden_size, generator=torch.manual_seed(0))
    whole, narrow = (
        model.model.layers[0](x, model.empty_caches(2, 12)[0], start, ropes)[0].detach()
        for model in (student.teacher, student.model)
    )
    torch.testing.assert_close(narrow, whole, rtol=0, atol=LOGIT_TOLERANCE)
    assert (whole - x).abs().max() > 100 * LOGIT_TOLERANCE


def test_widths_that_a_config_says_by_other_keys_are_refused(exported):
    with pytest.raises(CheckpointError, match="a granitemoehybrid says widths by other keys than intermediate_size, "):
        Student(exported("granitemoehybrid-dense").export, 1, "cpu", torch.from_numpy(IDS))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lfm2-short-convolutions", "states"),
        ("mixtral-experts", "experts"),
        ("gpt2-scale-by-layer", "a way of its own"),
    ],
)
def test_layers_that_make_no_checkpoint_are_refused(name: str, said: str, exported):
    with pytest.raises(CheckpointError, match=rf"{said}.*, so its layers .* make no .* distill from a dense model"):
        Student(exported(name).export, 1, "cpu")


def test_layers_that_differ_by_their_number_are_refused(exported, tmp_path: Path):
    whole = exported("smollm3-every-second-layer-rotated", num_hidden_layers=4).export
    assert Student(whole, 3, "cpu").layers == (0, 2, 3)  # the config lists which layers are rotated
    export = Path(shutil.copytree(whole, tmp_path / "export"))
    config = json.loads((export / "config.json").read_text())
    del config["no_rope_layers"]
    (export / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"its layers differ by their number .*, so its layers 0, 2, 3 make no"):
        Student(export, 3, "cpu")


def test_a_student_has_fewer_layers_than_its_teacher(exported):
    with pytest.raises(UsageError, check=about("student")):
        Student(exported("llama-biases").export, 2, "cpu")
