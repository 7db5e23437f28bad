"""Measure what speculation gains, and what it costs where nothing can be guessed.

* An oracle draft: the sequence's own continuation, each token wrong with a probability of 0.2. That is an acceptance of
  80 %, whatever the weights. The continuation is recorded first, greedily and without drafts; then every run, with
  drafts and without, is held to it by a logits processor, because calls of other shapes round otherwise and random
  weights leave ties. So all runs make the same tokens.
* Prompt lookup, end to end and held to nothing: greedy after a passage that occurs again and again in the prompt, so
  that the model repeats it or itself; the acceptance says how much it did.
* Free text: sampled at temperature 1, with prompt lookup, and with drafts that are always wrong.

Runs with and without drafts take turns in one engine; rates are tokens per second after the first token. Of drafts that
are each right with probability a, those behind a wrong one are not accepted: a share of (a + ... + a^k) / k is.

The second table is what limits the gain: calls of 1 + k tokens on either graph, and the tokens that they commit on
average with such an oracle, (1 - a^(k+1)) / (1 - a), over their time, beside that of single tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from engine_measures import Check, OtherLoad, Report, arguments, engine_on, print_rows, tokens

from llmc.runtime import GenerationResult, Model, Request, SamplingParams, load
from llmc.runtime.engine.engine import Engine
from llmc.runtime.sessions import Batch, Phase
from llmc.runtime.speculation.control import LENGTHS
from llmc.runtime.speculation.drafters import Drafter, PromptLookup

MIN_GAIN = {"int4": 1.5, "int8": 2.0}  # with the oracle, by precision
MIN_ON_FREE_TEXT = 0.97
MIN_LOOKUP_GAIN = 1.0  # on text that repeats itself
PASSAGE = 48  # tokens that are repeated
FORCED = 1e4  # above every logit
TIMED_CALLS = 9  # of each length and graph, of which the median counts
LONGEST_WAIT = 600.0  # seconds


class OracleDraft:
    """Knows how each sequence goes on, and is wrong about every token with a fixed probability.

    Args:
        wrong: that probability, from 0 to 1.
        vocab_size: to be wrong within.
        seed: decides which tokens.
    """

    name = "oracle"
    free = True

    def __init__(self, wrong: float, vocab_size: int, seed: int = 0) -> None:
        self._wrong = wrong
        self._vocab_size = vocab_size
        self._generator = np.random.default_rng(seed)
        self._whole: dict[tuple[int, ...], list[int]] = {}

    def learn(self, prompt: Sequence[int], new: Sequence[int]) -> None:
        """Remember the continuation of ``prompt``."""
        corrupted = [
            (token + 1) % self._vocab_size if self._generator.random() < self._wrong else token for token in new
        ]
        self._whole[tuple(prompt)] = [*prompt, *corrupted]

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        """The next tokens as it knows them."""
        whole = next((w for p, w in self._whole.items() if tuple(tokens[: len(p)]) == p), [])
        return whole[len(tokens) : len(tokens) + count]

    def forget(self, key: int) -> None:
        """It keeps nothing per sequence."""

    def close(self) -> None:
        """Nothing to free."""


class WrongDraft:
    """Always proposes, and is wrong unless chance wills otherwise."""

    name = "wrong"
    free = False

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        """Tokens that have nothing to do with the text."""
        return [(tokens[-1] + 7 * i) % 1000 + 1 for i in range(1, count + 1)]

    def forget(self, key: int) -> None:
        """It keeps nothing."""

    def close(self) -> None:
        """Nothing to free."""


@dataclass
class Pair:
    """Tokens per second of the same requests without drafts and with them, round by round.

    ``accepted`` and ``drafted`` count tokens of the runs with drafts.
    """

    name: str
    plain: list[float] = field(default_factory=list)
    drafts: list[float] = field(default_factory=list)
    accepted: int = 0
    drafted: int = 0

    def add(self, speculates: bool, result: GenerationResult) -> None:
        """Note one run."""
        rate = result.timings.decode_tokens_per_s
        if not speculates:
            self.plain.append(rate)
            return
        self.drafts.append(rate)
        self.accepted += result.metrics.accepted
        self.drafted += result.metrics.drafted

    @property
    def gain(self) -> float:
        """Median over rounds of the rate with drafts over that without."""
        return statistics.median(a / b for a, b in zip(self.drafts, self.plain, strict=True))

    def row(self) -> tuple[str, str, str, str, str]:
        """Cells of the table."""
        share = f"{self.accepted / self.drafted:.1%}" if self.drafted else "-"
        medians = (f"{statistics.median(rates):.1f}" for rates in (self.plain, self.drafts))
        return self.name, *medians, str(self.drafted), share  # type: ignore[return-value]


def held_to(prompt: Sequence[int], new: Sequence[int]) -> Callable[[Sequence[int], np.ndarray], np.ndarray]:
    """A logits processor that makes ``new`` follow ``prompt``."""

    def force(so_far: Sequence[int], logits: np.ndarray) -> np.ndarray:
        logits[new[len(so_far) - len(prompt)]] = FORCED
        return logits

    return force


def compare(engine: Engine, name: str, make: Callable[[int, bool], Request], rounds: int) -> Pair:
    """Run ``make(round, speculates)`` without and with drafts, in turns that begin with either; round 0 is untimed."""
    pair = Pair(name)
    for i in range(rounds + 1):
        for speculates in (False, True) if i % 2 else (True, False):
            result = engine.submit(make(i, speculates)).result(LONGEST_WAIT)
            if i:
                pair.add(speculates, result)
    return pair


def greedy(new_tokens: int, speculates: bool) -> SamplingParams:
    """The most probable token each time, drafts or none."""
    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, speculate=speculates)


def with_oracle(model: Model, args: argparse.Namespace) -> Pair:
    """Drafts that are right four times in five."""
    oracle = OracleDraft(args.wrong, model.manifest.geometry.vocab_size)
    with opened(model, args, oracle) as engine:
        requests = []
        for i in range(args.rounds + 1):
            prompt = tokens(args.prompt, i)
            recorded = engine.submit(Request(prompt, greedy(args.new_tokens, False))).result(LONGEST_WAIT)
            oracle.learn(prompt, recorded.token_ids)
            requests.append((prompt, held_to(prompt, recorded.token_ids)))

        def make(i: int, speculates: bool) -> Request:
            prompt, force = requests[i]
            return Request(prompt, greedy(args.new_tokens, speculates), logits_processors=(force,))

        return compare(engine, f"oracle, {1 - args.wrong:.0%} right", make, args.rounds)


def with_lookup(model: Model, args: argparse.Namespace) -> Pair:
    """Prompt lookup where the text repeats itself."""
    copies = max(2, args.prompt // PASSAGE + 1)

    def make(i: int, speculates: bool) -> Request:
        return Request(tokens(PASSAGE, i) * copies, greedy(args.new_tokens, speculates))

    with opened(model, args, PromptLookup()) as engine:
        return compare(engine, "prompt lookup, repetitive text", make, args.rounds)


def on_free_text(model: Model, args: argparse.Namespace, name: str, drafter: Drafter) -> Pair:
    """Sampled text that nobody can guess."""

    def make(i: int, speculates: bool) -> Request:
        params = SamplingParams(
            max_tokens=args.free_tokens, temperature=1.0, seed=i, ignore_eos=True, speculate=speculates
        )
        return Request(tokens(args.prompt, 100 + i), params)

    with opened(model, args, drafter) as engine:
        return compare(engine, f"{name}, free text", make, args.rounds)


def opened(model: Model, args: argparse.Namespace, drafter: Drafter) -> Any:
    """An engine that speculates."""
    return engine_on(model, drafter=drafter, determinism=args.determinism, max_draft_tokens=args.max_draft_tokens)


@dataclass(frozen=True)
class Verification:
    """Milliseconds of a call with ``drafts`` + 1 tokens on either graph, and the best gain that they allow."""

    drafts: int
    decode_ms: float
    prefill_ms: float
    gain: float


def verifications(model: Model, prompt: int, right: float) -> list[Verification]:
    """Time calls of every draft length after ``prompt`` tokens; none at all comes first."""
    session = model.runner.session
    session.cache.reserve(1, prompt + LENGTHS[-1] + 1)
    model.runner.prefill(tokens(prompt, 0))

    def seconds(phase: Phase, count: int) -> float:
        every = np.arange(count)[None]
        call = Batch(phase, np.array([tokens(count, 1)]), np.array([prompt]), every)
        times = []
        for _ in range(TIMED_CALLS + 2):  # the first ones allocate
            started = time.perf_counter()
            session.run(call)
            times.append(time.perf_counter() - started)
        return statistics.median(times[2:])

    single, rows = seconds(Phase.DECODE, 1), []
    for drafts in (0, *LENGTHS):
        both = seconds(Phase.DECODE, drafts + 1), seconds(Phase.PREFILL, drafts + 1)
        gain = expected_tokens(right, drafts) * single / min(both)
        rows.append(Verification(drafts, both[0] * 1e3, both[1] * 1e3, gain))
    return rows


def expected_tokens(right: float, drafts: int) -> float:
    """Tokens that a verification commits (Leviathan et al., https://arxiv.org/abs/2211.17192, equation 1)."""
    return drafts + 1.0 if right >= 1.0 else (1.0 - right ** (drafts + 1)) / (1.0 - right)


def measure(model: Model, args: argparse.Namespace) -> Report:
    """All four comparisons."""
    meanwhile, report = OtherLoad(), Report.of(model)
    oracle, lookup = with_oracle(model, args), with_lookup(model, args)
    free = [
        on_free_text(model, args, "prompt lookup", PromptLookup()),
        on_free_text(model, args, "always wrong", WrongDraft()),
    ]
    targets = [MIN_GAIN.get(report.precision, 1.0), MIN_LOOKUP_GAIN, MIN_ON_FREE_TEXT, MIN_ON_FREE_TEXT]
    pairs = [oracle, lookup, *free]
    report.checks = [
        Check(f"{pair.name}: tokens per second, ratio", pair.gain, target)
        for pair, target in zip(pairs, targets, strict=True)
    ]
    report.details = {
        "determinism": args.determinism,
        "max_draft_tokens": args.max_draft_tokens,
        "pairs": [{**asdict(pair), "gain": pair.gain} for pair in pairs],
        "rows": [pair.row() for pair in pairs],
        "verifications": [asdict(item) for item in verifications(model, args.prompt, 1 - args.wrong)],
    }
    report.other_cpus = meanwhile.cpus()
    return report


def main() -> None:
    """Print the figures."""
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of prompts")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens to generate")
    parser.add_argument("--free-tokens", type=int, default=512, help="tokens to generate of free text")
    parser.add_argument("--wrong", type=float, default=0.2, help="probability that a token of the oracle is wrong")
    parser.add_argument("--max-draft-tokens", type=int, default=7, help="the engine's option")
    parser.add_argument("--determinism", default="fast", choices=["fast", "strict"])
    args = parser.parse_args()
    with load(args.bundle, threads=args.threads, self_test=False) as model:
        report = measure(model, args)
    report.write(args.json)
    print()
    print_rows(("tokens per second", "without drafts", "with", "drafted", "accepted"), report.details["rows"])
    print()
    head = ("drafts per call", "decode graph, ms", "prefill graph, ms", f"best gain at {1 - args.wrong:.0%}")
    rows = [
        (f"{v['drafts']}", f"{v['decode_ms']:.2f}", f"{v['prefill_ms']:.2f}", f"{v['gain']:.2f}")
        for v in report.details["verifications"]
    ]
    print_rows(head, rows)


if __name__ == "__main__":
    main()
