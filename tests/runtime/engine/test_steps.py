"""Between a request's arrival and its end: chunks beside decoding, drafts past an end, and a cache that grows."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from doubles.clocks import even_pace
from doubles.speculators import Always

from llmc.errors import ResourceError
from llmc.runtime.api.request import Request
from llmc.runtime.kv.rows import TornError
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sessions import Batch, Phase

PATIENCE = 120
SPACING = 6
CHUNK = 8

Alone = Callable[..., list[int]]


def params(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **more})


def prompt(first: int, length: int) -> list[int]:
    return [first + i for i in range(length)]


def tokens(handle: Any) -> list[int]:
    return list(handle.result(PATIENCE).token_ids)


@pytest.fixture(autouse=True)
def pace(monkeypatch: pytest.MonkeyPatch) -> None:
    even_pace(monkeypatch)


@pytest.fixture
def session(remembering: Any) -> Any:
    return remembering()


def held_back(engine: Any, requests: Sequence[Request]) -> list[Any]:
    """Submit all of them before the engine's next step."""
    handles: list[Any] = []
    engine.call(lambda: handles.extend(engine.submit(request) for request in requests))
    return handles


def test_while_others_decode_steps_lie_between_the_chunks_of_a_long_prompt(make_engine, session, alone):
    engine = make_engine(session, prefill_chunk=CHUNK, decode_steps_per_chunk=SPACING)
    requests = [Request(prompt(10, 3), params(60)), Request(prompt(100, 5 * CHUNK), params())]
    short, long = held_back(engine, requests)
    assert [tokens(short), tokens(long)] == [alone(item.prompt, item.params) for item in requests]
    phases = [batch.phase for batch in session.calls]
    chunks = [i for i, phase in enumerate(phases) if phase is Phase.PREFILL][1:]
    assert len(chunks) == 5
    gaps = [after - before - 1 for before, after in pairwise(chunks[1:])]
    assert min(gaps) >= SPACING
    assert chunks[0] == 2  # the first one goes at once, after the short prompt and a step


def test_a_short_prompt_does_not_wait_for_a_long_one(make_engine, session):
    engine = make_engine(session, prefill_chunk=CHUNK, decode_steps_per_chunk=SPACING, max_context=512)
    long, short = held_back(engine, [Request(prompt(100, 40 * CHUNK), params()), Request(prompt(10, CHUNK), params(1))])
    tokens(short)
    tokens(long)
    order = [int(batch.input_ids[0, 0]) for batch in session.calls if batch.phase is Phase.PREFILL]
    assert order.index(10) <= 2


@pytest.mark.parametrize("spacing", [0, SPACING])
@pytest.mark.parametrize("new", [1, 3])
def test_a_long_prompt_is_fed_however_many_short_ones_come(make_engine, session, alone, spacing, new):
    """Somebody submits a short prompt whenever one is done, for as long as the long one takes."""
    engine = make_engine(session, prefill_chunk=CHUNK, decode_steps_per_chunk=spacing)
    starts = iter(range(20, 4000))
    came: list[int] = []
    more: list[Any] = []

    def refill(delta: Any) -> None:
        came.extend(delta.token_ids)
        if len(came) % new == 0 and not long.done:
            more.append(engine.submit(Request([next(starts), 11], params(new), on_delta=refill)))

    asked = Request(prompt(100, 4 * CHUNK), params())
    long = engine.submit(asked)
    for first in range(4):
        engine.submit(Request([10 + first, 11], params(new), on_delta=refill))
    assert tokens(long) == alone(asked.prompt, asked.params)
    assert len(more) < 4 * (max(1, spacing) + 8) * 8  # a bound that a starved prompt would pass
    for handle in more:
        handle.result(PATIENCE)


class Table:
    """Drafts from a sequence that is known to come."""

    costs_by_token, watch = False, None

    def __init__(self, known: list[int]) -> None:
        self.known = known
        self.open: set[int] = set()

    def propose(self, key: int, so_far: Sequence[int], count: int) -> list[int]:
        self.open.add(key)
        return self.known[len(so_far) : len(so_far) + count]

    def forget(self, key: int) -> None:
        self.open.discard(key)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("end", ["choice", "stop token", "stop text", "criterion"])
def test_drafts_that_go_on_after_the_end_of_a_sample_do_no_harm(make_engine, tiny_tokenizer, session, monkeypatch, end):
    """A guide has nothing to allow after the end, and a processor may raise where it was never to be asked."""
    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)
    asked = Request(
        prompt(10, 6),
        params(
            30,
            **(
                {"choice": ("return x + 10 * y[0] if not z else None",), "ignore_eos": False} if end == "choice" else {}
            ),
        ),
    )
    plain = make_engine(session).submit(asked).result(PATIENCE)
    known = [*asked.prompt, *plain.token_ids]
    if end == "stop token":
        asked = Request(asked.prompt, params(30, stop_token_ids=(plain.token_ids[5],)))
    elif end == "stop text":
        asked = Request(asked.prompt, params(30, stop=(tiny_tokenizer.decode(plain.token_ids[4:6]),)))
    elif end == "criterion":
        asked = Request(asked.prompt, params(30), stopping_criteria=(lambda new, _: len(new) == 6,))
    wanted = make_engine().submit(asked).result(PATIENCE)
    length = len(asked.prompt) + len(wanted.token_ids)

    def strict(so_far: Sequence[int], logits: Any) -> Any:
        assert len(so_far) < length, "asked beyond the end"
        return logits

    drafter = Table([*known[:length], 0, 0, 0, 0, 0, 0] if end == "choice" else known)
    engine = make_engine(drafter=drafter)
    got = engine.submit(Request(asked.prompt, asked.params, (strict,), asked.stopping_criteria)).result(PATIENCE)
    assert (got.token_ids, got.text, got.finish_reason) == (wanted.token_ids, wanted.text, wanted.finish_reason)
    assert got.finish_reason == "stop"
    assert engine.metrics.snapshot().draft_accepted > 0
    assert not drafter.open


@pytest.mark.threat("bad-words")
def test_drafts_of_forbidden_sequences_are_not_accepted(make_engine, tiny_tokenizer, session, monkeypatch):
    """What is verified passes through the same steps as what is drawn alone."""
    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)
    free = make_engine(session).submit(Request(prompt(10, 6), params(30))).result(PATIENCE)
    ids = free.token_ids
    word = tiny_tokenizer.decode(ids[3:5])
    steps = {"logit_bias": ((ids[11], -100.0), (ids[20], 3.0)), "bad_words": (word,), "logprobs": 2}
    asked = Request(prompt(10, 6), params(30, **steps, dry_multiplier=0.8))
    wanted = make_engine().submit(asked).result(PATIENCE)
    assert wanted.token_ids != ids
    for known in (ids, wanted.token_ids):
        engine = make_engine(drafter=Table([*asked.prompt, *known]))
        got = engine.submit(asked).result(PATIENCE)
        assert (got.token_ids, got.outputs[0].logprobs) == (wanted.token_ids, wanted.outputs[0].logprobs)
        assert engine.metrics.snapshot().draft_accepted > 0


def test_memory_that_ends_while_the_cache_grows_fails_who_needs_it(make_engine, session, alone):
    reserve = session.cache.reserve

    def refuse(rows: int, capacity: int) -> None:
        if capacity > 256:
            raise ResourceError("no memory for that")
        reserve(rows, capacity)

    session.cache.reserve = refuse
    engine = make_engine(session, max_context=512)
    modest, greedy = (Request(prompt(first, 20), params(new)) for first, new in ((10, 60), (300, 300)))
    handles = held_back(engine, [modest, greedy])
    with pytest.raises(ResourceError, match="no memory for that"):
        tokens(handles[1])
    assert tokens(handles[0]) == alone(modest.prompt, modest.params)
    assert tokens(engine.submit(modest)) == alone(modest.prompt, modest.params)


def test_a_stage_that_is_lost_while_the_cache_grows_fails_who_waits_for_the_room(make_engine, session, alone):
    reserve = session.cache.reserve

    def lose(rows: int, capacity: int) -> None:
        session.cache.reserve = reserve
        raise TornError("lost") from ResourceError("a stage was lost")

    session.cache.reserve = lose
    engine, asked = make_engine(session), Request(prompt(10, 5), params())
    with pytest.raises(ResourceError, match="a stage was lost"):
        engine.submit(asked).result(PATIENCE)
    assert tokens(engine.submit(asked)) == alone(asked.prompt, asked.params)


def test_a_step_that_fails_inside_the_engine_fails_its_requests_and_no_later_ones(
    make_engine, session, alone, monkeypatch, caplog
):
    engine = make_engine(session)
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "next_prefill", lambda: 1 / 0)
        with pytest.raises(Exception, match=r"llmc failed inside \(ZeroDivisionError.*please report it"):
            engine.submit(Request(prompt(10, 5), params())).result(PATIENCE)
    assert "the engine failed in a step" in caplog.text
    assert tokens(engine.submit(Request(prompt(10, 5), params()))) == alone(prompt(10, 5), params())


def test_positions_in_use_are_counted(make_engine, session, served):
    engine = make_engine(session)
    seen: list[tuple[int, int]] = []

    def note(_: Batch) -> None:
        seen.append((engine._scheduler.used_bytes, engine._scheduler.reserved_bytes))

    session.before = note
    tokens(engine.submit(Request(prompt(10, 5), params(4))))
    each = served.memory["cache"].per_position
    assert [used // each for used, _ in seen] == [0, 5, 6, 7]
    assert {reserved // each for _, reserved in seen} == {256}
    engine.call(lambda: None)
    engine.call(lambda: None)
    assert engine.metrics.snapshot().gauges.kv_used_bytes == 0
    assert engine.metrics.snapshot().gauges.running == engine.metrics.snapshot().gauges.waiting == 0
