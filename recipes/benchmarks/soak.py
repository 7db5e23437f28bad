"""Soak the engine: thousands of requests of every kind, from many clients, checked token by token.

Every kind of request (sampling, beams, several samples, grammars, stop strings, full contexts, faulty processors) comes
with random sizes, priorities and deadlines, from threads and event loops that read to the end, cancel, or walk away;
the queue is short, so some are turned away and come again. Prefixes are shared, and cached in memory and on disk.

* Tokens: each distinct request was run alone before, without prefix cache and speculation. Whatever came to its end has
  the same tokens, text and reason; whatever did not has a prefix of them; faulty ones failed by name.
* Memory: the resident set at the end, over that after the first fifth.
* Order: every request has one outcome, and at the end nothing waits, runs, or holds positions or objects.

That tokens do not depend on companions is promised from determinism "batch" on; with --lookup it takes "strict".
"""

import argparse
import asyncio
import collections
import contextlib
import gc
import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from engine_measures import Check, Found, opened, run, tokens
from sampling import SETTINGS

from llmc.errors import CancelledError, DeadlineError, ProcessorError, QueueFullError
from llmc.runtime import Delta, Engine, GenerationResult, Handle, Request, SamplingParams
from llmc.runtime.engine.sequence import RequestState
from llmc.runtime.host.machine import resident_bytes

MAX_GROWTH = 0.05  # of the resident set
CONTEXT = 512  # small, so that some requests overflow it
CLIENTS = 16  # threads
WAYS = {"end": 34, "cancel": 11, "leave": 8, "deadline": 7, "wait": 15, "async": 20, "async, cancelled": 5}  # per cent
QUEUE = 6  # places in the engine's queue
PREFIX_BYTES, DISK_BYTES = 16 << 20, 64 << 20
SHARED = (0, 40, 96, 200)  # tokens that prompts have in common
LONGEST_WAIT = 120.0  # seconds, after which a request counts as lost
SETTLED_S = 60.0  # seconds after which nothing may be left of any request
SHOWN = 5  # mistakes that are described

KINDS: dict[str, dict[str, Any]] = {
    **SETTINGS,
    "3 samples": {"n": 3, "temperature": 0.9},
    "best of 3": {"n": 1, "best_of": 3},
    "consensus of 3": {"n": 3, "consensus": "f1"},
    "3 beams": {"num_beams": 3, "num_return_sequences": 2},
    "choice": {"choice": ("yes", "no", "perhaps")},
    "regex": {"regex": "[a-c]{2,8}"},
    "stop strings": {"stop": ("e", "\n\n")},
    "bans and biases": {"banned_tokens": (3, 4, 5), "logit_bias": ((10, 5.0), (11, -5.0)), "min_tokens": 4},
    "log-probabilities of the prompt": {"prompt_logprobs": 1, "temperature": 0.0},
    "sliding window": {"on_overflow": "sink", "ignore_eos": True},
    "raises": {"temperature": 0.0},
    "not a number": {"temperature": 0.0},
}
FAULTY = ("raises", "not a number")
Processor = Callable[[Sequence[int], np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Case:
    """A request that can be made again and again, and comes to the same tokens."""

    kind: str
    prompt: list[int]
    params: SamplingParams

    def request(self, **own: Any) -> Request:
        """With what is no matter of tokens: priority, deadline."""
        faults = (fault(self.kind, len(self.prompt) + 2),) if self.kind in FAULTY else ()
        return Request(self.prompt, self.params, logits_processors=faults, **own)


@dataclass
class Seen:
    """A client's view of a request: tokens and text per output, and how it ended.

    Of an error it keeps no more than type and message, for a traceback holds on to what the check of objects looks for.
    """

    tokens: dict[int, list[int]] = field(default_factory=lambda: collections.defaultdict(list))
    text: dict[int, str] = field(default_factory=lambda: collections.defaultdict(str))
    result: GenerationResult | None = None
    error: type[Exception] | None = None
    message: str = ""

    def note(self, delta: Delta) -> None:
        """A piece came."""
        self.tokens[delta.index] += delta.token_ids
        self.text[delta.index] += delta.text

    def fail(self, error: Exception) -> None:
        """It ended in an error."""
        self.error, self.message = type(error), str(error)


def fault(kind: str, length: int) -> Processor:
    """A logits processor that fails once the sequence has ``length`` tokens."""

    def process(so_far: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if len(so_far) < length:
            return logits
        if kind == "raises":
            raise ValueError("on purpose")
        return np.full_like(logits, np.nan)

    return process


def make_case(number: int, kind: str) -> Case:
    """The ``number``-th request: half of them begin like others."""
    chance = random.Random(number)
    shared = chance.choice(SHARED)
    prompt = tokens(shared, shared) + tokens(1 + int(chance.expovariate(1 / 30)) % 200, number)
    new_tokens = 4 + int(chance.expovariate(1 / 16)) % 60
    if kind == "sliding window":
        prompt, new_tokens = tokens(CONTEXT - 8, number), 24
    draws = {} if "num_beams" in KINDS[kind] else {"seed": number}
    return Case(kind, prompt, SamplingParams(**{"max_tokens": new_tokens, **draws, **KINDS[kind]}))


def follow(handle: Handle, seen: Seen, way: str, chance: random.Random) -> None:
    """Do with a request what a client does that goes this way."""
    try:
        if way.startswith("async"):
            patience = chance.random() * 0.05 if way.endswith("cancelled") else None
            with contextlib.suppress(asyncio.TimeoutError):
                asyncio.run(asyncio.wait_for(read_async(handle, seen), patience))
            return
        last = {"leave": chance.randrange(3), "wait": 0}.get(way)
        cancels = chance.randint(1, 12) if way == "cancel" else None
        for count, delta in enumerate(itertools.islice(handle.events(LONGEST_WAIT), last), 1):
            seen.note(delta)
            if count == cancels:
                handle.cancel()
        if way != "leave":
            seen.result = handle.result(LONGEST_WAIT)
    except Exception as error:  # noqa: BLE001  # judged later
        seen.fail(error)


async def read_async(handle: Handle, seen: Seen) -> None:
    """Read to the end in an event loop."""
    async for delta in handle.events_async():
        seen.note(delta)
    seen.result = await handle


def mistakes(case: Case, expected: Seen, seen: Seen) -> Iterator[str]:
    """Mistakes in a client's view."""
    if case.kind in FAULTY or seen.result is None:
        allowed = (CancelledError, DeadlineError, *((ProcessorError,) if case.kind in FAULTY else ()))
        if seen.error is not None and not issubclass(seen.error, allowed):
            yield f"failed with {seen.error.__name__}: {seen.message}"
        if case.kind in FAULTY and seen.result is not None:
            yield "ended although its processor fails"
        for index, found in seen.tokens.items():
            if found != expected.tokens[index][: len(found)]:
                yield f"output {index} began {found}, alone {expected.tokens[index]}"
        return
    assert expected.result is not None
    for ours, alone in itertools.zip_longest(seen.result.outputs, expected.result.outputs):
        if _shown(ours) != _shown(alone):
            yield f"gave {_shown(ours)}, alone {_shown(alone)}"
        elif seen.tokens and (seen.tokens[ours.index], seen.text[ours.index]) != (list(ours.token_ids), ours.text):
            yield f"streamed {seen.tokens[ours.index]} {seen.text[ours.index]!r}, but gave {_shown(ours)}"


def _shown(output: Any) -> object:
    return output and (output.index, output.token_ids, output.text, output.finish_reason)


@dataclass
class Clients:
    """Threads that ask, each one request at a time, until ``count`` requests were made."""

    engine: Engine
    cases: list[Case]
    alone: list[Seen]
    count: int
    seed: int
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    turned_away: int = 0
    wrong: list[str] = field(default_factory=list)
    resident: list[tuple[int, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Start all, watch memory, and wait."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            asked = [pool.submit(self._ask, number) for number in range(self.count)]
            while not asked[-1].done():
                self.resident.append((self.outcomes.total(), resident_bytes()[0]))
                time.sleep(0.1)
        for one in asked:
            one.result()

    def growth(self) -> float:
        """Resident set in the last tenth over that after the first fifth, less 1."""
        settled, last = (
            [size for done, size in self.resident if low * self.count <= done <= high * self.count]
            for low, high in ((0.2, 0.3), (0.9, 1.0))
        )
        return statistics.median(last or [0]) / statistics.median(settled or last or [1]) - 1

    def _ask(self, number: int) -> None:
        chance, seen = random.Random(f"{self.seed} {number}"), Seen()
        which, way = chance.randrange(len(self.cases)), chance.choices(list(WAYS), WAYS.values())[0]
        case, deadline = self.cases[which], 0.001 + chance.random() * 0.2 if way == "deadline" else None
        follow(self._submit(case.request(priority=chance.randint(-2, 2), deadline_s=deadline)), seen, way, chance)
        wrong = [f"request {number} ({case.kind}, {way}) {m}" for m in mistakes(case, self.alone[which], seen)]
        with self._lock:
            self.outcomes[seen.error.__name__ if seen.error else "finished" if seen.result else "left"] += 1
            self.wrong += wrong

    def _submit(self, request: Request) -> Handle:
        while True:
            try:
                return self.engine.submit(request)
            except QueueFullError:
                with self._lock:
                    self.turned_away += 1
                time.sleep(0.01)


def soak(args: argparse.Namespace) -> Found:
    """Run everything alone, then all of it together."""
    cases = [
        make_case(number, kind) for number, kind in zip(range(args.distinct), itertools.cycle(KINDS), strict=False)
    ]
    alone = [Seen() for _ in cases]
    level = {"max_context": CONTEXT, "determinism": args.determinism}
    with opened(args, **level) as model:
        for case, seen in zip(cases, alone, strict=True):
            follow(model.engine.submit(case.request()), seen, "end", random.Random())
    failed = [
        f"{case.kind}: {seen.message}" for case, seen in zip(cases, alone, strict=True)
        if (seen.error is not None) != (case.kind in FAULTY)
    ]  # fmt: skip
    kept = {"prefix_cache_bytes": PREFIX_BYTES, "prefix_cache_disk_bytes": DISK_BYTES, "max_queue": QUEUE}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        draft = "lookup" if args.lookup else None
        with opened(args, **level, **kept, prefix_cache_folder=folder, draft=draft) as model:
            engine, before = model.engine, count_jobs()
            clients = Clients(engine, cases, alone, args.requests, args.seed)
            clients.run()
            seconds = time.perf_counter() - started
            left = settle(engine, before)
            snapshot, prefixes = engine.metrics.snapshot(), vars(engine.prefixes.counters)
    ended = sum(snapshot.requests.values()) - snapshot.requests["refused"]
    checks = [
        Check("requests that ended", clients.outcomes.total(), args.requests),
        Check("requests with wrong, lost or duplicated tokens", len(clients.wrong), 0, at_most=True),
        Check("requests without an outcome in the engine's metrics", abs(args.requests - ended), 0, at_most=True),
        Check("left in the engine: waiting, running, bytes in use, objects", left, 0, at_most=True),
        Check("requests that failed when alone", len(failed), 0, at_most=True),
        Check("growth of the resident set", clients.growth(), MAX_GROWTH, at_most=True),
    ]
    outcomes = {**clients.outcomes, "turned away": clients.turned_away}
    details = {
        "determinism": args.determinism,
        "lookup": args.lookup,
        "kinds": list(KINDS),
        "seconds": seconds,
        "outcomes": outcomes,
        "alone_mistakes": failed,
        "wrong": clients.wrong,
        "resident_bytes": clients.resident[:: max(1, len(clients.resident) // 200)],
        "summary": snapshot.summary(),
        "prefixes": prefixes,
        "drafted": snapshot.draft_proposed,
        "accepted": snapshot.draft_accepted,
    }
    counts = [("outcome", "requests"), *((name, str(count)) for name, count in outcomes.items())]
    mistaken = [("mistakes",), *((text,) for text in (*failed[:SHOWN], *clients.wrong[:SHOWN]))]
    return Found(checks, details, [counts, mistaken] if len(mistaken) > 1 else [counts])


def settle(engine: Engine, jobs: int) -> int:
    """Leftovers of requests once all have ended: gauges, and objects beyond the ``jobs`` that there were before."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        engine.call(lambda: None)  # the engine's thread has done a step since
        gauges = engine.metrics.gauges
        left = gauges.waiting + gauges.running + gauges.kv_used_bytes + max(0, count_jobs() - jobs)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def count_jobs() -> int:
    """Requests that are anywhere in memory."""
    gc.collect()
    return sum(issubclass(type(item), RequestState) for item in gc.get_objects())


def main() -> None:
    """Print the figures, and the first mistakes; exit with 1 if there are any."""
    found = run(
        soak,
        __doc__,
        rounds=1,
        requests=(10_000, "requests in all"),
        distinct=(400, "different ones among them"),
        determinism=("batch", "level: fast, batch or strict"),
        lookup=(False, "speculate by prompt lookup; with determinism strict"),
        seed=(0, "of what clients do"),
    )
    sys.exit(not found.met)


if __name__ == "__main__":
    main()
