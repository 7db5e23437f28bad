"""The graph of shared steps follows the seconds of this machine, whatever was assumed, and follows when they change."""

import itertools

import pytest

from llmc.runtime.runner.graph_choice import PAIRS, STEPS_BETWEEN, GraphChoice, other
from llmc.runtime.sessions import Phase

ROWS = 6
SECONDS = {Phase.DECODE: 0.02, Phase.PREFILL: 0.03}


def taken(choice: GraphChoice, seconds: dict[Phase, float], steps: int, rows: int = ROWS) -> list[Phase]:
    """The graphs of so many steps, which take as long as their graph does."""
    found = []
    for _ in range(steps):
        found.append(choice.next(rows))
        choice.observe(found[-1], rows, seconds[found[-1]])
    return found


@pytest.mark.parametrize("assumed", [1, ROWS + 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("fast", Phase)
def test_a_few_pairs_decide_and_the_slower_graph_rests(assumed: int, fast: Phase):
    choice = GraphChoice(assumed)
    taken(choice, {fast: 0.02, other(fast): 0.03}, 2 * PAIRS)
    assert choice.best(ROWS) is fast
    assert set(taken(choice, {fast: 0.02, other(fast): 0.03}, STEPS_BETWEEN - 2)) == {fast}


def test_steps_of_a_pair_follow_one_another():
    found = taken(GraphChoice(ROWS + 1), SECONDS, 2 * PAIRS)
    assert found == [Phase.DECODE, Phase.PREFILL] * PAIRS


def test_one_interrupted_step_decides_nothing():
    choice = GraphChoice(ROWS + 1)
    choice.observe(choice.next(ROWS), ROWS, 10.0)
    taken(choice, SECONDS, 2 * PAIRS)
    assert choice.best(ROWS) is Phase.DECODE


def test_a_difference_that_is_noise_changes_nothing():
    for assumed, expected in ((1, Phase.PREFILL), (ROWS + 1, Phase.DECODE)):
        choice = GraphChoice(assumed)
        taken(choice, {Phase.DECODE: 0.0200, Phase.PREFILL: 0.0199 if expected is Phase.DECODE else 0.0201}, 50)
        assert choice.best(ROWS) is expected


def test_a_machine_that_changes_is_noticed():
    choice = GraphChoice(ROWS + 1)
    taken(choice, SECONDS, 2 * PAIRS)
    changed = {Phase.DECODE: 0.03, Phase.PREFILL: 0.02}
    steps = itertools.takewhile(lambda _: choice.best(ROWS) is Phase.DECODE, itertools.count())
    count = sum(len(taken(choice, changed, 1)) for _ in steps)
    assert count <= PAIRS * (STEPS_BETWEEN + 2)


def test_each_number_of_rows_is_decided_on_its_own():
    choice = GraphChoice(ROWS)
    taken(choice, SECONDS, 2 * PAIRS)
    assert choice.best(ROWS) is Phase.DECODE
    assert choice.best(ROWS + 1) is Phase.PREFILL is choice.assumed(ROWS)
