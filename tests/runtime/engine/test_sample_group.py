"""Samples of one request, and how they share its prompt."""

from typing import Any

import pytest

from llmc.runtime.api.request import Request
from llmc.runtime.sampling.params import SamplingParams

PATIENCE = 120
PROMPT = [11, 12, 13]


@pytest.mark.parametrize("tokens", [2, 5])
def test_more_samples_than_rows_feed_the_prompt_once(make_engine: Any, alone: Any, tokens: int):
    """All rows of a round end in the same step, and nobody else holds the prompt."""
    engine = make_engine(max_batch=4)
    params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=5, n=21, ignore_eos=True)
    result = engine.submit(Request(PROMPT, params)).result(PATIENCE)
    assert [list(output.token_ids) for output in result.outputs] == [alone(PROMPT, params, i) for i in range(21)]
    assert engine.metrics.snapshot().step["prefill"].count == 1


def test_whoever_waits_first_gets_the_row_of_a_sample_that_ends(make_engine: Any, alone: Any):
    engine = make_engine(max_batch=2)
    params = SamplingParams(max_tokens=3, temperature=1.0, seed=5, n=40, ignore_eos=True)
    urgent = SamplingParams(max_tokens=3, temperature=1.0, seed=6, ignore_eos=True)
    handle = engine.submit(Request(PROMPT, params))
    next(handle.events(PATIENCE))
    other = engine.submit(Request([20, 21], urgent, priority=-1000))
    assert list(other.result(PATIENCE).token_ids) == alone([20, 21], urgent)
    outputs = handle.result(PATIENCE).outputs
    assert [list(output.token_ids) for output in outputs] == [alone(PROMPT, params, i) for i in range(40)]
