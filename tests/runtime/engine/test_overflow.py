"""A context that is full: refused, cut on the left, or slid over sinks, as the request says and never silently."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from llmc.errors import RequestError
from llmc.runtime.api.request import Request
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import SamplingContext
from llmc.runtime.sampling.samplers import make_sampler

PATIENCE = 120
CONTEXT = 32
SINK = 4
KEPT = CONTEXT // 2
LONG = [(37 * i) % 4000 + 10 for i in range(50)]


def params(policy: str, max_tokens: int, seed: int | None = None, **more: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if seed is None else 1.0,
        seed=seed,
        on_overflow=policy,
        ignore_eos=True,
        **more,
    )


@pytest.fixture
def engine(make_engine: Any) -> Any:
    return make_engine(max_context=CONTEXT, prefill_chunk=8)


def run(engine: Any, prompt: Sequence[int], asked: SamplingParams) -> Any:
    return engine.submit(Request(prompt, asked)).result(PATIENCE)


def slid(
    logits_of: Callable[[list[int]], Any], prompt: list[int], asked: SamplingParams, index: int = 0
) -> tuple[list[int], int]:
    """The oracle: what a model says that sees the sinks and the recent half whenever the context was full.

    Tokens, and how many were left out of its sight. Xiao et al., https://arxiv.org/abs/2309.17453
    """
    cut, seen = 0, list(prompt)
    if len(prompt) >= CONTEXT:
        cut = len(prompt) - KEPT
        seen = prompt[:SINK] + prompt[-(KEPT - SINK) :]
    fed = list(seen)
    sampler = make_sampler(SamplingContext(asked, 4096, prompt_length=len(fed)), index)
    said: list[int] = []
    while len(said) < asked.max_tokens:
        if len(seen) > CONTEXT:
            cut += len(seen) - KEPT
            seen = seen[:SINK] + seen[-(KEPT - SINK) :]
        token = sampler(logits_of(seen), [*fed, *said]).token
        said.append(token)
        seen.append(token)
    return said, cut


def test_what_does_not_fit_is_refused_unless_the_request_says_otherwise(engine):
    no_room, too_many = rf"leaves no room in a context of {CONTEXT}", rf"13 new ones .* holds {CONTEXT}"
    for prompt, new, why in ((LONG, 1, no_room), (LONG[:CONTEXT], 1, no_room), (LONG[:20], 13, too_many)):
        with pytest.raises(RequestError, match=rf"prompt has {len(prompt)} tokens.* {why}"):
            engine.submit(Request(prompt, SamplingParams(max_tokens=new, temperature=0)))
    assert run(engine, LONG[:20], params("refuse", 12)).usage.truncated_tokens == 0


def test_the_last_position_of_the_context_is_used(engine, alone):
    for policy in ("refuse", "truncate_left", "sink"):
        result = run(engine, LONG[:20], params(policy, 12))
        assert list(result.token_ids) == alone(LONG[:20], params(policy, 12))
        assert (result.usage.truncated_tokens, result.metrics.overflows) == (0, 0)


@pytest.mark.parametrize(("length", "new"), [(50, 4), (32, 1), (30, 3), (50, 31)])
def test_truncation_on_the_left_leaves_room_for_the_answer(engine, alone, length, new):
    prompt, asked = LONG[:length], params("truncate_left", new, seed=4)
    result = run(engine, prompt, asked)
    kept = prompt[-(CONTEXT - new) :]
    assert list(result.token_ids) == alone(kept, asked)
    assert (result.usage.prompt_tokens, result.usage.truncated_tokens) == (len(kept), length - len(kept))


@pytest.mark.parametrize(("length", "new"), [(10, 24), (10, 80), (32, 5), (50, 70)])
@pytest.mark.parametrize("seed", [None, 8])
def test_a_full_context_slides_to_its_sinks_and_its_recent_half(engine, remembering, length, new, seed):
    prompt, asked = LONG[:length], params("sink", new, seed)
    result = run(engine, prompt, asked)
    tokens, cut = slid(remembering().logits, prompt, asked)
    assert list(result.token_ids) == tokens
    assert result.usage.truncated_tokens == cut
    assert (cut > 0) == (length >= CONTEXT or length + new > CONTEXT + 1)  # the last token is not fed


def test_a_context_that_does_not_slide_is_noticed(engine, alone, remembering):
    """The planted error: a model that sees everything says something else after the first slide, and not before."""
    asked = params("sink", 40)
    said, everything = run(engine, LONG[:10], asked).token_ids, alone(LONG[:10], asked)
    before = CONTEXT - 10 + 1
    assert list(said[:before]) == everything[:before]
    assert list(said[before:]) != everything[before:]


@pytest.mark.parametrize("determinism", ["fast", "batch", "strict"])
def test_sliding_beside_others_and_among_samples_changes_nothing(make_engine, remembering, alone, determinism):
    context = CONTEXT + (determinism == "strict")
    engine = make_engine(max_context=context, prefill_chunk=8, determinism=determinism, prefix_bytes=1 << 20)
    asked = params("sink", 40, seed=2, n=2)
    for _ in range(2):
        several = engine.submit(Request(LONG[:12], asked))
        others = [engine.submit(Request(LONG[i : i + 9], params("refuse", 20, seed=i))) for i in range(3)]
        for output in several.result(PATIENCE).outputs:
            tokens, cut = slid(remembering().logits, LONG[:12], asked, output.index)
            assert list(output.token_ids) == tokens
        assert several.result(PATIENCE).usage.truncated_tokens == 2 * cut
        assert several.result(PATIENCE).metrics.overflows > 0
        for i, other in enumerate(others):
            assert list(other.result(PATIENCE).token_ids) == alone(LONG[i : i + 9], params("refuse", 20, seed=i))
