"""Between a request's arrival and its end: chunks beside decoding, drafts past an end, and a cache that grows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from doubles.clocks import even_pace

from llmc.bundle import DeviceMemory, EngineConfig, Manifest, Profile
from llmc.errors import RequestError, ResourceError
from llmc.runtime.api.options import EngineOptions
from llmc.runtime.api.request import Request
from llmc.runtime.engine.engine import Engine
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


# -------------------------------------------------------------------------------------------------------------- chunks


def held_back(engine: Any, requests: Sequence[Request]) -> list[Any]:
    """Submit all of them before the engine's next step."""
    handles: list[Any] = []
    engine.call(lambda: handles.extend(engine.submit(request) for request in requests))
    return handles


def test_while_others_decode_steps_lie_between_the_chunks_of_a_long_prompt(
    make_engine: Any, session: Any, alone: Alone
):
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


def test_where_nobody_decodes_chunks_follow_one_another(make_engine: Any, session: Any):
    engine = make_engine(session, prefill_chunk=CHUNK, decode_steps_per_chunk=SPACING)
    tokens(engine.submit(Request(prompt(100, 5 * CHUNK), params())))
    assert [batch.phase for batch in session.calls[:5]] == [Phase.PREFILL] * 5


def test_a_short_prompt_does_not_wait_for_a_long_one(make_engine: Any, session: Any):
    engine = make_engine(session, prefill_chunk=CHUNK, decode_steps_per_chunk=SPACING, max_context=512)
    long, short = held_back(engine, [Request(prompt(100, 40 * CHUNK), params()), Request(prompt(10, CHUNK), params(1))])
    tokens(short)
    tokens(long)
    order = [int(batch.input_ids[0, 0]) for batch in session.calls if batch.phase is Phase.PREFILL]
    assert order.index(10) <= 2


@pytest.mark.parametrize("spacing", [0, SPACING])
@pytest.mark.parametrize("new", [1, 3])
def test_a_long_prompt_is_fed_however_many_short_ones_come(
    make_engine: Any, session: Any, alone: Alone, spacing: int, new: int
):
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


# -------------------------------------------------------------------------------------------------------------- drafts


class Table:
    """Drafts from a sequence that is known to come."""

    costs_by_token = False

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


class Always:
    """Speculates in every step; what pays depends on the clock."""

    def __init__(self, key: int, drafter: Any, *_: Any) -> None:
        self._key, self._drafter = key, drafter

    def drafts(self, so_far: Sequence[int], room: int, rows: int = 1) -> list[int]:
        found: list[int] = self._drafter.propose(self._key, so_far, min(room, 4))
        return found

    def committed(self, proposed: int, count: int, rows: int = 1) -> None:
        assert 1 <= count <= proposed + 1

    def close(self, answer: Sequence[int] = ()) -> None:
        self._drafter.forget(self._key)


@pytest.mark.parametrize("end", ["choice", "stop token", "stop text", "criterion"])
def test_drafts_that_go_on_after_the_end_of_a_sample_do_no_harm(
    make_engine: Any, tiny_tokenizer: Any, session: Any, monkeypatch: pytest.MonkeyPatch, end: str
):
    """A guide has nothing to allow after the end, and a processor may raise where it was never to be asked."""
    monkeypatch.setattr("llmc.runtime.engine.engine.Speculator", Always)
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


def test_drafts_of_forbidden_sequences_are_not_accepted(
    make_engine: Any, tiny_tokenizer: Any, session: Any, monkeypatch: pytest.MonkeyPatch
):
    """What is verified passes through the same steps as what is drawn alone."""
    monkeypatch.setattr("llmc.runtime.engine.engine.Speculator", Always)
    free = make_engine(session).submit(Request(prompt(10, 6), params(30))).result(PATIENCE)
    ids = free.token_ids
    word = tiny_tokenizer.decode(ids[3:5])
    steps = {"sequence_bias": ((ids[10:12], -100.0), (ids[20:21], 3.0)), "bad_words": (word,), "logprobs": 2}
    asked = Request(prompt(10, 6), params(30, **steps, dry_multiplier=0.8))
    wanted = make_engine().submit(asked).result(PATIENCE)
    assert wanted.token_ids != ids
    for known in (ids, wanted.token_ids):
        engine = make_engine(drafter=Table([*asked.prompt, *known]))
        got = engine.submit(asked).result(PATIENCE)
        assert (got.token_ids, got.outputs[0].logprobs) == (wanted.token_ids, wanted.outputs[0].logprobs)
        assert engine.metrics.snapshot().draft_accepted > 0


def test_drafts_past_the_end_of_one_sample_do_not_end_the_others(
    make_engine: Any, alone: Alone, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llmc.runtime.engine.engine.Speculator", Always)
    asked = Request(prompt(10, 6), params(12, temperature=1.0, seed=4, n=2))
    first, second = (alone(asked.prompt, asked.params, index) for index in range(2))

    def ends(new: Sequence[int], _: str) -> bool:
        return list(new) == first[:8]

    def failing(so_far: Sequence[int], logits: Any) -> Any:
        return 1 / 0 if list(so_far[6:14]) == first[:8] else logits

    engine = make_engine(drafter=Table([*asked.prompt, *first]))
    outputs = engine.submit(Request(asked.prompt, asked.params, (failing,), (ends,))).result(PATIENCE).outputs
    assert [list(output.token_ids) for output in outputs] == [first[:8], second]


def test_a_processor_that_raises_among_drafts_that_count_fails_the_request(
    make_engine: Any, alone: Alone, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llmc.runtime.engine.engine.Speculator", Always)
    asked = Request(prompt(10, 6), params(20))
    known = [*asked.prompt, *alone(asked.prompt, asked.params)]

    def failing(so_far: Sequence[int], logits: Any) -> Any:
        return logits if len(so_far) < 14 else 1 / 0

    with pytest.raises(Exception, match="ZeroDivisionError"):
        make_engine(drafter=Table(known)).submit(Request(asked.prompt, asked.params, (failing,))).result(PATIENCE)


# --------------------------------------------------------------------------------------------------------------- cache


def test_the_cache_grows_by_steps_and_no_further_than_the_context(make_engine: Any, session: Any, alone: Alone):
    engine = make_engine(session, max_context=400)
    asked = Request(prompt(10, 20), params(370))
    sizes = []
    session.before = lambda _: sizes.append((session.cache.rows, session.cache.capacity))
    assert tokens(engine.submit(asked)) == alone(asked.prompt, asked.params)
    assert sorted(set(sizes)) == [(1, 256), (1, 400)]


def test_memory_that_ends_while_the_cache_grows_fails_who_needs_it(make_engine: Any, session: Any, alone: Alone):
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


FIXED = 512
BYTES = DeviceMemory(context=1000, weights=2000, workspace=500, cache_per_token=10, logits=40)


@pytest.fixture
def fixed(remembering: Any) -> Any:
    """A session whose cache has one capacity, as a TensorRT engine's, and rows by fours."""

    class Roomy(remembering.cache_type):  # type: ignore[misc]
        device_memory = 1 << 40

        def __init__(self) -> None:
            super().__init__()
            self.asked: list[tuple[int, int]] = []

        def reserve(self, rows: int, capacity: int) -> None:
            self.asked.append((rows, capacity))
            super().reserve(-(-rows // 4) * 4, FIXED)

    class Fixed(remembering):  # type: ignore[misc]
        cache_type = Roomy

    return Fixed()


@pytest.fixture
def on_gpu(served: Manifest, tiny_tokenizer: Any) -> Iterator[Callable[..., Engine]]:
    """Makes engines for a bundle whose cache lies on a GPU."""
    plan = EngineConfig(
        file="engine.plan",
        compute="float16",
        buckets=(256, FIXED),
        decode=Profile(8, 1, 1),
        prefill=Profile(1, 128, 8),
        select="",
        candidates=0,
        platform="linux-x86_64",
        compute_capabilities=("8.7",),
        version_compatible=False,
        hardware_compatibility="none",
        stripped=False,
        verified="cpu",
    )
    memory = replace(served.memory, cache_per_token=0, workspace_per_token=0)
    manifest = replace(served, engine=plan, device=BYTES, memory=memory)
    engines: list[Engine] = []

    def make(session: Any, max_context: int = 256, memory: int = 1 << 40, **options: Any) -> Engine:
        options = {"options": EngineOptions(**options), "max_context": max_context, "memory": memory}
        engines.append(Engine(session, manifest, tiny_tokenizer, prefill_chunk=32, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("level", ["fast", "batch", "strict"])
def test_a_session_that_makes_more_room_than_it_is_asked_for_serves_as_any(
    on_gpu: Any, fixed: Any, alone: Alone, level: str
):
    engine = on_gpu(fixed, determinism=level)
    requests = [Request(prompt(10 * i, 5 + i), params(200, temperature=0.7, seed=i)) for i in range(1, 8)]
    assert [tokens(handle) for handle in held_back(engine, requests)] == [
        alone(request.prompt, request.params) for request in requests
    ]
    assert fixed.cache.tokens.shape == (8, FIXED)
    assert len(fixed.cache.asked) == 2  # once for four rows, once for eight, and never for more positions
    assert engine._scheduler.reserved_bytes == 8 * FIXED * BYTES.cache_per_token


def test_the_context_ends_where_it_was_said_to_and_not_where_the_cache_does(on_gpu: Any, fixed: Any):
    engine = on_gpu(fixed, max_context=64)
    with pytest.raises(RequestError, match="but the context holds 64"):
        engine.submit(Request(prompt(10, 60), params(5)))
    sliding = engine.submit(Request(prompt(10, 60), params(30, on_overflow="sink"))).result(PATIENCE)
    assert len(sliding.token_ids) == 30
    assert sliding.usage.truncated_tokens > 0
    assert max(int(batch.past_lengths.max()) for batch in fixed.calls) < 64


def test_a_request_that_does_not_fit_into_the_gpus_memory_is_refused_by_its_numbers(on_gpu: Any, fixed: Any):
    fixed.cache.device_memory = BYTES.total(FIXED, 1) - 1
    with pytest.raises(ResourceError, match=r"may grow to 256 positions in 1 row\(s\), .* MB of the GPU's memory are"):
        on_gpu(fixed).submit(Request(prompt(10, 5), params(5))).result(PATIENCE)
    assert fixed.cache.asked == []


def test_requests_go_one_after_another_where_the_gpu_has_room_for_one(on_gpu: Any, fixed: Any, alone: Alone):
    fixed.cache.device_memory = BYTES.total(FIXED, 2) - 1
    engine = on_gpu(fixed)
    requests = [Request(prompt(10 * i, 5), params(6)) for i in range(1, 4)]
    assert [tokens(handle) for handle in held_back(engine, requests)] == [
        alone(request.prompt, request.params) for request in requests
    ]
    assert {len(batch.input_ids) for batch in fixed.calls} == {1}


def test_growth_that_the_gpu_has_lost_room_for_fails_who_needs_it(on_gpu: Any, fixed: Any, alone: Alone):
    """Another process took memory since the engine was made."""
    engine = on_gpu(fixed)

    def refuse(rows: int, capacity: int) -> None:
        if rows > 4:
            raise ResourceError(f"no memory for {rows} rows")
        reserve(rows, capacity)

    reserve, fixed.cache.reserve = fixed.cache.reserve, refuse
    requests = [Request(prompt(10 * i, 5), params(6)) for i in range(1, 6)]
    handles = held_back(engine, requests)
    for handle, request in zip(handles[:4], requests, strict=False):
        assert tokens(handle) == alone(request.prompt, request.params)
    with pytest.raises(ResourceError, match="no memory for 5 rows"):
        tokens(handles[4])


def test_a_step_that_fails_inside_the_engine_fails_its_requests_and_no_later_ones(
    make_engine: Any, session: Any, alone: Alone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    engine = make_engine(session)
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "next_prefill", lambda: 1 / 0)
        with pytest.raises(Exception, match=r"llmc failed inside \(ZeroDivisionError.*please report it"):
            engine.submit(Request(prompt(10, 5), params())).result(PATIENCE)
    assert "the engine failed in a step" in caplog.text
    assert tokens(engine.submit(Request(prompt(10, 5), params()))) == alone(prompt(10, 5), params())


def test_positions_in_use_are_counted(make_engine: Any, session: Any, served: Any):
    engine = make_engine(session)
    seen: list[tuple[int, int]] = []

    def note(_: Batch) -> None:
        seen.append((engine._scheduler.used_bytes, engine._scheduler.reserved_bytes))

    session.before = note
    tokens(engine.submit(Request(prompt(10, 5), params(4))))
    each = served.memory.cache_per_token
    assert [used // each for used, _ in seen] == [0, 5, 6, 7]
    assert {reserved // each for _, reserved in seen} == {256}
    engine.call(lambda: None)
    engine.call(lambda: None)
    assert engine.metrics.snapshot().gauges.kv_used_bytes == 0
    assert engine.metrics.snapshot().gauges.running == engine.metrics.snapshot().gauges.waiting == 0
