"""Samples of one request: one prefill for all, each with its own draws, the best of them first where that is asked."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmc.runtime.api.request import Request
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sessions import Phase

PATIENCE = 120
PROMPT = [11 + i for i in range(40)]
# Sums of 8 float32 log-probabilities, taken here in float64.
LOGPROB_TOLERANCE = 1e-5

Alone = Callable[..., list[int]]


def sampled(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 1.0, "seed": 2**64 - 2, "ignore_eos": True, **more})


def run(engine: Any, params: SamplingParams, **more: Any) -> Any:
    return engine.submit(Request(PROMPT, params, **more)).result(PATIENCE)


def prefilled(session: Any) -> int:
    """Tokens that calls of prefill computed."""
    return sum(batch.input_ids.size for batch in session.calls if batch.phase is Phase.PREFILL)


@pytest.mark.parametrize(("n", "max_batch"), [(2, 8), (8, 8), (5, 4)])
def test_samples_share_one_prefill_and_draw_from_seeds_of_their_own(make_engine, remembering, alone, n, max_batch):
    session = remembering()
    result = run(make_engine(session, max_batch=max_batch), params := sampled(n=n))
    assert [list(output.token_ids) for output in result.outputs] == [alone(PROMPT, params, i) for i in range(n)]
    assert [output.index for output in result.outputs] == list(range(n))
    assert [output.seed for output in result.outputs] == [(2**64 - 2 + i) % 2**64 for i in range(n)]
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(PROMPT), 8 * n)
    if n <= max_batch:
        assert prefilled(session) == len(PROMPT)
        assert max(len(batch.input_ids) for batch in session.calls) == n


@pytest.mark.threat("many-samples")
def test_samples_that_end_at_once_take_turns_with_others(make_engine):
    """Nobody waits until a thousand of them are drawn: in one step they are no more than there are rows."""
    came: list[str] = []
    engine = make_engine(max_batch=4)
    beside = engine.submit(Request([5], sampled(max_tokens=200), on_delta=lambda _: came.append("beside")))
    many = engine.submit(Request(PROMPT, sampled(max_tokens=1, n=200), on_delta=lambda _: came.append("many")))
    assert len(many.result(PATIENCE).outputs) == 200
    beside.result(PATIENCE)
    assert max(map(len, "".join("m" if name == "many" else " " for name in came).split())) <= 4 + 1


def test_the_best_of_several_are_those_with_the_highest_mean_log_probability(make_engine, remembering, alone):
    params = sampled(n=2, best_of=6)
    result = run(make_engine(), params)
    session, means = remembering(), []
    for i in range(6):
        tokens, total = alone(PROMPT, params, i), 0.0
        for j, token in enumerate(tokens):
            logits = session.logits([*PROMPT, *tokens[:j]]).astype(np.float64)
            total += logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        means.append(total / len(tokens))
    best = sorted(range(6), key=lambda i: -means[i])[:2]
    assert [output.index for output in result.outputs] == best
    assert (
        np.abs(np.array([output.score for output in result.outputs]) - np.array(means)[best]).max() < LOGPROB_TOLERANCE
    )
    assert [list(output.token_ids) for output in result.outputs] == [alone(PROMPT, params, i) for i in best]
    assert all(output.logprobs is None for output in result.outputs)
    assert result.usage.completion_tokens == 48
    assert abs(means[best[0]] - means[best[1]]) > 10 * LOGPROB_TOLERANCE  # another order would be noticed


def test_a_fork_that_copies_another_row_is_noticed(make_engine, remembering, alone):
    """The planted error: samples that begin with something else than the prompt."""

    class Crossing(remembering.cache_type):  # type: ignore[misc]
        def copy(self, source: int, target: int, start: int, end: int) -> None:
            super().copy(source, target, start, end)
            self[target, start] += 1

    class Crossed(remembering):  # type: ignore[misc]
        cache_type = Crossing

    result = run(make_engine(Crossed()), params := sampled(n=3))
    assert [list(output.token_ids) for output in result.outputs] != [alone(PROMPT, params, i) for i in range(3)]
