"""The steps in which the cache grows."""

import pytest

from llmc.runtime.kv.budget import FIRST_STEP, LARGE_STEP, next_capacity

UNBOUNDED = 1 << 40


@pytest.mark.parametrize(
    ("needed", "maximum", "capacity"),
    [
        (1, 32768, 256),
        (256, 32768, 256),
        (257, 32768, 512),
        (1024, 32768, 1024),
        (1025, 32768, 2048),
        (2049, 32768, 3072),
        (32768, 32768, 32768),
        (1, 100, 100),
        (100, 100, 100),
        (1000, 1000, 1000),
        (1025, 1030, 1030),
    ],
)
def test_capacity_is_the_next_step_or_the_maximum(needed: int, maximum: int, capacity: int):
    assert next_capacity(needed, maximum) == capacity


def test_there_is_room_for_what_is_needed_and_less_than_a_step_more():
    for needed in range(1, 5000):
        spare = next_capacity(needed, UNBOUNDED) - needed
        assert 0 <= spare < (FIRST_STEP if needed <= LARGE_STEP else LARGE_STEP)


def test_capacity_never_shrinks_as_a_sequence_gets_longer():
    capacities = [next_capacity(needed, 5000) for needed in range(1, 5001)]
    assert capacities == sorted(capacities)
    assert capacities[-1] == 5000


def test_few_growths_lead_to_a_long_context():
    """Every growth copies the cache."""
    assert len({next_capacity(needed, 32768) for needed in range(1, 32769)}) == 4 + 31
