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
import gc
import itertools
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from engine_measures import Check, OtherLoad, Report, arguments, engine_on, tokens
from sampling import SETTINGS

from llmc.errors import CancelledError, DeadlineError, ProcessorError, QueueFullError
from llmc.runtime import Delta, GenerationResult, Handle, Model, Request, SamplingParams, load
from llmc.runtime.engine.engine import Engine
from llmc.runtime.engine.sequence import RequestState
from llmc.runtime.host.machine import resident_bytes
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.kv.prefix_store import PrefixStore
from llmc.runtime.model import prefix_key
from llmc.runtime.speculation.drafters import PromptLookup

MAX_GROWTH = 0.05  # of the resident set
CONTEXT = 512  # small, so that some requests overflow it
CLIENTS, EVENT_LOOPS = 12, 4  # threads that block, and threads with an event loop
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
    "2 groups of 2 beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
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
    draws = {} if {"num_beams", "penalty_alpha"} & KINDS[kind].keys() else {"seed": number}
    return Case(kind, prompt, SamplingParams(**{"max_tokens": new_tokens, **draws, **KINDS[kind]}))


def run_alone(engine: Engine, case: Case) -> Seen:
    """The same request with nobody else there."""
    seen = Seen()
    read(engine.submit(case.request()), seen)
    return seen


def read(handle: Handle, seen: Seen, most: int | None = None) -> None:
    """Read to the end, or cancel after ``most`` pieces and read what came meanwhile."""
    try:
        for count, delta in enumerate(handle.events(LONGEST_WAIT), 1):
            seen.note(delta)
            if count == most:
                handle.cancel()
        seen.result = handle.result(LONGEST_WAIT)
    except Exception as error:  # noqa: BLE001  # judged later
        seen.fail(error)


async def read_async(handle: Handle, seen: Seen) -> None:
    """The same in an event loop."""
    try:
        async for delta in handle.events_async():
            seen.note(delta)
        seen.result = await handle
    except Exception as error:  # noqa: BLE001  # judged later
        seen.fail(error)


def mistakes(case: Case, expected: Seen, seen: Seen) -> Iterator[str]:
    """Mistakes in a client's view."""
    if case.kind in FAULTY or seen.result is None:
        allowed = (ProcessorError, CancelledError, DeadlineError) if case.kind in FAULTY else _ABORTED
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


_ABORTED = (CancelledError, DeadlineError)


def _shown(output: Any) -> object:
    return output and (output.index, output.token_ids, output.text, output.finish_reason)


class Clients:
    """Threads that ask, each one request at a time, until ``count`` requests were made."""

    def __init__(self, engine: Engine, cases: list[Case], alone: list[Seen], count: int, seed: int) -> None:
        self.engine = engine
        self.cases = cases
        self.alone = alone
        self.count = count
        self.seed = seed
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.accepted = 0
        self.resident: list[tuple[int, int]] = []
        self._numbers = iter(range(count))
        self._lock = threading.Lock()

    @property
    def done(self) -> int:
        """Requests that ended."""
        return sum(n for outcome, n in self.outcomes.items() if outcome != "turned away")

    def run(self) -> None:
        """Start all, watch memory, and wait."""
        threads = [threading.Thread(target=self._block) for _ in range(CLIENTS)]
        threads += [threading.Thread(target=lambda: asyncio.run(self._await())) for _ in range(EVENT_LOOPS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.resident.append((self.done, resident_bytes()[0]))
            time.sleep(0.1)

    def growth(self) -> float:
        """Resident set in the last tenth over that after the first fifth, less 1."""
        settled, last = (
            [size for done, size in self.resident if low * self.count <= done <= high * self.count]
            for low, high in ((0.2, 0.3), (0.9, 1.0))
        )
        return statistics.median(last or [0]) / statistics.median(settled or last or [1]) - 1

    def _next(self) -> int | None:
        with self._lock:
            return next(self._numbers, None)

    def _block(self) -> None:
        while (number := self._next()) is not None:
            chance = random.Random(f"{self.seed} {number}")
            which, seen = chance.randrange(len(self.cases)), Seen()
            way = chance.choices(("end", "cancel", "leave", "deadline", "wait"), (45, 15, 10, 10, 20))[0]
            handle = self._submit(self._request(which, chance, way))
            if way == "leave":
                self._leave(handle, seen, chance.randrange(3))
            elif way == "wait":
                try:
                    seen.result = handle.result(LONGEST_WAIT)
                except Exception as error:  # noqa: BLE001  # judged later
                    seen.fail(error)
            else:
                read(handle, seen, chance.randint(1, 12) if way == "cancel" else None)
            del handle
            self._judge(number, which, way, seen)

    async def _await(self) -> None:
        while (number := self._next()) is not None:
            chance = random.Random(f"{self.seed} {number}")
            which, seen = chance.randrange(len(self.cases)), Seen()
            task = asyncio.create_task(read_async(self._submit(self._request(which, chance, "end")), seen))
            if chance.random() < 0.2:
                await asyncio.sleep(chance.random() * 0.05)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._judge(number, which, "async", seen)

    def _request(self, which: int, chance: random.Random, way: str) -> Request:
        deadline = 0.001 + chance.random() * 0.2 if way == "deadline" else None
        return self.cases[which].request(priority=chance.randint(-2, 2), deadline_s=deadline)

    def _submit(self, request: Request) -> Handle:
        while True:
            try:
                handle = self.engine.submit(request)
            except QueueFullError:
                with self._lock:
                    self.outcomes["turned away"] += 1
                time.sleep(0.01)
            else:
                with self._lock:
                    self.accepted += 1
                return handle

    @staticmethod
    def _leave(handle: Handle, seen: Seen, pieces: int) -> None:
        try:
            for delta in itertools.islice(handle.events(LONGEST_WAIT), pieces):
                seen.note(delta)
        except Exception as error:  # noqa: BLE001  # judged later
            seen.fail(error)

    def _judge(self, number: int, which: int, way: str, seen: Seen) -> None:
        case = self.cases[which]
        found = [f"request {number} ({case.kind}, {way}) {text}" for text in mistakes(case, self.alone[which], seen)]
        outcome = seen.error.__name__ if seen.error else "left" if seen.result is None else "finished"
        with self._lock:
            self.outcomes[outcome] += 1
            self.wrong += found


def soak(model: Model, args: argparse.Namespace, folder: Path) -> Report:
    """Run everything alone, then all of it together."""
    meanwhile, report = OtherLoad(), Report.of(model)
    kinds = itertools.cycle(KINDS)
    cases = [make_case(number, next(kinds)) for number in range(args.distinct)]
    with engine_on(model, determinism=args.determinism) as engine:
        alone = [run_alone(engine, case) for case in cases]
    report.details["alone_mistakes"] = [
        f"{case.kind}: {seen.message}" for case, seen in zip(cases, alone, strict=True)
        if (seen.error is not None) != (case.kind in FAULTY)
    ]  # fmt: skip
    store = PrefixStore(folder, DISK_BYTES)
    prefixes = PrefixCache(prefix_key(model.manifest), max_bytes=PREFIX_BYTES, store=store)
    drafter = PromptLookup() if args.lookup else None
    options = {"determinism": args.determinism, "max_queue": QUEUE}
    started = time.perf_counter()
    with engine_on(model, prefixes=prefixes, drafter=drafter, **options) as engine:
        clients = Clients(engine, cases, alone, args.requests, args.seed)
        before = count_jobs()
        clients.run()
        report.details["seconds"] = time.perf_counter() - started
        left = settle(engine, before)
        snapshot = engine.metrics.snapshot()
    store.close()
    ended = sum(snapshot.requests.values()) - snapshot.requests["refused"]
    report.checks = [
        Check("requests that ended", clients.done, args.requests),
        Check("requests with wrong, lost or duplicated tokens", len(clients.wrong), 0, True),
        Check("requests without an outcome in the engine's metrics", abs(clients.accepted - ended), 0, True),
        Check("left in the engine: waiting, running, bytes in use, objects", left, 0, True),
        Check("requests that failed when alone", len(report.details["alone_mistakes"]), 0, True),
        Check("growth of the resident set", clients.growth(), MAX_GROWTH, True),
    ]
    report.details |= {
        "determinism": args.determinism,
        "lookup": args.lookup,
        "kinds": list(KINDS),
        "outcomes": dict(clients.outcomes),
        "wrong": clients.wrong,
        "resident_bytes": clients.resident[:: max(1, len(clients.resident) // 200)],
        "summary": snapshot.summary(),
        "prefixes": vars(prefixes.counters),
        "drafted": snapshot.draft_proposed,
        "accepted": snapshot.draft_accepted,
    }
    report.other_cpus = meanwhile.cpus()
    return report


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
    """Print the figures, and the first mistakes."""
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--requests", type=int, default=10_000, help="requests in all")
    parser.add_argument("--distinct", type=int, default=400, help="different ones among them")
    parser.add_argument("--determinism", default="batch", choices=["fast", "batch", "strict"])
    parser.add_argument("--lookup", action="store_true", help="speculate by prompt lookup; with determinism strict")
    parser.add_argument("--seed", type=int, default=0, help="of what clients do")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        with load(args.bundle, threads=args.threads, self_test=False, max_context=CONTEXT) as model:
            report = soak(model, args, Path(temporary))
    report.write(args.json)
    print(f"\n{report.details['seconds']:.0f} s; outcomes: {report.details['outcomes']}")
    for text in (*report.details["alone_mistakes"][:SHOWN], *report.details["wrong"][:SHOWN]):
        print(text)
    if not all(check.met for check in report.checks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
