"""The engine: whatever goes wrong with a request is its own end, by name, and every other request goes on."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doubles.clocks import until

from llmc.errors import (
    CancelledError,
    DeadlineError,
    EngineClosedError,
    GrammarError,
    LlmcError,
    ProcessorError,
    QueueFullError,
    RequestError,
    ResourceError,
    UsageError,
)
from llmc.runtime.api.request import Request
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sessions import Batch

PATIENCE = 120  # seconds after which something that should happen counts as not happening
PROMPT = list(range(10, 30))
OTHERS = [[100 + i, *range(50 * i + 5, 50 * i + 5 + 7 * i)] for i in range(1, 4)]
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)

Alone = Callable[..., list[int]]


def ask(prompt: Sequence[int] = PROMPT, params: SamplingParams = SAMPLED, **more: Any) -> Request:
    return Request(prompt, params, **more)


def tokens(handle: Any) -> list[int]:
    return list(handle.result(PATIENCE).token_ids)


class Gate:
    """Lets calls of a session through one by one, or all once it is opened."""

    def __init__(self, session: Any) -> None:
        self.entered = threading.Semaphore(0)
        self._may = threading.Semaphore(0)
        self._open = False
        session.before = self._wait

    def _wait(self, _: Batch) -> None:
        if not self._open:
            self.entered.release()
            assert self._may.acquire(timeout=PATIENCE)

    def reached(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE)

    def pass_one(self) -> None:
        self._may.release()

    def open(self) -> None:
        self._open = True
        self._may.release(100)


@pytest.fixture
def session(remembering: Any) -> Any:
    return remembering()


@pytest.fixture
def gate(make_engine: Any, session: Any) -> Iterator[Gate]:
    """Closed until the test opens it, at the latest at its end, before the engine is closed."""
    gate = Gate(session)
    yield gate
    gate.open()


def raising(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
    raise ZeroDivisionError("by the client")


def late(action: Callable[[Sequence[int], np.ndarray], Any]) -> Callable[[Sequence[int], np.ndarray], Any]:
    """Do it only after some tokens, so that the request fails in the middle of a batch."""
    return lambda tokens, logits: action(tokens, logits) if len(tokens) > len(PROMPT) + 3 else logits


def leaving(*_: Any) -> None:
    raise SystemExit("a thread's way to end")


BAD: dict[str, tuple[dict[str, Any], type[LlmcError], str]] = {
    "a processor that raises": ({"logits_processors": [late(raising)]}, ProcessorError, "ZeroDivisionError: by the"),
    "a processor that returns NaN": ({"logits_processors": [late(lambda _, x: x * np.nan)]}, ProcessorError, "NaN"),
    "a processor that returns nothing": ({"logits_processors": [late(lambda _, x: None)]}, ProcessorError, "None"),
    "a processor that forbids all": ({"logits_processors": [late(lambda _, x: x - np.inf)]}, RequestError, "token"),
    "a processor that exits": ({"logits_processors": [late(leaving)]}, LlmcError, "SystemExit"),
    "a criterion that raises": ({"stopping_criteria": [lambda *_: 1 / 0]}, ProcessorError, "stopping criterion raised"),
    "on_delta that raises": ({"on_delta": lambda _: 1 / 0}, ProcessorError, "on_delta raised ZeroDivisionError"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_request_that_goes_wrong_fails_alone(make_engine, session, alone, case):
    more, error, message = BAD[case]
    engine = make_engine(session)
    others = [engine.submit(ask(prompt)) for prompt in OTHERS[:2]]
    bad = engine.submit(ask(**more))
    others.append(engine.submit(ask(OTHERS[2])))
    with pytest.raises(error, match=message):
        bad.result(PATIENCE)
    assert [tokens(handle) for handle in others] == [alone(prompt, SAMPLED) for prompt in OTHERS]
    assert tokens(engine.submit(ask())) == alone(PROMPT, SAMPLED)


def test_logits_of_one_row_that_are_no_numbers_fail_one_request(make_engine, session, alone):
    session.spoil = lambda row: row[: len(PROMPT)] == PROMPT and len(row) > len(PROMPT) + 4
    engine = make_engine(session)
    bad, *others = [engine.submit(ask(prompt)) for prompt in (PROMPT, *OTHERS)]
    with pytest.raises(RequestError, match=r"not finite|NaN"):
        bad.result(PATIENCE)
    assert [tokens(handle) for handle in others] == [alone(prompt, SAMPLED) for prompt in OTHERS]


def test_a_call_that_fails_while_a_prompt_is_fed_ends_that_request_only(make_engine, session, alone):
    def fail_for_the_prompt(batch: Batch) -> None:
        if batch.input_ids.shape[1] > 1 and PROMPT[0] in batch.input_ids[0, :1]:
            raise OSError("not this one")

    session.before = fail_for_the_prompt
    engine = make_engine(session)
    other, bad = engine.submit(ask(OTHERS[0])), engine.submit(ask())
    with pytest.raises(LlmcError, match="not this one"):
        bad.result(PATIENCE)
    assert tokens(other) == alone(OTHERS[0], SAMPLED)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], {}, RequestError, "prompt is empty"),
        ([4096], {}, UsageError, r"prompt holds token id 4096, .* expected 0 \.\.\. 4095"),
        ([-1], {}, UsageError, "token id -1"),
        (b"x", {}, UsageError, "prompt is bytes"),
        ([1.5], {}, UsageError, "expected text or a list of token ids"),
        ([5] * 250, {"max_tokens": 7}, RequestError, r"250 tokens and 7 new ones .* holds 256; ask for at most 6,"),
        ([5] * 256, {"max_tokens": 1}, RequestError, "no room in a context of 256; shorten it, set on_overflow"),
        ([5], {"stop_token_ids": (4096,)}, UsageError, "stop_token_ids holds token id 4096"),
        ([5], {"regex": "("}, GrammarError, "regex"),
        ([5], {"grammar": "start: nowhere"}, GrammarError, "grammar"),
        ([5], {"json_schema": {"type": "nonsense"}}, GrammarError, "json_schema|schema"),
        ([5], {"num_beams": 9}, RequestError, r"9 rows are needed at once .* the engine has 8; ask for fewer"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_waits(make_engine, session, prompt, params, error, message):
    engine = make_engine(session)
    with pytest.raises(error, match=message):
        engine.submit(Request(prompt, SamplingParams(**{"max_tokens": 4, "temperature": 0, **params})))
    assert session.calls == []
    assert engine.metrics.snapshot().requests["refused"] == 1


def test_a_deadline_holds_while_a_grammar_is_compiled(make_engine, session):
    combinations = {"anyOf": [{"type": "string", "pattern": f"{i}a"} for i in range(30)]}
    params = SamplingParams(max_tokens=4, json_schema={"allOf": [combinations] * 3})
    with pytest.raises(DeadlineError, match="passed while json_schema was compiled"):
        make_engine(session).submit(Request([5], params, deadline_s=0.2))
    assert session.calls == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("priority", 1001, r"priority is 1001, expected an integer from -1000 to 1000"),
        ("priority", True, "priority is True"),
        ("deadline_s", 0, "deadline_s is 0, expected a number above 0"),
        ("deadline_s", True, "deadline_s is True"),
        ("on_delta", 5, "on_delta is 5, expected a function"),
        ("logits_processors", [3], r"logits_processors is \[3\], expected a list of functions"),
        ("stopping_criteria", ["x"], r"stopping_criteria is \['x'\], expected a list of functions"),
    ],
)
def test_arguments_of_a_request_have_ranges(field, value, message):
    with pytest.raises(UsageError, match=message):
        Request([5], **{field: value})


def test_a_full_queue_refuses_the_next_and_serves_those_it_took(make_engine, session, gate, alone):
    engine = make_engine(session, max_batch=1, max_queue=2)
    running = engine.submit(ask())
    gate.reached()
    waiting = [engine.submit(ask(prompt)) for prompt in OTHERS[:2]]
    with pytest.raises(QueueFullError, match="2 requests wait already, as many as may; try again later"):
        engine.submit(ask(OTHERS[2]))
    gate.open()
    assert [tokens(handle) for handle in (running, *waiting)] == [
        alone(prompt, SAMPLED) for prompt in (PROMPT, *OTHERS[:2])
    ]
    assert tokens(engine.submit(ask(OTHERS[2]))) == alone(OTHERS[2], SAMPLED)


def test_memory_that_does_not_suffice_even_alone_refuses_by_the_numbers(make_engine, served, alone):
    roomy = served.memory.total(256, 1)
    engine = make_engine(memory=roomy, max_context=512)
    with pytest.raises(ResourceError, match=r"may grow to 512 positions in 1 row\(s\), .* shorten its prompt"):
        engine.submit(ask([5] * 300)).result(PATIENCE)
    assert tokens(engine.submit(ask())) == alone(PROMPT, SAMPLED)


def test_a_cancelled_request_frees_its_row_within_one_step(make_engine, session, gate, alone):
    engine = make_engine(session, max_batch=1)
    first, second = engine.submit(ask()), engine.submit(ask(OTHERS[0]))
    for _ in range(3):
        gate.reached()
        gate.pass_one()
    gate.reached()
    assert first.cancel()
    before = len(session.calls)
    gate.open()
    assert tokens(second) == alone(OTHERS[0], SAMPLED)
    with pytest.raises(CancelledError, match="the request was cancelled"):
        first.result(PATIENCE)
    fed = session.calls[before + 1]  # after the call that was running
    assert fed.input_ids[0].tolist() == OTHERS[0] and fed.first_row == 0


def test_a_dropped_handle_cancels_its_request(make_engine, session, gate, alone):
    engine = make_engine(session)
    other, dropped = engine.submit(ask(OTHERS[0])), engine.submit(ask())
    gate.reached()
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None
    gate.open()
    assert tokens(other) == alone(OTHERS[0], SAMPLED)
    until(lambda: engine.metrics.snapshot().requests["cancelled"] == 1)


@pytest.mark.parametrize(
    ("calls", "where"),
    [(0, "waiting in the queue"), (2, "its prompt was still being fed"), (5, r"\d tokens were generated by then")],
)
def test_a_deadline_that_passes_says_how_far_the_request_came(
    make_engine, session, gate, alone, calls, where, monkeypatch
):
    engine = make_engine(session, max_batch=1, prefill_chunk=8)
    deadline = 1000.0
    first = engine.submit(ask(OTHERS[0])) if not calls else None
    if first is not None:
        gate.reached()
    late = engine.submit(ask(deadline_s=deadline))
    for _ in range(calls - 1):
        gate.reached()
        gate.pass_one()
    if first is None:
        gate.reached()
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + deadline)
    monkeypatch.setattr("llmc.runtime.engine.engine.time", later)
    gate.open()
    with pytest.raises(DeadlineError, match=rf"the deadline of 1000 s passed; .*{where}"):
        late.result(PATIENCE)
    assert first is None or tokens(first) == alone(OTHERS[0], SAMPLED)
    assert tokens(engine.submit(ask())) == alone(PROMPT, SAMPLED)


def test_closing_fails_what_runs_and_waits_and_refuses_what_comes(make_engine, session, gate):
    engine = make_engine(session, max_batch=1)
    handles = [engine.submit(ask()), engine.submit(ask(OTHERS[0]))]
    gate.reached()
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: engine._thread.closing)
    with pytest.raises(EngineClosedError, match="the engine is closed; load the bundle again"):
        engine.submit(ask())
    gate.open()
    closing.join(PATIENCE)
    for handle in handles:
        with pytest.raises(EngineClosedError, match="the engine was closed"):
            handle.result(PATIENCE)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.call(lambda: None)


def test_closing_with_drain_finishes_what_was_accepted(make_engine, alone):
    engine = make_engine(max_batch=2)
    handles = [engine.submit(ask(prompt)) for prompt in (PROMPT, *OTHERS)]
    several = engine.submit(ask(params=SamplingParams(max_tokens=4, n=3, seed=9, ignore_eos=True)))
    engine.close(drain=True)
    assert all(handle.done for handle in (*handles, several))
    assert [tokens(handle) for handle in handles] == [alone(prompt, SAMPLED) for prompt in (PROMPT, *OTHERS)]


@pytest.mark.parametrize("drain", [False, True])
def test_a_function_on_the_engines_thread_may_close_it(make_engine, alone, drain):
    engine = make_engine()

    def closing(_: Any) -> None:
        engine.close(drain)

    handles = [*(engine.submit(ask(prompt)) for prompt in OTHERS[:2]), engine.submit(ask(PROMPT, on_delta=closing))]
    if drain:
        assert tokens(handles[2]) == alone(PROMPT, SAMPLED)
    else:
        with pytest.raises(EngineClosedError, match="the engine was closed"):
            handles[2].result(PATIENCE)
    with pytest.raises(EngineClosedError):
        engine.submit(ask())
    engine.close()
    assert all(handle.done for handle in handles)


def test_a_function_runs_between_two_steps_and_its_error_is_the_callers(make_engine):
    engine = make_engine()
    threads: list[str] = []
    engine.call(lambda: threads.append(threading.current_thread().name))
    assert threads == ["llmc-engine"]
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 / 0)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("scope", [None, "another"])
def test_a_cached_prefix_that_another_row_holds_is_taken_from_that_row(make_engine, remembering, alone, scope):
    session, copies = remembering(), list[tuple[int, int]]()
    copy = session.cache.copy
    session.cache.copy = lambda *places: (copies.append(places[2:]), copy(*places))
    engine, second = make_engine(session, prefix_bytes=1 << 20), list[Any]()

    def ask_again(_: Any) -> None:
        if not second:
            second.append(engine.submit(ask([*PROMPT, 7, 8, 9], prefix_scope=scope)))

    first = engine.submit(ask(on_delta=ask_again))
    assert tokens(first) == alone(PROMPT, SAMPLED)
    assert tokens(second[0]) == alone([*PROMPT, 7, 8, 9], SAMPLED)
    assert copies == ([(0, len(PROMPT))] if scope is None else [])


def test_metrics_count_what_happened(make_engine):
    engine = make_engine(prefix_bytes=1 << 20)
    for prompt in (PROMPT, PROMPT, *OTHERS):
        result = engine.submit(ask(prompt)).result(PATIENCE)
        assert result.usage.completion_tokens == result.metrics.output_tokens == 12
        assert result.usage.prompt_tokens == len(prompt)
    assert result.timings.ttft_s > 0 and result.timings.decode_tokens == 11
    snapshot = engine.metrics.snapshot()
    assert snapshot.requests["length"] == 5
    assert snapshot.output_tokens == 60
    assert snapshot.prompt_tokens == 2 * len(PROMPT) + sum(map(len, OTHERS))
    assert snapshot.prefix_hit_tokens >= len(PROMPT) - 4
    assert snapshot.prefix_hit_tokens + snapshot.prefix_miss_tokens == snapshot.prompt_tokens
