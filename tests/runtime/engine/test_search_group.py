"""Beams on rows of the cache, beside other requests: they give what they give alone."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.runtime import load
from llmc.runtime.api.request import Request
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.search.beam import BeamSearch, Hypothesis

PATIENCE = 120
PROMPT = [11, 12, 13, 14, 15]
NEW = 9
# Two implementations of a float32 model, sums of NEW log-probabilities each.
SCORE_TOLERANCE = 2e-4
# Two float32 implementations; logits agree to about 1e-5.
LOGPROB_TOLERANCE = 1e-4

BEAMS: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.5},
    {"num_beams": 2, "early_stopping": True, "num_return_sequences": 2},
]


def driven(session: Any, strategy: BeamSearch, prompt: list[int]) -> list[Hypothesis]:
    """A strategy whose rows are lists of tokens: no cache, no engine."""
    rows = [prompt]
    branches = strategy.start(prompt, session.logits(prompt))
    while branches:
        rows = [[*rows[branch.parent], branch.token] for branch in branches]
        branches = strategy.step(np.stack([session.logits(row) for row in rows]))
    return strategy.outputs()


def beam_search(options: dict[str, Any], eos: tuple[int, ...] = (0, 2)) -> BeamSearch:
    return BeamSearch(max_tokens=NEW, eos_token_ids=eos, **options)


def beams(options: dict[str, Any], **more: Any) -> Request:
    return Request(PROMPT, SamplingParams(max_tokens=NEW, **options), **more)


def found(result: Any) -> list[tuple[tuple[int, ...], float | None, str]]:
    return [(output.token_ids, output.score, output.finish_reason) for output in result.outputs]


def expected(hypotheses: list[Hypothesis]) -> list[tuple[tuple[int, ...], float, str]]:
    return [(item.token_ids, item.score, item.finish_reason) for item in hypotheses]


@pytest.mark.parametrize("determinism", ["fast", "batch", "strict"])
@pytest.mark.parametrize("options", BEAMS, ids=str)
def test_beams_beside_others_are_those_of_beams_alone(make_engine, remembering, alone, options, determinism):
    engine = make_engine(prefill_chunk=2, determinism=determinism, prefix_bytes=1 << 20)
    sampled = SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
    others = [engine.submit(Request([20 + i, 21], sampled)) for i in range(3)]
    handles = [engine.submit(beams(options)) for _ in range(3)]
    wanted = expected(driven(remembering(), beam_search(options), PROMPT))
    assert [found(handle.result(PATIENCE)) for handle in handles] == [wanted] * 3
    assert [list(other.result(PATIENCE).token_ids) for other in others] == [
        alone([20 + i, 21], sampled) for i in range(3)
    ]


def test_beams_end_at_end_of_sequence_tokens_and_stop_tokens(make_engine, remembering):
    likely = [int(token) for token in np.argsort(-remembering().logits(PROMPT))[:3]]
    request = Request(
        PROMPT, SamplingParams(max_tokens=NEW, num_beams=3, length_penalty=0.0, stop_token_ids=tuple(likely[1:]))
    )
    wanted = driven(remembering(), beam_search({"num_beams": 3, "length_penalty": 0.0}, (0, 2, *likely[1:])), PROMPT)
    result = make_engine().submit(request).result(PATIENCE)
    assert found(result) == expected(wanted)
    assert result.finish_reason == "stop"
    assert result.stop_reason == result.token_ids[-1] in likely[1:]


def test_rows_for_all_beams_are_kept_free_from_the_start(make_engine, remembering):
    """Five requests hold a row each while their prompts are fed, and would fork into twenty where there are eight."""
    session = remembering()
    engine = make_engine(session, prefill_chunk=2, decode_steps_per_chunk=0)
    handles = [engine.submit(beams({"num_beams": 4})) for _ in range(5)]
    wanted = expected(driven(remembering(), beam_search({"num_beams": 4}), PROMPT))
    assert [found(handle.result(PATIENCE)) for handle in handles] == [wanted] * 5
    assert session.cache.rows <= 8


def test_strands_keep_their_order_when_rows_are_moved(make_engine, remembering):
    """A request in the first row ends, and the last beam takes its place."""
    engine = make_engine(prefill_chunk=2, decode_steps_per_chunk=0)
    wanted = expected(driven(remembering(), beam_search({"num_beams": 4}), PROMPT))
    for new in range(1, NEW + 5):
        short = engine.submit(Request([20], SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)))
        handle = engine.submit(beams({"num_beams": 4}))
        assert found(handle.result(PATIENCE)) == wanted
        assert len(short.result(PATIENCE).token_ids) == new


def test_a_fork_that_copies_too_little_is_noticed(make_engine, remembering):
    """The planted error: the last position of a copied row stays behind."""

    class Losing(remembering.cache_type):  # type: ignore[misc]
        def copy(self, source: int, target: int, start: int, end: int) -> None:
            super().copy(source, target, start, max(start, end - 1))

    class Lossy(remembering):  # type: ignore[misc]
        cache_type = Losing

    wanted = expected(driven(remembering(), beam_search({"num_beams": 4}), PROMPT))
    with pytest.raises(Exception, match=r"failed inside|reports"):
        assert found(make_engine(Lossy()).submit(beams({"num_beams": 4})).result(PATIENCE)) == wanted


@contextmanager
def reference(checkpoint: Path) -> Iterator[Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        yield model


TRANSFORMERS: list[dict[str, Any]] = [
    {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.8},
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True},
    {"num_beams": 4, "num_return_sequences": 2, "early_stopping": "never", "length_penalty": 2.0},
    {"num_beams": 3, "num_return_sequences": 3, "length_penalty": -1.0, "no_repeat_ngram_size": 2},
]


def test_beams_of_the_small_model_equal_those_of_transformers(tiny_in, tiny_checkpoint):
    import torch

    texts = ["def add(a, b):\n    return", "import os\nimport", "class Point:\n    def"]
    reasons = set()
    with load(tiny_in("fp32"), threads=1, self_test=False) as model, reference(tiny_checkpoint) as torch_model:
        answers = [model.generate(text, max_tokens=NEW, temperature=0, ignore_eos=True).token_ids for text in texts]
        ends = [answer[3] for answer in answers]  # tokens that some outputs end with, and others do not
        for text, options in itertools.product(texts, TRANSFORMERS):
            prompt = model.tokenizer.encode(text)
            outputs = model.generate(prompt, max_tokens=NEW, ignore_eos=True, stop_token_ids=ends, **options).outputs
            ids = torch.tensor([prompt])
            answer = torch_model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW,
                eos_token_id=ends,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
            for output, found, score in zip(outputs, answer.sequences, answer.sequences_scores, strict=True):
                tokens = found[len(prompt) :].tolist()
                assert tokens[: len(output.token_ids)] == list(output.token_ids)
                assert len({*tokens[len(output.token_ids) :]}) <= 1  # padding
                most = len(output.token_ids) ** options.get("length_penalty", 1.0)
                assert abs(output.score - float(score)) * most < SCORE_TOLERANCE
                reasons.add(output.finish_reason)
    assert reasons == {"stop", "length"}


def test_log_probabilities_of_the_small_model_are_those_of_transformers(tiny_in, tiny_checkpoint):
    import torch

    with load(tiny_in("fp32"), threads=1, self_test=False) as model, reference(tiny_checkpoint) as torch_model:
        prompt = model.tokenizer.encode("def add(a, b):\n    return a + b\n" * 4)
        model.generate(prompt, max_tokens=1)  # a prefix in the cache must not leave positions out
        result = model.generate(prompt, max_tokens=4, temperature=0, logprobs=3, prompt_logprobs=2, ignore_eos=True)
        ids = torch.tensor([[*prompt, *result.token_ids]])
        wanted = torch.log_softmax(torch_model(ids).logits[0].double(), -1).numpy()
    reported = [*result.prompt_logprobs, *result.outputs[0].logprobs]
    assert [item.token for item in reported] == ids[0, 1:].tolist()
    for position, item in enumerate(reported):
        top = 2 if position < len(prompt) - 1 else 3
        best = np.argsort(-wanted[position], kind="stable")[:top]
        assert [token for token, _ in item.top] == best.tolist()
        assert np.abs(np.array([value for _, value in item.top]) - wanted[position][best]).max() < LOGPROB_TOLERANCE
        assert abs(item.logprob - wanted[position][item.token]) < LOGPROB_TOLERANCE
    shifted = [abs(item.logprob - wanted[i + 1][item.token]) for i, item in enumerate(reported[:-1])]
    assert max(shifted) > 10 * LOGPROB_TOLERANCE  # the planted error: a position off by one
