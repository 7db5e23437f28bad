"""Prompt lookup on recorded answers and measured costs: where it wins, and what it costs elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.runner.costs import StepCosts
from llmc.runtime.sessions import Phase
from llmc.runtime.speculation import control, speculator
from llmc.runtime.speculation.control import LENGTHS, DraftLength, Ledger
from llmc.runtime.speculation.drafters import PromptLookup
from llmc.runtime.speculation.speculator import Speculator

RECORDED = Path(__file__).parent.parent / "data" / "speculation_texts.json"
# Speed against steps without drafts: what we promise where nothing is copied. Where an answer copies we want
# 2; the summary is short (71 tokens), and of the others the least has 4.0.
LEAST, LEAST_COPYING, LEAST_SUMMARY = 0.98, 2.0, 1.3
# Seconds of a step and of verifications of 1, 3, ... 31 drafts on two threads: measured of the first two, estimated of
# the others.
MACHINES = {
    "135M, int4": (4.81e-3, (5.28, 6.83, 8.51, 9.97, 11.39, 12.78, 15.43, 18.3)),
    "0.5B, int4": (9.66e-3, (10.05, 12.64, 15.42, 18.71, 24.64, 28.45, 35.07, 43.65)),
    "0.5B, int8": (14.4e-3, tuple(22.5 + 0.5 * length for length in LENGTHS)),
    "0.5B, int4, verified by the graph of int8": (10.0e-3, tuple(22.5 + 0.5 * length for length in LENGTHS)),
}
LOOK = 7e-6  # of each reading of the clock: a look takes two to four of them


STEP = 0.01  # seconds


class Clock:
    """Passes while it is read, as it does in a drafter."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += LOOK
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speculator, "perf_counter", clock)
    return clock


@pytest.fixture(scope="module")
def texts() -> dict[str, Any]:
    content: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return content["texts"]


def speed(machine: str, text: dict[str, Any], clock: Clock, engine: tuple[StepCosts, Ledger] | None = None) -> float:
    """Against steps without drafts; of an engine's first request unless there is one that served others."""
    (step, calls), (costs, ledger) = MACHINES[machine], engine or (StepCosts(), Ledger())
    seconds = {length: milliseconds * 1e-3 for length, milliseconds in zip(LENGTHS, calls, strict=True)}
    costs.observe(Phase.PREFILL, 1, 256, 6 * seconds[LENGTHS[-1]])
    lookup = PromptLookup()
    own = Speculator(0, lookup, costs, DraftLength(costs, type(lookup).__name__, ledger=ledger))
    whole, length, took = text["prompt"] + text["new"], len(text["prompt"]) + 1, 0.0
    while length < len(whole):
        before = clock.now
        drafts = own.drafts(whole[:length], len(whole) - length - 1)
        took += clock.now - before
        coming = whole[length : length + len(drafts)]
        right = next((i for i, (a, b) in enumerate(zip(drafts, coming, strict=True)) if a != b), len(drafts))
        call = seconds[len(drafts)] if drafts else step
        costs.observe(Phase.PREFILL if drafts else Phase.DECODE, 1, len(drafts) + 1, call)
        own.note_committed(len(drafts), right + 1)
        took, length = took + call, length + right + 1
    return (len(text["new"]) - 1) * step / took


@pytest.mark.parametrize("machine", MACHINES)
def test_answers_that_copy_nothing_cost_less_than_two_percent(machine, texts, clock):
    free = {name: speed(machine, text, clock) for name, text in texts.items() if name.startswith("free")}
    assert len(free) > 5
    assert min(free.values()) > LEAST


@pytest.mark.parametrize("machine", MACHINES)
def test_answers_that_copy_are_faster(machine, texts, clock):
    copying = {name: speed(machine, text, clock) for name, text in texts.items() if name.startswith("held")}
    assert copying.pop("held summary") > LEAST_SUMMARY
    assert min(copying.values()) > LEAST_COPYING


def test_without_stakes_and_margin_more_is_lost(texts, clock, monkeypatch):
    """Planted."""
    monkeypatch.setattr(control, "STAKE", 1e9)
    monkeypatch.setattr(control, "MARGIN", 0.5)
    monkeypatch.setattr(control, "LENIENCE", 0.5)
    machine = "0.5B, int4, verified by the graph of int8"
    assert min(speed(machine, text, clock) for name, text in texts.items() if name.startswith("free")) < LEAST


@pytest.mark.parametrize(("right", "reads"), [(False, range(1, 4)), (True, range(20, 21))])
def test_a_draft_model_that_never_wins_reads_few_prompts(right, reads, clock):
    """20 answers of 100 tokens to prompts that take 8 steps to read: 6 tokens' worth, and 0.5 % of these."""

    class Model:
        costs_by_token, watch = True, None

        def propose(self, key: int, tokens: list[int], count: int) -> list[int]:
            clock.now += STEP / 4 * count if key in read else 8 * STEP
            read.add(key)
            return [key if right else -1] * count

        def forget(self, key: int) -> None:
            """It keeps nothing."""

    read, costs, ledger = set[int](), StepCosts(), Ledger()
    for key in range(20):
        own, tokens = Speculator(key, Model(), costs, DraftLength(costs, "Model", ledger=ledger)), [key] * 50
        while len(tokens) < 150:
            drafts = own.drafts(tokens, 200)
            costs.observe(Phase.PREFILL if drafts else Phase.DECODE, 1, len(drafts) + 1, STEP * (1 + len(drafts) / 10))
            came = 1 + (len(drafts) if right else 0)
            own.note_committed(len(drafts), came)
            tokens += [key] * came
    assert len(read) in reads
