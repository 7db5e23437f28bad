"""A second model as drafter: on bundles of the small model, which drafts for itself."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.bundle import BUNDLE_MANIFEST, TOKENIZER_FILE
from llmc.errors import DraftError
from llmc.runtime import Model, load
from llmc.runtime.sessions import Batch
from llmc.runtime.speculation.model_drafter import ModelDrafter, check_same_tokenizer

PROMPTS = [
    "def add(a, b):\n    return",
    "import os\n\nfor name in os.listdir(",
    "class Point:\n    def __init__(self, x",
]
NEW = 24


@pytest.fixture(scope="module")
def drafting_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that is drafted for, with two rows."""
    folder = shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("draft") / "int8")
    content = json.loads((folder / BUNDLE_MANIFEST).read_text(encoding="utf-8"))
    content["limits"]["max_batch"] = 2
    (folder / BUNDLE_MANIFEST).write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def target(tiny_bundle: Path) -> Iterator[Model]:
    with load(tiny_bundle, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def texts(target: Model) -> list[tuple[list[int], list[int]]]:
    """Prompts and what the model greedily answers."""
    prompts = [target.tokenizer.encode(prompt) for prompt in PROMPTS]
    answers = [target.generate(p, max_tokens=NEW, temperature=0.0, ignore_eos=True).token_ids for p in prompts]
    return [(prompt, list(answer)) for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.fixture
def draft(drafting_bundle: Path) -> Iterator[Model]:
    with load(drafting_bundle, threads=1, self_test=False) as model:
        yield model


@pytest.fixture
def drafter(draft: Model, target: Model) -> ModelDrafter:
    return ModelDrafter(draft, target)


Calls = list[tuple[str, int, int, int]]


@pytest.fixture
def calls(draft: Model, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Phase, row, past and new tokens of each call of the draft model."""
    seen: Calls = []
    run = draft.runner.session.run

    def recorded(batch: Batch) -> np.ndarray:
        seen.append((batch.phase.value, batch.first_row, int(batch.past_lengths[0]), batch.input_ids.shape[1]))
        return run(batch)

    monkeypatch.setattr(draft.runner.session, "run", recorded)
    return seen


def test_a_model_that_drafts_for_itself_is_always_right(drafter, texts):
    for key, (prompt, answer) in enumerate(texts):
        for start in (0, 1, 5, 6, 8, 16):  # by steps, by what was drafted, and further than that
            tokens = prompt + answer[:start]
            assert drafter.propose(key, tokens, 4) == answer[start : start + 4]
        drafter.forget(key)


def test_rejected_drafts_leave_no_trace(drafter, texts):
    prompt, answer = texts[0]
    other = [(token + 1) % 4096 for token in answer]
    for n in range(4):
        assert drafter.propose(0, prompt + other[:n], 6) == fresh(drafter, prompt, other[:n])


def fresh(drafter: ModelDrafter, prompt: list[int], answer: list[int]) -> list[int]:
    """Drafts for a sequence that was never seen, read as the drafter reads one: the prompt at once, and then steps."""
    key = 99
    for end in range(len(answer)):
        drafter.propose(key, prompt + answer[:end], 1)
    found = drafter.propose(key, prompt + answer, 6)
    drafter.forget(key)
    return found


def test_it_reads_only_what_it_has_not_seen(drafter, calls, texts):
    prompt, answer = texts[0]
    n = len(prompt)
    drafter.propose(0, prompt, 3)
    assert calls == [("prefill", 0, 0, n), ("decode", 0, n, 1), ("decode", 0, n + 1, 1)]
    calls.clear()
    drafter.propose(0, prompt + answer[:4], 1)  # all three were right, and the last one was never fed
    assert calls == [("decode", 0, n + 2, 1), ("decode", 0, n + 3, 1)]
    calls.clear()
    drafter.propose(0, prompt + answer[:12], 1)
    assert calls == [("prefill", 0, n + 4, 8)]
    calls.clear()
    drafter.propose(0, prompt + answer[:12], 1)  # once more
    assert calls == [("decode", 0, n + 11, 1)]


def test_sequences_have_rows_of_their_own(drafter, calls, texts):
    for start in (0, 1, 2):
        for key in (0, 1):
            prompt, answer = texts[key]
            assert drafter.propose(key, prompt + answer[:start], 3) == answer[start : start + 3]
    assert {row for _, row, _, _ in calls} == {0, 1}
    assert sum(phase == "prefill" for phase, *_ in calls) == 2


def test_the_row_that_was_idle_longest_makes_room(drafter, calls, texts):
    for key in (0, 1, 0, 2, 0, 1):
        prompt, answer = texts[key]
        assert drafter.propose(key, prompt, 3) == answer[:3]
    prefilled = [past for phase, _, past, _ in calls if phase == "prefill"]
    assert prefilled == [0, 0, 0, 0]  # 0, 1, 2 in the place of 1, and 1 in the place of 2


def test_it_drafts_to_the_end_of_its_context_and_no_further(drafting_bundle, target):
    with load(drafting_bundle, threads=1, max_context=32, self_test=False) as model:
        drafter = ModelDrafter(model, target)
        tokens = list(range(100, 130))
        assert len(drafter.propose(0, tokens, 8)) == 3  # two are fed, and the third is known then
        assert len(drafter.propose(0, [*tokens, 1, 2], 8)) == 1
        assert drafter.propose(0, [*tokens, 1, 2, 3], 8) == []


class Other:
    """A bundle like another but for its files."""

    def __init__(self, like: Model, folder: Path) -> None:
        self.folder = folder
        self.manifest = replace(like.manifest, files={})
        self.tokenizer = like.tokenizer


@pytest.fixture
def other(target: Model, tmp_path: Path) -> Other:
    shutil.copy(target.folder / TOKENIZER_FILE, tmp_path)
    return Other(target, tmp_path)


def rewrite(folder: Path, text: str, new: str) -> None:
    path = folder / TOKENIZER_FILE
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary[new] = vocabulary.pop(text)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_token_with_another_text_is_refused_by_name(target, other):
    vocabulary = json.loads((other.folder / TOKENIZER_FILE).read_text(encoding="utf-8"))["model"]["vocab"]
    text = next(text for text, token in vocabulary.items() if token == 1000)
    rewrite(other.folder, text, "changed")
    with pytest.raises(DraftError, match=r"another tokenizer.*expected the same.*token 1000 is 'changed', there"):
        check_same_tokenizer(other, target)


def test_other_special_tokens_are_refused(target, other):
    from llmc.runtime.text.tokenizer import Tokenizer

    other.tokenizer = Tokenizer.from_folder(target.folder)
    other.tokenizer.special_tokens["eos_token"] = "<|other|>"
    with pytest.raises(DraftError, match=r"eos_token is '<\|other\|>', there"):
        check_same_tokenizer(other, target)
