"""Samples of one request: how they share its prompt; and consensus: the one most like the others comes first."""

from typing import Any

import pytest

from llmc.errors import ProcessorError
from llmc.runtime.api.request import Request
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.search.consensus import SIMILARITIES

PATIENCE = 120
PROMPT = [11, 12, 13]


def run(engine: Any, similarity: Any = None, **more: Any) -> Any:
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=5, n=5, ignore_eos=True, **more)
    return engine.submit(Request(PROMPT, params, similarity=similarity)).result(PATIENCE)


@pytest.mark.parametrize("name", ["f1", "chrf"])
def test_outputs_come_by_their_mean_similarity_to_all(make_engine: Any, name: Any):
    outputs = run(make_engine(), consensus=name).outputs
    texts = [output.text for output in sorted(outputs, key=lambda output: output.index)]
    scores = [sum(SIMILARITIES[name](text, other) for other in texts) / 5 for text in texts]
    assert [output.index for output in outputs] == sorted(range(5), key=lambda i: -scores[i])
    assert [output.score for output in outputs] == pytest.approx([scores[output.index] for output in outputs])
    assert sorted(output.index for output in outputs) == [0, 1, 2, 3, 4]


def test_a_similarity_of_the_requests_own_decides(make_engine: Any):
    engine = make_engine()
    plain = run(engine).outputs
    assert [output.index for output in plain] == [0, 1, 2, 3, 4]
    assert {output.score for output in plain} == {None}
    favourite = plain[3].text
    outputs = run(engine, lambda text, _: float(text == favourite)).outputs
    assert (outputs[0].text, outputs[0].score) == (favourite, 1.0)
    assert [output.index for output in outputs] == [3, 0, 1, 2, 4]


@pytest.mark.parametrize(
    ("similarity", "message"),
    [
        (lambda *_: 1 / 0, "the similarity raised ZeroDivisionError"),
        (lambda *_: None, "the similarity returned None, expected a finite number"),
        (lambda *_: float("nan"), "the similarity returned nan"),
    ],
)
def test_a_similarity_that_fails_ends_its_request_alone(make_engine: Any, alone: Any, similarity: Any, message: str):
    engine = make_engine()
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=1, ignore_eos=True)
    other = engine.submit(Request([20], params))
    with pytest.raises(ProcessorError, match=message):
        run(engine, similarity)
    assert list(other.result(PATIENCE).token_ids) == alone([20], params)
    assert engine.metrics.snapshot().requests["error"] == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_a_similarity_that_takes_long_holds_nobody_up(make_engine: Any, alone: Any, threads: int):
    """Not even who samples on several threads."""
    import threading

    release, entered = threading.Event(), threading.Semaphore(0)

    def slow(*_: str) -> float:
        entered.release()
        assert release.wait(2 * PATIENCE)
        return 0.0

    engine = make_engine(sampling_threads=threads)
    params = SamplingParams(max_tokens=3, temperature=1.0, seed=1, n=2)
    ranked = [engine.submit(Request(PROMPT, params, similarity=slow)) for _ in range(3)]
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
