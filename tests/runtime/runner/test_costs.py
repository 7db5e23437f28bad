"""Seconds by shape of call: what was measured, what lies between, and what an interrupted call must not do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.runner.costs import OLD, StepCosts
from llmc.runtime.sessions import Phase

# Ten calls move the average past this share of a change that stays.
ADAPTED = 0.1
# Means of floats that are equal but for the last bits.
ROUNDING = 1e-9


def learnt(shapes: dict[tuple[int, int], float], phase: str = Phase.DECODE) -> StepCosts:
    costs = StepCosts()
    for (rows, tokens), seconds in shapes.items():
        for _ in range(5):
            costs.observe(phase, rows, tokens, seconds)
    return costs


def test_a_shape_that_was_seen_is_what_was_measured():
    costs = learnt({(1, 1): 0.010, (8, 1): 0.014, (1, 8): 0.030})
    assert costs.predict(Phase.DECODE, 8, 1) == pytest.approx(0.014, rel=ROUNDING)
    assert costs.predict(Phase.DECODE, 1, 8) == pytest.approx(0.030, rel=ROUNDING)


def test_shapes_between_and_beyond_lie_on_the_line_of_the_nearest_two():
    costs = learnt({(1, 4): 0.024, (1, 8): 0.026, (1, 16): 0.034})
    assert costs.predict(Phase.DECODE, 1, 6) == pytest.approx(0.025, rel=ROUNDING)
    assert costs.predict(Phase.DECODE, 1, 12) == pytest.approx(0.030, rel=ROUNDING)
    assert costs.predict(Phase.DECODE, 1, 20) == pytest.approx(0.038, rel=ROUNDING)
    assert costs.predict(Phase.DECODE, 1, 2) == pytest.approx(0.023, rel=ROUNDING)
    assert costs.predict(Phase.DECODE, 3, 2) == pytest.approx(0.025, rel=ROUNDING)


@given(
    st.dictionaries(st.tuples(st.integers(1, 8), st.integers(1, 300)), st.floats(1e-6, 10), min_size=1, max_size=12),
    st.integers(1, 8),
    st.integers(1, 600),
)
def test_every_prediction_is_positive_and_at_most_proportional(shapes, rows, tokens):
    predicted = learnt(shapes).predict(Phase.DECODE, rows, tokens)
    most = max(seconds * max(1.0, rows * tokens / (r * t)) for (r, t), seconds in shapes.items())
    assert predicted is not None
    assert 0 < predicted <= most * (1 + ROUNDING)


def test_an_interrupted_call_does_not_show():
    costs = learnt({(1, 1): 0.010})
    costs.observe(Phase.DECODE, 1, 1, 5.0)
    costs.observe(Phase.DECODE, 1, 1, 5.0)
    assert costs.predict(Phase.DECODE, 1, 1) == pytest.approx(0.010, rel=ROUNDING)


def test_calls_of_a_shape_are_counted_up_to_five():
    costs = StepCosts()
    counts = []
    for _ in range(7):
        counts.append(costs.count(Phase.DECODE, 1, 1))
        costs.observe(Phase.DECODE, 1, 1, 1.0)
    assert counts == [0, 1, 2, 3, 4, 5, 5]
    assert costs.count(Phase.DECODE, 1, 2) == 0


def test_of_calls_long_ago_only_one_counts_and_the_next_takes_their_place():
    costs = learnt({(1, 1): 1.0})
    for _ in range(OLD):
        costs.observe(Phase.PREFILL, 1, 8, 0.020)
    assert costs.count(Phase.DECODE, 1, 1) == 5
    costs.observe(Phase.PREFILL, 1, 8, 0.020)
    assert costs.count(Phase.DECODE, 1, 1) == 1
    assert costs.predict(Phase.DECODE, 1, 1) == pytest.approx(1.0, rel=ROUNDING)
    costs.observe(Phase.DECODE, 1, 1, 0.010)
    assert costs.predict(Phase.DECODE, 1, 1) == pytest.approx(0.010, rel=ROUNDING)
    assert costs.count(Phase.DECODE, 1, 1) == 1


def test_a_change_that_stays_shows_within_ten_calls():
    costs = learnt({(1, 1): 0.010})
    for _ in range(10):
        costs.observe(Phase.DECODE, 1, 1, 0.020)
    assert costs.predict(Phase.DECODE, 1, 1) == pytest.approx(0.020, rel=ADAPTED)
