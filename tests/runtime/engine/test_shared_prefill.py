"""Prompts that wait together are fed in one call: everyone gets what it would alone, and nobody waits for it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from doubles.clocks import even_pace

from llmc.runtime.api.request import Request
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sessions import Phase

PATIENCE = 120
Alone = Callable[..., list[int]]


@pytest.fixture(autouse=True)
def pace(monkeypatch: pytest.MonkeyPatch) -> None:
    even_pace(monkeypatch)


@pytest.fixture
def session(remembering: Any) -> Any:
    session = remembering()
    session.packs_rows = True
    return session


def asked(first: int, length: int, max_tokens: int = 6, **more: Any) -> Request:
    params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **more}
    return Request([first + i for i in range(length)], SamplingParams(**params))


def answers(engine: Any, requests: Sequence[Request]) -> list[list[int]]:
    """Their tokens; all of them come before the engine's next step."""
    handles: list[Any] = []
    engine.call(lambda: handles.extend(engine.submit(request) for request in requests))
    return [list(handle.result(PATIENCE).token_ids) for handle in handles]


def fed(session: Any) -> list[list[int]]:
    """Tokens of each row that the calls of prefill fed."""
    return [batch.counts for batch in session.calls if batch.phase is Phase.PREFILL]


def test_short_prompts_that_come_together_share_a_call(make_engine, session, alone):
    requests = [asked(100, 5), asked(200, 8), asked(300, 1), asked(400, 3, max_tokens=1)]
    engine = make_engine(session)
    assert answers(engine, requests) == [alone(item.prompt, item.params) for item in requests]
    assert fed(session) == [[5, 8, 1, 3]]


@pytest.mark.parametrize("level", ["batch", "strict"])
def test_levels_that_promise_equal_bits_feed_one_row_a_call(make_engine, session, level):
    answers(make_engine(session, determinism=level), [asked(100, 5), asked(200, 8)])
    assert all(len(rows) == 1 for rows in fed(session))


def test_a_session_that_packs_no_rows_feeds_one_a_call(make_engine, session):
    session.packs_rows = False
    answers(make_engine(session), [asked(100, 5), asked(200, 8)])
    assert fed(session) == [[5], [8]]


def test_a_prompt_of_which_every_position_counts_is_fed_alone(make_engine, session):
    answers(make_engine(session), [asked(100, 5), asked(200, 8, prompt_logprobs=1), asked(300, 4), asked(400, 4)])
    assert fed(session) == [[5], [8], [4, 4]]


def test_a_shared_call_that_fails_ends_those_who_shared_it_and_nobody_else(make_engine, session, alone):
    engine = make_engine(session)
    handles: list[Any] = []

    def fail(batch: Any) -> None:
        if "new_lengths" in batch.feeds:
            raise RuntimeError("no such kernel")

    session.before = fail
    requests = [asked(100, 5), asked(200, 5), asked(300, 5, prompt_logprobs=1)]
    engine.call(lambda: handles.extend(engine.submit(request) for request in requests))
    for handle in handles[:2]:
        with pytest.raises(Exception, match="no such kernel"):
            handle.result(PATIENCE)
    assert list(handles[2].result(PATIENCE).token_ids) == alone(requests[2].prompt, requests[2].params)
