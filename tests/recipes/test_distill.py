"""Distillation: a student learns what its teacher says, is a checkpoint that builds, and drafts for its teacher."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from doubles.modules import load_file, random_checkpoints

from llmc.errors import CheckpointError, UsageError
from llmc.export import export
from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest
from llmc.runtime import load

RECIPES = Path(__file__).parents[2] / "recipes"
# Of log-probabilities, which are kept in 16 bits, down to -16.
LOG_TOLERANCE = 2e-2
# Largest absolute difference of logits (up to 20) from transformers, as for exported graphs: sums in another order.
LOGIT_TOLERANCE = 2e-4
SMALL = {"PROMPT": 8, "LENGTH": 24, "CHUNK": 4, "GROWTH": 8, "TOP": 12, "ROWS": 16}
SMALL |= {"STEPS": 2, "BATCH": 2, "AT_ONCE": 1}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The recipe, for texts of 24 tokens."""
    module = load_file(RECIPES / "distill.py")
    for name, value in SMALL.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text((RECIPES / "tiny" / "validation.txt").read_text(encoding="utf-8")[:4000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Export a random checkpoint by its name and changes of its config."""
    return lambda name, **changes: random_checkpoints().make_case(name, tmp_path_factory, **changes).export


def test_a_student_that_learned_drafts_for_its_teacher(
    script, text, tiny_export, tiny_bundle, tmp_path, monkeypatch, capsys
):
    arguments = ("distill.py", tiny_export, tmp_path / "draft", "--layers", 2, "--text", text, "--steps", 20)
    monkeypatch.setattr("sys.argv", list(map(str, arguments)))
    script.main()
    *steps, result = capsys.readouterr().out.splitlines()
    assert len(steps) == 2
    before, after = (float(word[:-1]) for word in result.split() if word.endswith("%"))
    assert after > before
    export(tmp_path / "draft", tmp_path / "export")
    build(BuildRequest(tmp_path / "export", tmp_path / "bundle", max_context=128))
    with load(tiny_bundle) as plain, load(tiny_bundle, draft=str(tmp_path / "bundle")) as drafted:
        asked = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
        assert drafted.generate("import os\n", **asked).text == plain.generate("import os\n", **asked).text


def test_texts_are_what_the_teacher_says(script, tiny_export, tiny_checkpoint):
    from transformers import AutoModelForCausalLM

    teacher, _, _ = script.cut(tiny_export, script.read_export(tiny_export), 1)
    prompts = torch.from_numpy(np.random.default_rng(0).integers(3, 4096, (3, 8)))
    stop = int(script.write_texts(teacher, prompts, np.zeros(3), torch.tensor([0]), np.random.default_rng(0))[0][0, 12])
    heat, stops = np.array([0.0, 0.0, 1.0]), torch.tensor([stop])
    ids, tokens, logs, counted = script.write_texts(teacher, prompts, heat, stops, np.random.default_rng(0))
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    with torch.no_grad():
        greedy = model.generate(prompts[:2], max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0)
        wanted = model(ids[:, :-1]).logits.log_softmax(-1)
    assert torch.equal(ids[:2], greedy)
    assert torch.equal(ids[2, :8], prompts[2])
    assert not torch.equal(ids[2, 8:], wanted[2, 7:].argmax(-1))  # a sample
    torch.testing.assert_close(logs.float(), wanted.gather(-1, tokens.long()), rtol=0, atol=LOG_TOLERANCE)
    torch.testing.assert_close(logs.float(), wanted.topk(12).values, rtol=0, atol=LOG_TOLERANCE)
    first = ids[0, 8:].tolist().index(stop) + 8
    assert counted[0].tolist() == [place < first for place in range(23)]


def test_divergence_is_that_of_all_tokens_with_the_rest_as_one(script):
    generator = torch.manual_seed(0)
    teacher, student = (torch.randn(2, 3, 40, generator=generator) for _ in range(2))
    logs, counted = teacher.log_softmax(-1), torch.tensor([[True, True, False], [True, False, False]])
    whole = torch.nn.functional.kl_div(student.log_softmax(-1), logs, log_target=True, reduction="none").sum(-1)
    everything = torch.arange(40).expand(2, 3, -1)
    exact = script.divergence(student, everything, logs, counted)
    torch.testing.assert_close(exact, whole[counted].sum(), rtol=1e-3, atol=1e-4)
    kept = logs.topk(5)
    merged = [
        torch.cat((logs_of.gather(-1, kept.indices).exp(), torch.zeros(2, 3, 1)), -1)
        for logs_of in (logs, student.log_softmax(-1))
    ]
    for each in merged:
        each[..., -1] = 1 - each.sum(-1)
    wanted = (merged[0] * (merged[0] / merged[1]).log()).sum(-1)[counted].sum()
    torch.testing.assert_close(script.divergence(student, kept.indices, kept.values, counted), wanted)
    assert wanted < 0.9 * exact


@pytest.mark.parametrize(
    "name",
    ["llama-linear-rope-no-groups-fp16", "gemma3-two-ropes"],  # the other stores norms less one, and a list of layers
)
def test_a_student_is_the_checkpoint_that_it_writes(script, name, exported, tmp_path):
    folder, ids = exported(name), torch.from_numpy(np.random.default_rng(1).integers(0, 96, (2, 12)))
    manifest = script.read_export(folder)
    teacher, student, values = script.cut(folder, manifest, 1)
    before = script.feed(teacher, ids, 0, teacher.empty_caches(2, 12))[0]
    with torch.no_grad():
        for weight in (*student.model.layers.parameters(), *student.model.norm.parameters()):
            weight += torch.randn(weight.shape, generator=torch.manual_seed(0)) / 16
            weight.copy_(weight.half() if "fp16" in name else weight)
    dtype = script.DTYPES.get(manifest.source.dtype, torch.bfloat16)
    script.write_checkpoint(tmp_path, student, values, folder, dtype)
    wanted = script.feed(student, ids, 0, student.empty_caches(2, 12))[0]
    written = random_checkpoints().Reference(tmp_path)(ids.numpy())
    np.testing.assert_allclose(written, wanted, rtol=0, atol=LOGIT_TOLERANCE)
    assert torch.equal(script.feed(teacher, ids, 0, teacher.empty_caches(2, 12))[0], before)  # shares no trained weight


@pytest.mark.parametrize(
    ("name", "count", "error"),
    [
        ("llama-biases", 2, UsageError),  # has no more layers
        ("lfm2-short-convolutions", 1, CheckpointError),  # states
        ("mixtral-experts", 1, CheckpointError),
        ("gpt2-scale-by-layer", 1, CheckpointError),  # stores layers in a way of its own
    ],
)
def test_teachers_whose_layers_make_no_student_are_refused(script, name, count, error, exported):
    folder = exported(name)
    with pytest.raises(error):
        script.cut(folder, script.read_export(folder), count)


def test_layers_that_differ_by_their_number_are_refused(script, exported, tmp_path):
    whole = exported("smollm3-every-second-layer-rotated", num_hidden_layers=4)
    folder = Path(shutil.copytree(whole, tmp_path / "export"))
    script.cut(folder, script.read_export(folder), 3)  # the config lists which layers are rotated
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["no_rope_layers"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError):
        script.cut(folder, script.read_export(folder), 3)
