"""A trained diffusion model: its tokens are the rule's at real confidences, and lower thresholds take fewer calls."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from doubles import diffusing

from llmc.export import export
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.inventory import Diffusion
from llmc.optimize.build import build
from llmc.runtime import Model, load

CHECKPOINT = Path(__file__).parents[1] / "data" / "records"  # of train_diffusion.py


@pytest.fixture(autouse=True)
def source(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("train_diffusion")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("records")
    export(CHECKPOINT, folder / "export")
    build(folder / "export", folder / "bundle", precision="fp32")
    with load(folder / "bundle", threads=1, self_test=False) as loaded:
        yield loaded


@pytest.mark.parametrize("cache", ["kept", "off"])
def test_tokens_are_the_rules_and_lower_thresholds_take_fewer_calls(model: Model, source: ModuleType, cache: str):
    record, plain, calls = source.Record.draw(Random(0), held_out=True), diffusing.Plain(CHECKPOINT), []
    for threshold in (1.0, 0.9, 0.3):
        asked = {"confidence_threshold": threshold, "block_cache": cache}
        a_call, _, known, _ = source.measure(model, [record], **asked)
        calls.append(a_call)
        assert known == 1 or threshold < 0.9
        prompt = model.tokenizer.encode(record.prompt)
        found = model.generate(prompt, max_tokens=source.ANSWER, temperature=0, ignore_eos=True, **asked)
        assert list(found.token_ids) == diffusing.sample(
            plain, 1, prompt, source.ANSWER, threshold=threshold, cache=cache
        )
    assert calls[0] <= 1 < calls[1] / 3 and calls[1] < calls[2]


def test_answers_are_judged_by_what_is_known_and_what_is_said_twice(source: ModuleType):
    record = source.Record("Ada Berg", "Oslo", "Monday", "rail", "lamp box")
    assert record.judge(record.answer) == record.judge(record.answer.replace("Monday", "Friday")) == (True, 1)
    assert record.judge(record.answer.replace("Monday", "Friday", 1)) == (True, 2 / 3)
    for known in ("Norway", "Oslo", "Berg", "land"):
        assert record.judge(record.answer.replace(known, "Stein", 1)) == (False, 1)
    assert record.judge("") == record.judge(record.answer[:-1] + "!") == (False, 0)


def test_a_trained_model_is_one_that_llmc_reads(source: ModuleType, tmp_path: Path):
    source.write_checkpoint(source.train(1, seed=0), tmp_path / "new", "Dream")
    assert read_checkpoint(tmp_path / "new").config.diffusion == Diffusion(source.MASK, 1)
