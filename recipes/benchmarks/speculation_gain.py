"""Measure what speculation gains, and what it costs where nothing can be guessed.

* An oracle draft: the sequence's own continuation, each token wrong with a probability of 0.2. That is an acceptance of
  80 %, whatever the weights. The continuation is recorded first, greedily and without drafts; then every run, with
  drafts and without, is held to it by a logits processor, because calls of other shapes round otherwise and random
  weights leave ties. So all runs make the same tokens.
* Prompt lookup, end to end and held to nothing: greedy after a passage that occurs again and again in the prompt, so
  that the model repeats it or itself; the acceptance says how much it did.
* Free text: sampled at temperature 1, with prompt lookup, and with drafts that are always wrong.
* With --answers, instead, prompt lookup on real text, with an instruct model's tokenizer and template: answers that
  copy from the question (a code edit, JSON, a summary, a quotation), which the model is held to, so that a small one
  copies as a good one would; and its own answers, at temperature 1, to questions that give nothing to copy.
* With --forms, instead, answers of one form to other questions, which the model is held to: prompt lookup in a
  request's own text, and in the answers before it, too (`draft_scope`).

Runs with and without drafts take turns in one engine; rates are tokens per second after the first token. Of drafts that
are each right with probability a, those behind a wrong one are not accepted: a share of (a + ... + a^k) / k is.

The second table is what limits the gain: calls of 1 + k tokens on either graph, and the tokens that they commit on
average with such an oracle, (1 - a^(k+1)) / (1 - a), over their time, beside that of single tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from answers import COPYING, FORMS, FREE, form_of
from engine_measures import LONGEST_WAIT, Check, Found, median_ratio, opened, run, tokens

from llmc.runtime import Engine, GenerationResult, Model, Request, SamplingParams
from llmc.runtime.sessions import Batch, Phase
from llmc.runtime.speculation.control import LENGTHS, expected
from llmc.runtime.speculation.drafters import Drafter, PromptLookup

MIN_GAIN = {"int4": 1.5, "int8": 2.0}  # with the oracle, by precision
MIN_ON_FREE_TEXT = 0.97
MIN_LOOKUP_GAIN = 1.0  # on text that repeats itself
MIN_COPYING_GAIN, MIN_ANSWERING_GAIN = 2.0, 0.98  # by prompt lookup, where an answer copies and where it cannot
MIN_FORM_GAIN = 1.5  # by the answers before over prompt lookup alone
PASSAGE = 48  # tokens that are repeated
FORCED = 1e4  # above every logit
TIMED_CALLS = 9  # of each length and graph, of which the median counts


class WrongDraft:
    """Always proposes, and is wrong unless chance wills otherwise."""

    costs_by_token = False

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        """Tokens that have nothing to do with the text."""
        return [(tokens[-1] + 7 * i) % 1000 + 1 for i in range(1, count + 1)]

    def forget(self, key: int) -> None:
        """It keeps nothing per sequence."""

    def close(self) -> None:
        """Nothing to free."""


class OracleDraft(WrongDraft):
    """Knows how each sequence goes on, and is wrong about every token with a fixed probability.

    Args:
        wrong: that probability, from 0 to 1.
        vocab_size: to be wrong within.
        seed: decides which tokens.
    """

    def __init__(self, wrong: float, vocab_size: int, seed: int = 0) -> None:
        self._wrong = wrong
        self._vocab_size = vocab_size
        self._generator = np.random.default_rng(seed)
        self._whole: dict[tuple[int, ...], list[int]] = {}

    def learn(self, prompt: Sequence[int], new: Sequence[int]) -> None:
        """Remember the continuation of ``prompt``."""
        wrong = self._generator.random(len(new)) < self._wrong
        self._whole[tuple(prompt)] = [*prompt, *((np.array(new) + wrong) % self._vocab_size).tolist()]

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        """The next tokens as it knows them."""
        whole = next((w for p, w in self._whole.items() if tuple(tokens[: len(p)]) == p), [])
        return whole[len(tokens) : len(tokens) + count]


def pair_of(name: str, plain: Sequence[GenerationResult], drafts: Sequence[GenerationResult]) -> dict[str, Any]:
    """Tokens per second of the same requests without drafts and with them, round by round, and what was drafted.

    ``gain`` is the median over rounds of the rate with drafts over that without.
    """
    rates = {
        key: [result.timings.decode_tokens_per_s for result in results]
        for key, results in (("plain", plain), ("drafts", drafts))
    }
    counts = {key: sum(getattr(result.metrics, key) for result in drafts) for key in ("accepted", "drafted")}
    return {"name": name, **rates, **counts, "gain": median_ratio(rates["drafts"], rates["plain"])}


def row(pair: dict[str, Any]) -> tuple[str, ...]:
    """Cells of the table."""
    share = f"{pair['accepted'] / pair['drafted']:.1%}" if pair["drafted"] else "-"
    medians = (f"{statistics.median(pair[key]):.1f}" for key in ("plain", "drafts"))
    return pair["name"], *medians, str(pair["drafted"]), share


def held_to(prompt: Sequence[int], new: Sequence[int]) -> Callable[[Sequence[int], np.ndarray], np.ndarray]:
    """A logits processor that makes ``new`` follow ``prompt``."""

    def force(so_far: Sequence[int], logits: np.ndarray) -> np.ndarray:
        logits[new[len(so_far) - len(prompt)]] = FORCED
        return logits

    return force


def greedy(new_tokens: int, speculates: bool) -> SamplingParams:
    """The most probable token each time, drafts or none."""
    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, speculate=speculates)


@contextmanager
def speculating(args: argparse.Namespace, drafter: Drafter) -> Iterator[Engine]:
    """An engine with a drafter that no option names."""
    options = {"determinism": args.determinism, "max_draft_tokens": args.max_draft_tokens}
    with patch("llmc.runtime.model.make_drafter", return_value=drafter), opened(args, **options) as model:
        yield model.engine


def compare(engine: Engine, name: str, make: Callable[[int, bool], Request], rounds: int) -> dict[str, Any]:
    """Run ``make(round, speculates)`` without and with drafts, in turns that begin with either; round 0 is untimed."""
    results: dict[bool, list[GenerationResult]] = {False: [], True: []}
    for i in range(rounds + 1):
        for speculates in (False, True) if i % 2 else (True, False):
            results[speculates].append(engine.submit(make(i, speculates)).result(LONGEST_WAIT))
    return pair_of(name, results[False][1:], results[True][1:])


def with_oracle(args: argparse.Namespace, oracle: OracleDraft) -> dict[str, Any]:
    """Drafts that are right four times in five."""
    prompts = [tokens(args.prompt, i) for i in range(args.rounds + 1)]
    recorded = []
    with speculating(args, oracle) as engine:
        for prompt in prompts:
            result = engine.submit(Request(prompt, greedy(args.new_tokens, False))).result(LONGEST_WAIT)
            oracle.learn(prompt, result.token_ids)
            recorded.append(result.token_ids)

        def make(i: int, speculates: bool) -> Request:
            held = held_to(prompts[i], recorded[i])
            return Request(prompts[i], greedy(args.new_tokens, speculates), logits_processors=(held,))

        return compare(engine, f"oracle, {1 - args.wrong:.0%} right", make, args.rounds)


def without_oracle(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Prompt lookup where the text repeats itself; then text that nobody can guess, with two drafters."""

    def repetitive(i: int, speculates: bool) -> Request:
        return Request(tokens(PASSAGE, i) * max(2, args.prompt // PASSAGE + 1), greedy(args.new_tokens, speculates))

    def free(i: int, speculates: bool) -> Request:
        params = greedy(args.free_tokens, speculates)
        return Request(tokens(args.prompt, 100 + i), replace(params, temperature=1.0, seed=i))

    for name, drafter, make in (
        ("prompt lookup, repetitive text", PromptLookup(), repetitive),
        ("prompt lookup, free text", PromptLookup(), free),
        ("always wrong, free text", WrongDraft(), free),
    ):
        with speculating(args, drafter) as engine:
            yield compare(engine, name, make, args.rounds)


def with_answers(args: argparse.Namespace) -> Found:
    """Prompt lookup on answers that copy, which the model is held to, and on answers of its own."""

    def pair(name: str, question: str, params: SamplingParams, answer: list[int] | None = None) -> dict[str, Any]:
        prompt = model.chat_tokens([{"role": "user", "content": question}])
        processors = () if answer is None else (held_to(prompt, answer),)

        def make(i: int, speculates: bool) -> Request:
            return Request(prompt, replace(params, speculate=speculates), logits_processors=processors)

        return compare(model.engine, name, make, args.rounds)

    with opened(args, draft="lookup", max_draft_tokens=args.max_draft_tokens, determinism=args.determinism) as model:
        pairs = []
        for name, (question, text) in COPYING.items():
            answer = model.tokenizer.encode(text, add_special_tokens=False)
            pairs.append(pair(name, question, greedy(len(answer), True), answer))
        free = replace(greedy(args.free_tokens, True), temperature=1.0, seed=0)
        pairs += [pair(name, question, free) for name, question in FREE.items()]
    targets = [MIN_COPYING_GAIN] * len(COPYING) + [MIN_ANSWERING_GAIN] * len(FREE)
    checks = [
        Check(f"{p['name']}: tokens per second, ratio", p["gain"], target)
        for p, target in zip(pairs, targets, strict=True)
    ]
    head = ("tokens per second", "without drafts", "with", "drafted", "accepted", "ratio, least to most")
    lines = [(*row(p), spread(p)) for p in pairs]
    return Found(checks, {"max_draft_tokens": args.max_draft_tokens, "pairs": pairs}, [(head, *lines)])


def with_forms(args: argparse.Namespace) -> Found:
    """Prompt lookup with a scope and without, where answers have one form; each round another question."""
    pairs = []
    with opened(args, draft="lookup", max_draft_tokens=args.max_draft_tokens, determinism=args.determinism) as model:
        for name in FORMS:

            def make(i: int, scoped: bool, name: str = name) -> Request:
                question, text = form_of(name, i)
                prompt = model.chat_tokens([{"role": "user", "content": question}])
                answer = model.tokenizer.encode(text, add_special_tokens=False)
                held = (held_to(prompt, answer),)
                return Request(
                    prompt, greedy(len(answer), True), logits_processors=held, draft_scope=name if scoped else None
                )

            pairs.append(compare(model.engine, name, make, args.rounds))
    checks = [Check(f"{p['name']}: tokens per second, ratio", p["gain"], MIN_FORM_GAIN) for p in pairs]
    head = ("tokens per second", "own text", "answers before, too", "drafted", "accepted", "ratio, least to most")
    lines = [(*row(p), spread(p)) for p in pairs]
    return Found(checks, {"max_draft_tokens": args.max_draft_tokens, "pairs": pairs}, [(head, *lines)])


def spread(pair: dict[str, Any]) -> str:
    """The least and the most of a pair's ratios, round by round."""
    ratios = [drafts / plain for drafts, plain in zip(pair["drafts"], pair["plain"], strict=True)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def verifications(model: Model, prompt: int, right: float) -> list[dict[str, float]]:
    """Milliseconds of calls of every draft length on either graph, and the best gain that they allow; 0 comes first."""
    session = model.runner.session
    session.cache.reserve(1, prompt + LENGTHS[-1] + 1)
    model.runner.prefill(tokens(prompt, 0))

    def milliseconds(phase: Phase, count: int) -> float:
        call = Batch(phase, np.array([tokens(count, 1)]), np.array([prompt]), np.arange(count)[None])
        times = []
        for _ in range(TIMED_CALLS + 2):  # the first ones allocate
            started = time.perf_counter()
            session.run(call)
            times.append(time.perf_counter() - started)
        return statistics.median(times[2:]) * 1e3

    single, rows = milliseconds(Phase.DECODE, 1), []
    for drafts in (0, *LENGTHS):
        decode, prefill = (milliseconds(phase, drafts + 1) for phase in (Phase.DECODE, Phase.PREFILL))
        gain = expected(drafts, right) * single / min(decode, prefill)
        rows.append({"drafts": drafts, "decode_ms": decode, "prefill_ms": prefill, "gain": gain})
    return rows


def measure(args: argparse.Namespace) -> Found:
    """All four comparisons, and the calls behind them; or the answers, or the forms."""
    if args.answers:
        return with_answers(args)
    if args.forms:
        return with_forms(args)
    with opened(args) as model:
        calls = verifications(model, args.prompt, 1 - args.wrong)
        oracle = OracleDraft(args.wrong, model.manifest.geometry.vocab_size)
    pairs = [with_oracle(args, oracle), *without_oracle(args)]
    targets = (MIN_GAIN.get(args.precision, 1.0), MIN_LOOKUP_GAIN, MIN_ON_FREE_TEXT, MIN_ON_FREE_TEXT)
    checks = [
        Check(f"{pair['name']}: tokens per second, ratio", pair["gain"], target)
        for pair, target in zip(pairs, targets, strict=True)
    ]
    setting = {"determinism": args.determinism, "max_draft_tokens": args.max_draft_tokens}
    rates = [("tokens per second", "without drafts", "with", "drafted", "accepted"), *map(row, pairs)]
    head = ("drafts per call", "decode graph, ms", "prefill graph, ms", f"best gain at {1 - args.wrong:.0%}")
    costs = [head, *((f"{drafts}", *(f"{v:.2f}" for v in rest)) for drafts, *rest in (c.values() for c in calls))]
    return Found(checks, {**setting, "pairs": pairs, "verifications": calls}, (rates, costs))


def main() -> None:
    """Print the figures."""
    run(
        measure,
        __doc__,
        rounds=5,
        prompt=(128, "tokens of prompts"),
        new_tokens=(256, "tokens to generate"),
        free_tokens=(512, "tokens to generate of free text"),
        wrong=(0.2, "probability that a token of the oracle is wrong"),
        max_draft_tokens=(31, "the engine's option"),
        answers=(False, "ask questions instead; the bundle is of an instruct model"),
        forms=(False, "ask for answers of one form instead; as with --answers"),
        determinism=("fast", "level: fast or strict"),
    )


if __name__ == "__main__":
    main()
