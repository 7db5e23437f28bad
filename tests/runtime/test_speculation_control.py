"""The draft length against simulated text and machines: it finds what pays, and costs little where nothing does."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.runner.costs import StepCosts
from llmc.runtime.sessions import Phase
from llmc.runtime.speculation.control import ALLOWANCE, LENGTHS, SHARED_STAKE, STAKE, DraftLength, Ledger

# Share of the time without speculation that may be lost on text that nobody can guess: what issue 14 asks for.
MOST_LOST = 0.02
# Tokens: sums of floats.
EXACT = 1e-6
# Of the best fixed length's speed that the controller has to reach: lengths near the best are as good as it, and where
# a verification costs 2.3 steps, as it does for INT4_ON_W8A8, one lost stake makes it wait.
NEARLY_BEST = 0.85


@dataclass(frozen=True)
class Machine:
    """Seconds of a step without drafts, of a call that verifies so many tokens, and of drafting."""

    plain: float
    call: float
    per_token: float
    per_draft: float = 0.0

    def verify(self, tokens: int) -> float:
        return self.call + self.per_token * tokens

    def gain(self, a: float, length: int) -> float:
        expected = sum(a**i for i in range(length + 1))
        return expected * self.plain / (self.verify(length + 1) + self.per_draft * length)


# Measured on a model of half a billion parameters with two threads, in milliseconds.
INT4_ON_W8A8 = Machine(10.0, 22.0, 0.5)
INT4 = Machine(10.0, 10.0, 4.5)
INT8 = Machine(14.4, 22.0, 0.5)
DRAFT_MODEL = Machine(14.4, 22.0, 0.5, 2.0)
INT4_ON_VNNI = Machine(9.7, 8.0, 1.4)
MACHINES = [INT4_ON_W8A8, INT4, INT8, DRAFT_MODEL, INT4_ON_VNNI]


@dataclass
class Run:
    """What a simulated sequence took."""

    tokens: int = 0
    seconds: float = 0.0
    lengths: Counter[int] = field(default_factory=Counter)


def simulate(
    machine: Machine,
    acceptance: Callable[[int], float],
    tokens: int,
    seed: int,
    make: Callable[[StepCosts], DraftLength] = DraftLength,
    watch: bool = False,
    costs: StepCosts | None = None,
) -> Run:
    costs, run, random = costs or StepCosts(), Run(), np.random.default_rng(seed)
    control = make(costs)
    costs.observe(Phase.PREFILL, 1, 256, machine.verify(256))  # the prompt
    while run.tokens < tokens:
        length = control.length()
        length = control.keep(length) if length else 0
        run.lengths[length] += 1
        right = (random.random(max(length, 3)) < acceptance(run.tokens)).tolist()
        if not length:
            run.seconds += machine.plain
            run.tokens += 1
            costs.observe(Phase.DECODE, 1, 1, machine.plain * random.normal(1, 0.03))
            control.plain()
            if watch and not run.tokens % 3:
                control.note_watched(3, right[:3].index(False) if False in right[:3] else 3)
            continue
        accepted = right.index(False) if False in right[:length] else length
        draft, verify = machine.per_draft * length, machine.verify(length + 1)
        run.seconds += draft + verify
        run.tokens += accepted + 1
        costs.observe(Phase.PREFILL, 1, length + 1, verify * random.normal(1, 0.03))
        costs.observe("draft", 1, length, draft)
        control.note_verified(length, accepted)
    return run


def speed(machine: Machine, run: Run) -> float:
    """Against steps without drafts."""
    return run.tokens * machine.plain / run.seconds


def fixed(length: int) -> Callable[[StepCosts], DraftLength]:
    """A controller that always drafts so many."""

    class Fixed(DraftLength):
        def length(self, rows: int = 1) -> int:
            return length

        def keep(self, had: int, rows: int = 1) -> int:
            return had

    return Fixed


class NeverStops(DraftLength):
    def length(self, rows: int = 1) -> int:
        return 3

    def keep(self, had: int, rows: int = 1) -> int:
        return had


@pytest.mark.parametrize("machine", MACHINES)
def test_at_80_percent_acceptance_it_is_nearly_as_fast_as_the_best_fixed_length(machine):
    speeds, best = [], []
    for seed in range(2):
        speeds.append(speed(machine, simulate(machine, lambda _: 0.8, 1000, seed, watch=True)))
        best.append(max(speed(machine, simulate(machine, lambda _: 0.8, 1000, seed, fixed(n))) for n in (0, *LENGTHS)))
    assert np.mean(speeds) > NEARLY_BEST * np.mean(best)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("acceptance", [0.0, 0.3])
@pytest.mark.parametrize("watch", [False, True])
def test_text_that_nobody_can_guess_costs_less_than_two_percent(machine, acceptance, watch):
    for tokens, seeds in ((128, 8), (1000, 2)):
        speeds = [speed(machine, simulate(machine, lambda _: acceptance, tokens, s, watch=watch)) for s in range(seeds)]
        assert np.mean(speeds) > 1 - MOST_LOST


@pytest.mark.parametrize("machine", MACHINES)
def test_a_controller_that_never_stops_loses_more_than_two_percent(machine):
    assert speed(machine, simulate(machine, lambda _: 0.1, 1000, 0, NeverStops)) < 1 - MOST_LOST


def of_short_requests(machine: Machine, acceptance: float, ledger: Ledger | None) -> float:
    """Speed over requests of 32 tokens, which share the ledger if there is one."""
    engine = StepCosts()
    runs = [
        simulate(machine, lambda _: acceptance, 32, seed, lambda costs: DraftLength(costs, ledger=ledger), costs=engine)
        for seed in range(40)
    ]
    return sum(run.tokens for run in runs) * machine.plain / sum(run.seconds for run in runs)


@pytest.mark.parametrize("machine", MACHINES)
def test_many_short_requests_pay_for_their_trials_together(machine):
    assert of_short_requests(machine, 0.1, Ledger()) > 1 - MOST_LOST
    assert of_short_requests(machine, 0.1, None) < 1 - MOST_LOST  # planted: each for itself


@pytest.mark.parametrize("machine", [INT4_ON_W8A8, INT8, DRAFT_MODEL])
def test_text_that_begins_to_repeat_itself_is_noticed(machine):
    late = 200

    def acceptance(position: int) -> float:
        return 0.05 if position < 600 else 0.95

    for seed in range(2):
        before = simulate(machine, acceptance, 600 + late, seed, watch=True)
        after = simulate(machine, acceptance, 1600 + late, seed, watch=True)
        gained = (after.tokens - before.tokens) * machine.plain / (after.seconds - before.seconds)
        assert gained > 2.0


def settled(machine: Machine, rows: tuple[int, ...] = (1,)) -> StepCosts:
    """All costs known."""
    costs = StepCosts()
    for _ in range(5):
        for count in rows:
            costs.observe(Phase.DECODE, count, 1, machine.plain)
        for length in LENGTHS:
            costs.observe(Phase.PREFILL, 1, length + 1, machine.verify(length + 1))
    return costs


def test_nothing_is_drafted_before_the_cost_of_a_step_is_known():
    costs = StepCosts()
    costs.observe(Phase.PREFILL, 1, 256, 0.300)
    control = DraftLength(costs)
    assert control.length() == 0
    costs.observe(Phase.DECODE, 1, 1, 0.010)
    assert control.length() > 0


def test_a_step_without_drafts_is_measured_now_and_then():
    control = DraftLength(settled(Machine(10.0, 8.0, 0.5)))
    for _ in range(64):
        assert control.length() > 0
        control.note_verified(3, 3)
    assert control.length() == 0
    control.plain()
    assert control.length() > 0


# What a drafter does that knows the policy: how many it has of 31 drafts, and how many of them are right.
Moves = list[list[tuple[int, int]]]
MOVES = st.lists(st.tuples(st.integers(1, 31), st.integers(0, 31)), max_size=200)


def lost(machine: Machine, sequences: Moves, ledger: Ledger | None = None) -> tuple[float, float, int]:
    """Tokens' worth of time that the sequences of an engine lose, the most that one of them does at any time beyond its
    share of the tokens, and how many tokens come without drafts."""
    costs, ledger, worst, plain, total = settled(machine), ledger or Ledger(), 0.0, 0, 0.0
    for moves in sequences:
        control, own, alone = DraftLength(costs, ledger=ledger), 0.0, 0
        for had, right in moves:
            if length := control.keep(had):
                accepted = min(right, length)
                own += machine.verify(length + 1) / machine.plain - (1 + accepted)
                control.note_verified(length, accepted)
            else:
                control.plain()
                alone += 1
            worst = max(worst, own - ALLOWANCE * alone)
        total, plain = total + own, plain + alone
    return total, worst, plain


@pytest.mark.parametrize("machine", [INT4_ON_W8A8, INT4, INT8, INT4_ON_VNNI])
@given(sequences=st.lists(MOVES, max_size=6))
def test_even_a_drafter_that_knows_the_policy_costs_a_stake_at_most_and_half_a_percent(machine, sequences):
    total, worst, plain = lost(machine, sequences)
    assert worst <= STAKE + EXACT
    assert total <= SHARED_STAKE + ALLOWANCE * plain + EXACT
