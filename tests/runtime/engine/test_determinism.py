"""The contract: tokens depend on prompt, parameters and seed; not on companions, chunks, caches or speculation."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import pytest
from doubles.speculators import Always

from llmc.errors import CancelledError
from llmc.runtime import load
from llmc.runtime.api.request import Request
from llmc.runtime.sampling.params import SamplingParams

PATIENCE = 120
SHARED = [7 * i % 4000 + 10 for i in range(24)]  # some prompts begin with it, so that prefixes are found
CASES = 6  # random sets of requests for each setting
REQUESTS = 7
# A neighbour's logits enter with this weight: far below their spread of 3, and enough to move a draw.
LEAK = 0.3

# One seeded request of each kind; n > 1 and beams share their rows with the others too.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "dry_multiplier": 0.8},
    {"temperature": 1.0, "n": 3},
    {"temperature": 1.0, "xtc_probability": 0.5},
    {"temperature": 0.8, "mirostat": 1, "mirostat_tau": 3.0},
    {"mirostat": 2, "mirostat_eta": 0.5, "n": 2},
    {"typical_p": 0.5},
]

Alone = Callable[..., list[int]]


def requests(rng: random.Random, count: int, longest: int = 60, vocab: int = 4096) -> list[Request]:
    """Requests of every kind and length; half of them begin alike."""
    made = []
    for _ in range(count):
        own = [rng.randrange(10, vocab) for _ in range(rng.randint(1, longest))]
        prompt = SHARED[: rng.choice((8, 16, 24))] + own if rng.random() < 0.5 else own
        params = {"max_tokens": rng.randint(1, 14), "ignore_eos": rng.random() < 0.7, **rng.choice(KINDS)}
        seed = None if params.get("temperature") == 0 else rng.getrandbits(64)
        made.append(Request(prompt, SamplingParams(seed=seed, **params), priority=rng.randint(-1, 1)))
    return made


def answers(engine: Any, asked: Sequence[Request]) -> list[list[list[int]]]:
    """The tokens of every output of every request, all at once."""
    handles = [engine.submit(request) for request in asked]
    return [[list(output.token_ids) for output in handle.result(PATIENCE).outputs] for handle in handles]


def wanted(alone: Alone, request: Request) -> list[list[int]]:
    return [alone(request.prompt, request.params, index) for index in range(request.params.n)]


SETTINGS: list[dict[str, Any]] = [
    {"determinism": "fast"},
    {"determinism": "fast", "packs_rows": True, "prefill_chunk": 64},
    {"determinism": "fast", "packs_rows": True, "prefill_chunk": 17, "max_batch": 3, "prefix_bytes": 1 << 20},
    {"determinism": "batch", "prefill_chunk": 17, "prefix_bytes": 1 << 20},
    {"determinism": "batch", "max_batch": 3, "decode_steps_per_chunk": 0},
    {"determinism": "strict", "prefix_bytes": 1 << 12},
    {"determinism": "strict", "draft": "lookup", "prefill_chunk": 8},
    {"determinism": "fast", "draft": "lookup", "prefix_bytes": 1 << 20},
    {"determinism": "fast", "stages": True, "packs_rows": True, "prefill_chunk": 17, "prefix_bytes": 1 << 20},
]


class Guessing:
    """Drafts from sequences that are known to come, every third of them spoilt."""

    costs_by_token, watch = False, None

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = [list(sequence) for sequence in sequences]

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        length = len(tokens)
        known = next((known for known in self._sequences if known[:length] == list(tokens)), [])
        following = enumerate(known[length : length + count], length)
        return [token if i % 3 else (token + 1) % 4096 for i, token in following]

    def forget(self, key: int) -> None:
        pass

    def close(self) -> None:
        pass


def guessing(asked: Sequence[Request], outputs: Sequence[list[list[int]]]) -> Guessing:
    """Knows the outputs of requests, and what would come after them."""
    return Guessing([[*ask.prompt, *tokens, 0, 0] for ask, made in zip(asked, outputs, strict=True) for tokens in made])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_companions_chunks_prefixes_and_drafts_do_not_change_tokens(
    make_engine, remembering, in_stages, alone, setting, monkeypatch
):
    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)
    options = dict(setting)
    session = in_stages() if options.pop("stages", False) else remembering()
    session.packs_rows = options.pop("packs_rows", False)
    draft = options.pop("draft", None)
    cases = [requests(random.Random(case), REQUESTS) for case in range(CASES)]
    expected = [[wanted(alone, request) for request in asked] for asked in cases]
    if draft is not None:
        options["drafter"] = guessing([*chain(*cases)], [*chain(*expected)])
    engine = make_engine(session, max_context=128, **options)
    for asked, outputs in zip(cases, expected, strict=True):
        assert answers(engine, asked) == outputs
    if draft is not None:
        assert 0 < engine.metrics.snapshot().draft_accepted < engine.metrics.snapshot().draft_proposed


def test_a_row_that_depends_on_its_neighbour_is_noticed(make_engine, remembering, alone):
    session = remembering()
    session.leak = LEAK
    asked = requests(random.Random(0), REQUESTS)
    assert answers(make_engine(session, max_context=128), asked) != [wanted(alone, request) for request in asked]


def test_a_prefix_of_other_tokens_is_noticed(make_engine, remembering, alone):
    """The planted error: what a cached block gives back is shifted by one position."""

    class Reversing(remembering.cache_type):  # type: ignore[misc]
        def read(self, row: int, start: int, end: int) -> Any:
            return super().read(row, start, end)[::-1]

    class Shifting(remembering):  # type: ignore[misc]
        cache_type = Reversing

    engine = make_engine(Shifting(), max_context=128, prefix_bytes=1 << 20)
    request = Request(SHARED, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert answers(engine, [request]) == [wanted(alone, request)]
    assert answers(engine, [request]) != [wanted(alone, request)]
    assert engine.metrics.snapshot().prefix_hit_tokens > 0


MIXTURES = 10  # random sets of requests, arrivals and cancellations


@pytest.mark.parametrize(
    ("determinism", "stages"), [("fast", False), ("batch", False), ("strict", False), ("fast", True)]
)
def test_whoever_comes_leaves_overflows_or_branches_changes_nobody_elses_tokens(
    make_engine, remembering, in_stages, alone, determinism, stages, monkeypatch
):
    """Everything at once: beams, samples, sliding windows, drafts, prefixes, cancellations while others run."""
    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)
    watched = [requests(random.Random(100 + case), 5) for case in range(MIXTURES)]
    expected = [[wanted(alone, request) for request in asked] for asked in watched]
    options: dict[str, Any] = {"determinism": determinism, "prefix_bytes": 1 << 16, "decode_steps_per_chunk": 3}
    if determinism != "batch":
        options["drafter"] = guessing([*chain(*watched)], [*chain(*expected)])
    session = in_stages() if stages else remembering()
    engine = make_engine(session, max_context=100, prefill_chunk=16, max_batch=6, **options)
    for case, (asked, outputs) in enumerate(zip(watched, expected, strict=True)):
        rng = random.Random(case)
        passing = []
        handles = []
        for request in asked:
            passing += [engine.submit(disturbing(rng)) for _ in range(rng.randint(0, 2))]
            handles.append(engine.submit(request))
            for handle in passing:
                if rng.random() < 0.2:
                    handle.cancel()
        got = [[list(output.token_ids) for output in handle.result(PATIENCE).outputs] for handle in handles]
        assert got == outputs
        for handle in passing:
            handle.cancel() if case % 2 else None
            with suppress(CancelledError):
                handle.result(PATIENCE)
    engine.close(drain=True)
    assert engine._scheduler.used_bytes == 0
    assert not engine._requests and not engine._scheduler._queue._heap and not len(engine._scheduler._rows)


def disturbing(rng: random.Random) -> Request:
    """A request whose rows fork, slide or end at once."""
    prompt = [rng.randrange(10, 4096) for _ in range(rng.randint(1, 70))]
    params = rng.choice(
        (
            {"num_beams": rng.randint(2, 4), "max_tokens": 12},
            {"on_overflow": "sink", "max_tokens": 90, "ignore_eos": True},
            {"on_overflow": "sink", "max_tokens": 90, "ignore_eos": True, "n": 3},
            {"on_overflow": "truncate_left", "max_tokens": 60},
            {"n": 7, "max_tokens": 1},
            {"n": 2, "best_of": 4, "max_tokens": 5},
            {"prompt_logprobs": 1, "logprobs": 2, "max_tokens": 3},
            {"choice": ("yes", "not at all"), "max_tokens": 20},
        )
    )
    return Request(prompt, SamplingParams(**params), priority=rng.randint(-2, 2))


REAL_CASES: list[tuple[str, dict[str, Any]]] = [
    ("int8", {"determinism": "batch"}),
    ("fp32", {"determinism": "batch"}),
    ("int8", {"determinism": "strict", "draft": "lookup"}),
    ("int4", {"determinism": "strict", "draft": "lookup"}),
]


@pytest.mark.parametrize(("precision", "options"), REAL_CASES, ids=lambda value: str(value))
def test_the_small_model_gives_each_request_what_it_gives_it_alone(tiny_in, precision, options, monkeypatch):
    """Alone: one request after another, one chunk, no prefixes, no drafts. Together: all of that, in small chunks."""
    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)
    asked = requests(random.Random(7), 10, longest=80)
    level = {"determinism": options["determinism"]}
    with load(tiny_in(precision), threads=1, self_test=False, prefix_cache_bytes=0, **level) as model:
        expected = [answers(model.engine, [request])[0] for request in asked]
    monkeypatch.setattr("llmc.runtime.loading.PromptLookup", lambda: guessing(asked, expected))
    handles: list[Any] = []
    together = {"prefill_chunk": 34, "decode_steps_per_chunk": 2, "prefix_cache_bytes": 1 << 22, **options}
    with load(tiny_in(precision), threads=1, self_test=False, **together) as model:
        model.engine.call(lambda: handles.extend(map(model.engine.submit, asked)))  # before the next step
        got = [[list(output.token_ids) for output in handle.result(PATIENCE).outputs] for handle in handles]
        assert got == expected
        assert answers(model.engine, asked[::-1]) == expected[::-1]  # now with prefixes
        snapshot = model.engine.metrics.snapshot()
    assert snapshot.prefix_hit_tokens > 0
    assert ("draft" in options) == (0 < snapshot.draft_accepted < snapshot.draft_proposed)
    rows = snapshot.batch_size
    assert level["determinism"] == "strict" or sum(rows.counts[2:]) > rows.count / 10  # steps of more than two rows


def test_drafts_that_are_committed_unread_are_noticed(make_engine, alone, monkeypatch):
    """The planted error: verification that believes its drafts."""
    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)
    monkeypatch.setattr(
        "llmc.runtime.engine.sample_group.verify", lambda drafts, draw: [*map(draw, range(len(drafts) + 1))]
    )
    asked = [Request(SHARED, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))]
    expected = [wanted(alone, asked[0])]
    assert answers(make_engine(drafter=guessing(asked, expected)), asked) != expected
