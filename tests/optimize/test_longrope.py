"""Longrope goes the whole way: short texts have their factors and long ones theirs, token by token as transformers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles import encoders
from doubles.modules import random_checkpoints
from doubles.speculators import Always

from llmc.bundle import read_bundle
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.build import build
from llmc.optimize.judge.reference import Reference
from llmc.optimize.recipe import BuildRequest
from llmc.runtime import Model, Request, SamplingParams, load
from llmc.runtime.engine.scheduler import Scheduler

# As of the other families: sums run in another order. The other factors cost more than 1.
LOGIT_TOLERANCE = 4e-4
ORIGINAL, NEW = 48, 16
GREEDY: dict[str, Any] = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
GENERATOR = np.random.default_rng(3)
# Texts that end short, end with the last short token, become long on the way, and are long from the start.
LENGTHS = (8, 32, 40, 47, 48, 49, 70)
PROMPTS = {length: GENERATOR.integers(2, 94, length).tolist() for length in LENGTHS}
ROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.0, 1.05, 1.2, 1.3, 1.4, 1.5, 1.6],
    "long_factor": [1.0, 1.3, 1.9, 2.6, 4.0, 5.5, 7.1, 9.8],
}


class Longrope:
    """A random Phi-3 with its export and bundle, and transformers running it."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.folder = factory.mktemp("longrope")
        changes = {"sliding_window": None, "original_max_position_embeddings": ORIGINAL, "rope_scaling": ROPE}
        self.case = random_checkpoints().make_case("phi3-packed-window-fp16", factory, **changes, dtype="float32")
        self.bundle = self.build("bundle")
        self.answers = {length: self.answer(prompt) for length, prompt in PROMPTS.items()}

    def build(self, name: str, **changes: Any) -> Path:
        build(
            BuildRequest(
                self.case.export,
                self.folder / name,
                **{"precision": "fp32", "max_context": 128, "max_batch": 4} | changes,
            )
        )
        return self.folder / name

    def answer(self, prompt: list[int], tokens: int = NEW) -> tuple[int, ...]:
        """What transformers generates, which drops its cache where a text outgrows the original positions."""
        ids, options = torch.tensor([prompt]), {"do_sample": False, "eos_token_id": [], "pad_token_id": 0}
        found = self.case.reference.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options
        )
        return tuple(found[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Longrope:
    return Longrope(tmp_path_factory)


@pytest.fixture
def open_model(longrope: Longrope) -> Iterator[Callable[..., Model]]:
    models: list[Model] = []

    def make(**options: Any) -> Model:
        models.append(load(longrope.bundle, **options))
        return models[-1]

    yield make
    for model in models:
        model.close()


OPTIONS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks of 16 tokens": {"prefill_chunk": 16},
    "strict": {"determinism": "strict", "prefill_chunk": 16},
    "drafts": {"draft": "lookup"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_answers_are_those_of_transformers_on_both_sides_and_across(longrope, open_model, name):
    model = open_model(**OPTIONS[name])
    found = {length: model.generate(prompt, **GREEDY).token_ids for length, prompt in PROMPTS.items()}
    assert found == longrope.answers


def test_rows_on_different_sides_share_calls(longrope, open_model):
    model = open_model()
    handles = {length: model.submit(Request(prompt, SamplingParams(**GREEDY))) for length, prompt in PROMPTS.items()}
    assert {length: handle.result().token_ids for length, handle in handles.items()} == longrope.answers
    several = model.generate(PROMPTS[40], **GREEDY | {"temperature": 1.0, "seed": 5}, n=3)
    for output in several.outputs:  # each crosses, and the rows of the others stay as they are
        alone = model.generate(PROMPTS[40], **GREEDY | {"temperature": 1.0, "seed": output.seed})
        assert alone.token_ids == output.token_ids


def test_wrong_drafts_change_nothing_where_a_text_switches(longrope, open_model, monkeypatch):
    """Some are right: up to the last token before a text switches, and beyond it."""
    texts = {length: [*prompt, *longrope.answers[length]] for length, prompt in PROMPTS.items()}

    def propose(self: Any, key: int, tokens: list[int], count: int) -> list[int]:
        text = next(text for text in texts.values() if text[: len(tokens)] == list(tokens))
        return [*text[len(tokens) :][: count - len(tokens) % 2], 7][:count]

    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)
    monkeypatch.setattr("llmc.runtime.speculation.drafters.PromptLookup.propose", propose)
    model = open_model(draft="lookup")
    found = {length: model.generate(prompt, **GREEDY).token_ids for length, prompt in PROMPTS.items()}
    assert found == longrope.answers


def test_a_cached_prefix_keeps_the_factors_that_it_was_computed_with(longrope, open_model):
    model = open_model(prefix_cache_bytes=1 << 24)
    start = GENERATOR.integers(2, 94, 36).tolist()
    turns = [start, [*start, 5, 7], [*start, *range(2, 40)], [*start, *range(2, 60)], [*start, 9]]
    cached = []
    for prompt in turns:
        result = model.generate(prompt, **{**GREEDY, "max_tokens": 4})
        assert result.token_ids == longrope.answer(prompt, 4)
        cached.append(result.metrics.cached_tokens if result.metrics else 0)
    assert [bool(count) for count in cached] == [False, True, False, True, True]


def test_a_text_that_is_fed_on_with_the_factors_of_short_ones_would_be_noticed(longrope, open_model, monkeypatch):
    model = open_model()
    monkeypatch.setattr(Scheduler, "_is_long", lambda self, sequence: False)
    found = {length: model.generate(prompt, **GREEDY).token_ids for length, prompt in PROMPTS.items()}
    assert [length for length in LENGTHS if found[length] != longrope.answers[length]] != []


def test_beams_have_the_factors_of_the_longest_text_that_they_may_become(longrope, open_model):
    """Rows of branches are shared, so none of them switches on the way."""
    model = open_model()
    short = model.generate(PROMPTS[32], max_tokens=NEW, num_beams=3, ignore_eos=True)
    ids = torch.tensor([PROMPTS[32]])
    options = {"do_sample": False, "eos_token_id": [1000], "pad_token_id": 0, "num_beams": 3}
    reference = longrope.case.reference.model.generate(ids, max_new_tokens=NEW, **options)
    assert short.token_ids == tuple(reference[0, 32:].tolist())
    assert model.generate(PROMPTS[40], max_tokens=NEW, num_beams=3, ignore_eos=True).token_ids


def test_the_references_of_builds_switch_too(longrope):
    reference, decoder = Reference(longrope.case.export), StreamedDecoder(longrope.case.export)
    texts = [GENERATOR.integers(2, 94, length).tolist() for length in (ORIGINAL, ORIGINAL + 1, 10)]
    for text, logits in zip(texts, map(reference.project, reference.compute_normed(texts)), strict=True):
        expected = longrope.case.reference(np.array([text]))[0]
        assert np.abs(logits - expected).max() <= LOGIT_TOLERANCE
        x = decoder.embed(torch.tensor([text]))
        for index in range(decoder.geometry.layers):
            x, _ = decoder.run(decoder.layer(index), x)
        streamed = decoder.norm()(x)[0] @ decoder.rows(decoder.head).t()
        assert np.abs(streamed.numpy() - expected).max() <= LOGIT_TOLERANCE


def test_a_context_of_short_texts_has_their_factors_alone(longrope):
    bundle = longrope.build("short", max_context=ORIGINAL)
    assert read_bundle(bundle).geometry.long_after == 0
    with load(bundle) as model:
        found = model.generate(PROMPTS[8], **GREEDY).token_ids
    assert found == longrope.answers[8]


def test_embedders_have_the_factors_of_their_longest_text(tmp_path):
    folder = encoders.write_embedder(tmp_path)
    values = json.loads((folder / "config.json").read_text())
    pairs = values["head_dim"] // 2
    for original, last in ((16, 5.0), (values["max_position_embeddings"], 1.0)):
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original}
        rope |= {"short_factor": [1.0] * pairs, "long_factor": [1.0] * (pairs - 1) + [5.0]}
        (folder / "config.json").write_text(json.dumps({**values, "rope_parameters": rope}))
        config = read_checkpoint(folder).config
        assert (config.geometry.long_after, config.ropes[0].factors[-1]) == (0, last)
