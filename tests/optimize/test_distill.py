"""A student learns what its teacher says, the same after an interruption, and drafts for it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.errors import CheckpointError, UsageError
from llmc.export import export
from llmc.export.student import Student
from llmc.optimize import distill as room
from llmc.optimize.build import build
from llmc.runtime import load

# Of log-probabilities, which are kept in 16 bits, down to -16.
LOG_TOLERANCE = 2e-2
SMALL = {"PROMPT": 8, "LENGTH": 24, "PIECE": 4, "GROWTH": 8, "TOP": 12, "ROWS": 4, "STEPS": 2, "BATCH": 2, "AT_ONCE": 1}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(room, name, value)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prompts.txt"
    path.write_text((Path(room.__file__).parents[1] / "recipes" / "tiny" / "validation.txt").read_text()[:4000])
    return path


@pytest.fixture
def run(tiny_export: Path, text: Path, tmp_path: Path):
    """Distills two of the small model's six layers into a folder of a name."""

    def distill(name: str, **options) -> room.DistillReport:
        asked = {"student": 2, "text": text, "open_pair": Student, **options}
        return room.distill(tiny_export, tmp_path / name, **asked)

    return distill


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_an_interrupted_run_comes_to_the_same_student(run, tmp_path: Path):
    def stop(step: str, fraction: float | None = None) -> None:
        if step.startswith("step 3"):
            raise KeyboardInterrupt

    whole = run("whole", steps=5)
    with pytest.raises(KeyboardInterrupt):
        run("parts", steps=5, progress=stop)
    assert not (tmp_path / "parts" / "config.json").exists()
    assert run("parts", steps=3).steps == 3
    early = weights(tmp_path / "parts")
    parts = run("parts", steps=5)
    assert (parts.layers, parts.steps, parts.tokens) == ((0, 5), 5, 3 * 4 * 16)
    assert (parts.before, parts.after) == (whole.before, whole.after)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole") != early
    run("other", steps=5, seed=1)
    assert weights(tmp_path / "other") != weights(tmp_path / "whole")


def test_a_student_that_learned_drafts_for_its_teacher(run, tiny_bundle: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(room, "ROWS", 16)
    cut = run("draft", narrow=True, minutes=1e-9)  # over before the first step
    assert (cut.steps, cut.after) == (0, cut.before)
    report = run("draft", narrow=True, steps=40)
    assert report.after > report.before
    export(tmp_path / "draft", tmp_path / "export")
    build(tmp_path / "export", tmp_path / "bundle", max_context=128)
    with load(tiny_bundle) as plain, load(tiny_bundle, draft=str(tmp_path / "bundle")) as drafted:
        asked = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
        assert drafted.generate("import os\n", **asked).text == plain.generate("import os\n", **asked).text


def test_texts_are_what_the_teacher_says(tiny_export: Path, tiny_checkpoint: Path):
    from transformers import AutoModelForCausalLM

    teacher = Student(tiny_export, 1, "cpu").teacher
    prompts = torch.from_numpy(np.random.default_rng(0).integers(3, 4096, (3, 8)))
    stop = int(room.write_texts(teacher, prompts, np.zeros(3), torch.tensor([0]), np.random.default_rng(0))[0][0, 12])
    heat, stops = np.array([0.0, 0.0, 1.0]), torch.tensor([stop])
    ids, tokens, logs, counted = room.write_texts(teacher, prompts, heat, stops, np.random.default_rng(0))
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


def test_divergence_is_that_of_all_tokens_with_the_rest_as_one():
    generator = torch.manual_seed(0)
    teacher, student = (torch.randn(2, 3, 40, generator=generator) for _ in range(2))
    logs, counted = teacher.log_softmax(-1), torch.tensor([[True, True, False], [True, False, False]])
    whole = torch.nn.functional.kl_div(student.log_softmax(-1), logs, log_target=True, reduction="none").sum(-1)
    everything = torch.arange(40).expand(2, 3, -1)
    found = room.divergence(student, everything, logs, counted)
    torch.testing.assert_close(found, whole[counted].sum(), rtol=1e-3, atol=1e-4)
    kept = logs.topk(5)
    merged = [
        torch.cat((logs_of.gather(-1, kept.indices).exp(), torch.zeros(2, 3, 1)), -1)
        for logs_of in (logs, student.log_softmax(-1))
    ]
    for each in merged:
        each[..., -1] = 1 - each.sum(-1)
    wanted = (merged[0] * (merged[0] / merged[1]).log()).sum(-1)[counted].sum()
    torch.testing.assert_close(room.divergence(student, kept.indices, kept.values, counted), wanted)
    assert wanted < 0.9 * found


def test_other_folders_arguments_and_short_texts_are_refused_before_work(run, tmp_path: Path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="own exists, and no distillation made it"):
        run("own", steps=1)
    (tmp_path / "short.txt").write_text("import os\n")
    with pytest.raises(UsageError, match=r"is too short: .* give a longer one$"):
        run("new", steps=1, text=tmp_path / "short.txt")
    assert not (tmp_path / "new").exists()
    run("begun", steps=1)
    with pytest.raises(UsageError, match="begun was begun with another value of narrow and seed; go on with that"):
        run("begun", steps=2, narrow=True, seed=1)
    state = tmp_path / "begun" / room.RUN / room.STATE
    for broken in (b"", b"torch", state.read_bytes()[:999]):
        state.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"state.pt is broken; remove .*begun and begin anew"):
            run("begun", steps=2)
