"""Samples of one request: how they share its prompt; and consensus: the one most like the others comes first."""

from typing import Any

import pytest

from llmc.runtime.api.request import Request
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.search.consensus import SIMILARITIES, Similarity

PATIENCE = 120
PROMPT = [11, 12, 13]


def run(engine: Any, **more: Any) -> Any:
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=5, n=5, ignore_eos=True, **more)
    return engine.submit(Request(PROMPT, params)).result(PATIENCE)


@pytest.mark.parametrize("name", ["f1", "chrf"])
def test_outputs_come_by_their_mean_similarity_to_all(make_engine, name):
    outputs = run(make_engine(), consensus=name).outputs
    texts = [output.text for output in sorted(outputs, key=lambda output: output.index)]
    scores = [sum(SIMILARITIES[name](text, other) for other in texts) / 5 for text in texts]
    assert [output.index for output in outputs] == sorted(range(5), key=lambda i: -scores[i])
    assert [output.score for output in outputs] == pytest.approx([scores[output.index] for output in outputs])
    assert sorted(output.index for output in outputs) == [0, 1, 2, 3, 4]


def test_a_comparison_that_takes_long_holds_nobody_up(make_engine, alone, monkeypatch):
    import threading

    release, entered = threading.Event(), threading.Semaphore(0)

    def slow(*_: str) -> float:
        entered.release()
        assert release.wait(2 * PATIENCE)
        return 0.0

    monkeypatch.setitem(SIMILARITIES, "f1", Similarity(str, slow))
    engine = make_engine()
    params = SamplingParams(max_tokens=3, temperature=1.0, seed=1, n=2, consensus="f1")
    ranked = [engine.submit(Request(PROMPT, params)) for _ in range(3)]
    assert entered.acquire(timeout=PATIENCE)
    try:
        plain = SamplingParams(max_tokens=9, temperature=1.0, seed=1, ignore_eos=True)
        handles = [engine.submit(Request([20 + i], plain)) for i in range(3)]
        for i, handle in enumerate(handles):
            assert list(handle.result(PATIENCE).token_ids) == alone([20 + i], plain)
    finally:
        release.set()
    assert all(len(handle.result(PATIENCE).outputs) == 2 for handle in ranked)


@pytest.mark.parametrize("tokens", [2, 5])
def test_more_samples_than_rows_feed_the_prompt_once(make_engine, alone, tokens):
    """All rows of a round end in the same step, and nobody else holds the prompt."""
    engine = make_engine(max_batch=4)
    params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=5, n=21, ignore_eos=True)
    result = engine.submit(Request(PROMPT, params)).result(PATIENCE)
    assert [list(output.token_ids) for output in result.outputs] == [alone(PROMPT, params, i) for i in range(21)]
    assert engine.metrics.snapshot().step["prefill"].count == 1


def test_whoever_waits_first_gets_the_row_of_a_sample_that_ends(make_engine, alone):
    engine = make_engine(max_batch=2)
    params = SamplingParams(max_tokens=3, temperature=1.0, seed=5, n=40, ignore_eos=True)
    urgent = SamplingParams(max_tokens=3, temperature=1.0, seed=6, ignore_eos=True)
    handle = engine.submit(Request(PROMPT, params))
    next(handle.events(PATIENCE))
    other = engine.submit(Request([20, 21], urgent, priority=-1000))
    assert list(other.result(PATIENCE).token_ids) == alone([20, 21], urgent)
    outputs = handle.result(PATIENCE).outputs
    assert [list(output.token_ids) for output in outputs] == [alone(PROMPT, params, i) for i in range(40)]
