"""Draws by weight: the same index as a running sum over all weights gives, whatever blocks are looked at first."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.sampling import draws
from llmc.runtime.sampling.draws import pick, pick_weighted, uniform, uniforms

# Points keep off the edges between two weights by this share of the sum, for two ways to add may round differently.
EDGE = 1e-9


def exact(weights: npt.NDArray[np.float32], point: float) -> int:
    return pick(weights.astype(np.float64).cumsum(), point)


def random_weights(seed: int, size: int, empty: float) -> npt.NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    weights = generator.exponential(size=size).astype(np.float32)
    weights[generator.random(size) < empty] = 0
    weights[generator.integers(size)] = 1
    return weights


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 2000), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.floats(0, 1))
def test_blocks_give_what_a_running_sum_gives(seed: int, size: int, empty: float, share: float) -> None:
    weights = random_weights(seed, size, empty)
    edges = weights.astype(np.float64).cumsum() / weights.sum(dtype=np.float64)
    point = min(share, 1 - EDGE)
    assert weights[pick_weighted(weights, point)] > 0
    if np.abs(edges - point).min() > EDGE:
        assert pick_weighted(weights, point) == exact(weights, point)


@pytest.mark.parametrize("place", [0, 255, 256, 511, 700])
def test_a_single_weight_is_always_drawn(place: int) -> None:
    weights = np.zeros(701, np.float32)
    weights[place] = 1e-30
    assert {pick_weighted(weights, point) for point in (0.0, 0.5, np.nextafter(1.0, 0.0))} == {place}


def test_a_block_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(0, 2000, 0)
    monkeypatch.setattr(draws, "pick", lambda sums, point: max(0, pick(sums, point) - 1))
    assert any(pick_weighted(weights, point) != exact(weights, point) for point in np.linspace(0, 0.99, 50))


def test_numbers_of_a_position_are_those_of_their_draws() -> None:
    numbers = uniforms(7, 123)
    assert [next(numbers) for _ in range(5)] == [uniform(7, 123, draw) for draw in range(5)]
