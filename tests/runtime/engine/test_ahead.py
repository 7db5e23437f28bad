"""Groups of rows that take turns in a model's stages: begun before others are finished, and anew once rows moved."""

from typing import Any

import pytest

from llmc.errors import LlmcError
from llmc.runtime.api.request import Request
from llmc.runtime.runner import ahead
from llmc.runtime.sampling.params import SamplingParams

PATIENCE = 60


def ask(engine: Any, lengths: list[int], **params: Any) -> list[list[int]]:
    """Tokens of requests of so many new ones, all submitted before the engine's next step."""
    greedy = {"temperature": 0.0, "ignore_eos": True, **params}
    asked = [Request([50 * i + 10, 11], SamplingParams(max_tokens=count, **greedy)) for i, count in enumerate(lengths)]
    handles: list[Any] = []
    engine.call(lambda: handles.extend(map(engine.submit, asked)))
    return [list(handle.result(PATIENCE).token_ids) for handle in handles]


@pytest.fixture
def session(in_stages: Any) -> Any:
    """It keeps the calls that were begun before it ran them."""
    session = in_stages()
    session.seen = []
    session.before = lambda batch: batch.begun and session.seen.append(batch)
    return session


@pytest.mark.parametrize(("rows", "turns", "wanted"), [(4, 2, (2, 2)), (5, 3, (2, 3)), (7, 3, (3, 3)), (8, 6, (4, 2))])
def test_there_are_as_many_groups_as_asked_for_or_fewer_of_two_rows(make_engine, session, alone, rows, turns, wanted):
    session.turns = turns
    engine = make_engine(session)
    calls: list[tuple[int, int]] = []
    session.before = lambda batch: (
        batch.begun and calls.append((len(engine._runner._ahead._under_way) + 1, len(batch.input_ids)))
    )
    found = ask(engine, [20] * rows)
    assert found[-1] == alone([50 * (rows - 1) + 10, 11], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert max(calls) == wanted


def test_the_cost_of_whole_steps_is_known_without_which_nobody_drafts(make_engine, session):
    engine = make_engine(session)
    ask(engine, [20] * 3)
    assert not session.seen and engine._runner.step_seconds(1)
    ask(make_engine(session), [20] * 4)
    assert session.seen


def test_beams_whose_rows_go_on_together_take_no_turns(make_engine, session):
    ask(make_engine(session), [8], num_beams=4)
    assert not session.seen


@pytest.mark.parametrize("level", ["batch", "strict"])
def test_levels_that_promise_the_bits_of_other_calls_take_no_turns(make_engine, session, level):
    ask(make_engine(session, determinism=level), [8] * 6)
    assert not session.seen


def test_a_step_that_goes_on_after_its_rows_moved_is_noticed(make_engine, session, monkeypatch):
    """The planted error, which the tests of determinism would find too."""
    lengths = [3, 9, 12, 6, 15, 20, 20, 20]
    ask(make_engine(session), lengths)
    assert session.seen
    monkeypatch.setattr(ahead._Step, "holds", True)
    with pytest.raises(LlmcError, match="the last stage has other rows"):
        ask(make_engine(type(session)()), lengths)


def test_a_call_that_fails_ends_its_group_and_the_others_go_on(make_engine, session):
    engine = make_engine(session)

    def fail(batch: Any) -> None:
        if batch.begun and batch.first_row == 0 and len(session.calls) > 12:
            session.before = lambda batch: None
            raise LlmcError("planted")

    session.before = fail
    handles: list[Any] = []
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    engine.call(lambda: handles.extend(engine.submit(Request([50 * i + 10, 11], greedy)) for i in range(6)))
    failed = 0
    for handle in handles:
        try:
            assert len(handle.result(PATIENCE).token_ids) == 20
        except LlmcError as error:
            assert "planted" in str(error)
            failed += 1
    assert failed == 2
