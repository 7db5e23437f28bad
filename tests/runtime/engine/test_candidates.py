"""A session that brings the largest logits only: the same tokens, and all logits where they are needed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from doubles.plans import PLAN

from llmc.bundle import Manifest
from llmc.runtime.api.options import EngineOptions
from llmc.runtime.api.request import Request
from llmc.runtime.engine.engine import Engine
from llmc.runtime.sampling.logits import suffice
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import Processor
from llmc.runtime.sessions import Batch, Phase

PATIENCE = 120
VOCAB = 4096
CANDIDATES = 32
PROMPT = [5, 17, 300, 41]
OTHERS = [[9, 8, 7], [100, 200, 300, 400, 500]]
ENGINE = replace(PLAN, select="select.plan", candidates=CANDIDATES)


class Reducing:
    """A session in front of another one: where candidates are asked for, it leaves all other logits out.

    Attributes:
        whole: how often all logits of a call were asked for after it.
        asked: candidates of every decode step.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._all = np.empty(0, np.float32)
        self.whole = 0
        self.asked: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, batch: Batch) -> np.ndarray:
        self._all = self._inner.run(batch)
        if batch.phase is Phase.DECODE:
            self.asked.append(batch.candidates)
        return reduced(self._all, batch.candidates) if batch.candidates else self._all

    def full_logits(self) -> np.ndarray:
        self.whole += 1
        return self._all


def reduced(logits: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` largest of every row, of equals any, and -inf elsewhere."""
    found = np.full_like(logits, -np.inf)
    order = np.argsort(logits, axis=-1)[..., ::-1][..., :count]
    np.put_along_axis(found, order, np.take_along_axis(logits, order, -1), -1)
    return found


def coarse(inner: Any, step: float) -> Any:
    """``inner`` with logits that are multiples of ``step``, so that many are equal."""
    logits = inner.logits
    inner.logits = lambda tokens: np.round(logits(tokens) / step) * np.float32(step)
    return inner


@pytest.fixture
def serve(remembering: Any, served: Manifest, tiny_tokenizer: Any) -> Callable[..., list[list[int]]]:
    """Serves requests on a session, and gives each one's tokens, of all of its outputs."""

    def tokens_of(session: Any, requests: Sequence[Request], **options: Any) -> list[list[int]]:
        engine = Engine(
            session,
            replace(served, engine=ENGINE),
            tiny_tokenizer,
            max_context=256,
            prefill_chunk=32,
            options=EngineOptions(**options),
            memory=1 << 40,
        )
        try:
            handles: list[Any] = []
            engine.call(lambda: handles.extend(engine.submit(request) for request in requests))
            results = [handle.result(PATIENCE) for handle in handles]
        finally:
            engine.close()
        return [[token for output in result.outputs for token in output.token_ids] for result in results]

    return tokens_of


# What candidates decide, and how many of them.
FEW: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({"temperature": 0.0}, 1),
    "top_k": ({"top_k": 8}, 8),
    "top_k, top_p, min_p": ({"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7}, 20),
    "several outputs": ({"top_k": 5, "n": 3}, 5),
    "top_k before another cut": ({"top_k": 12, "top_n_sigma": 1.0}, 12),
    "greedy with stops": ({"temperature": 0.0, "stop_token_ids": (4095,), "stop": ("never said",)}, 1),
}
# What all logits decide.
ALL: dict[str, dict[str, Any]] = {
    "plain": {},
    "min_p": {"min_p": 0.05},
    "more than there are": {"top_k": CANDIDATES + 1},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "best_of": {"top_k": 8, "n": 1, "best_of": 2},
    "repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.5},
    "bias": {"temperature": 0.0, "logit_bias": ((7, 50.0),)},
    "min_tokens": {"temperature": 0.0, "min_tokens": 4, "ignore_eos": False},
    "choice": {"temperature": 0.0, "choice": ("yes", "no"), "ignore_eos": False},
    "beams": {"num_beams": 3},
}


def asked(params: dict[str, Any], prompt: Sequence[int] = PROMPT, processors: Sequence[Processor] = ()) -> Request:
    return Request(
        list(prompt), SamplingParams(**{"max_tokens": 12, "seed": 3, "ignore_eos": True, **params}), tuple(processors)
    )


@pytest.mark.parametrize("params", [params for params, _ in FEW.values()], ids=list(FEW))
def test_what_candidates_decide_is_the_same_without_all_logits(
    serve: Callable[..., Any], remembering: Any, params: dict[str, Any]
):
    session = Reducing(remembering())
    requests = [asked(params, prompt) for prompt in (PROMPT, *OTHERS)]
    assert serve(session, requests) == serve(remembering(), requests)
    assert set(session.asked) == {CANDIDATES}
    assert session.whole == 0


@pytest.mark.parametrize("params", list(ALL.values()), ids=list(ALL))
def test_what_needs_all_logits_gets_them(serve: Callable[..., Any], remembering: Any, params: dict[str, Any]):
    session = Reducing(remembering())
    requests = [asked(params, prompt) for prompt in (PROMPT, *OTHERS)]
    assert serve(session, requests) == serve(remembering(), requests)
    assert set(session.asked) <= {0}
    assert session.whole == 0


def test_one_request_that_needs_all_logits_has_them_brought_for_its_batch(serve: Callable[..., Any], remembering: Any):
    session = Reducing(remembering())
    requests = [
        asked({"temperature": 0.0, "max_tokens": 12}),
        asked({"temperature": 0.0, "repetition_penalty": 1.5, "max_tokens": 6}, OTHERS[0]),
    ]
    assert serve(session, requests) == serve(remembering(), requests)
    assert session.asked.count(0) == 5 and session.asked[-1] == CANDIDATES  # the other one's first is its prompt's


@pytest.mark.parametrize("params", [params for params, _ in FEW.values()], ids=list(FEW))
def test_ties_at_the_border_have_all_logits_fetched(
    serve: Callable[..., Any], remembering: Any, params: dict[str, Any]
):
    """Of about 4,096 logits with a deviation of 3 in steps of 4, hundreds are equal to the 32nd largest."""
    session = Reducing(coarse(remembering(), 4.0))
    requests = [asked(params, prompt) for prompt in (PROMPT, *OTHERS)]
    assert serve(session, requests) == serve(coarse(remembering(), 4.0), requests)
    assert session.whole > 0


# ------------------------------------------------------------------------------------------------------ planted errors


def test_ties_that_nobody_looks_at_draw_other_tokens(
    serve: Callable[..., Any], remembering: Any, monkeypatch: pytest.MonkeyPatch
):
    requests = [asked({"top_k": 8, "max_tokens": 30}, prompt) for prompt in (PROMPT, *OTHERS)]
    wanted = serve(coarse(remembering(), 4.0), requests)
    monkeypatch.setattr("llmc.runtime.runner.model_runner.suffice", lambda logits, needs: True)
    assert serve(Reducing(coarse(remembering(), 4.0)), requests) != wanted


# ------------------------------------------------------------------------------------------------------------- samplers


def test_candidates_suffice_only_where_they_choose_what_all_logits_would():
    """Random logits of few values: whenever candidates are said to be enough, top-k keeps the same tokens."""
    numbers, seen = np.random.default_rng(0), [0, 0]
    for _ in range(2000):
        logits = numbers.integers(0, 12, 24).astype(np.float32)
        k = int(numbers.integers(1, 8))
        few = reduced(logits, 8)
        bound = np.sort(logits)[-k]
        same = bool(np.array_equal(np.flatnonzero(logits >= bound), np.flatnonzero(few >= bound)))
        enough = suffice(few, k)
        assert same or not enough
        seen[enough] += 1
    assert min(seen) > 100
