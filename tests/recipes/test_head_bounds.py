"""A first stage of the head rules out no row that is among the largest, and says how many it leaves."""

import numpy as np
import pytest


def planted() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    seen, states = (generator.normal(size=(n, 64)).astype(np.float32) for n in (96, 16))
    return seen, states, generator.normal(size=(500, 64)).astype(np.float32)


def test_every_proven_bound_holds(script):
    seen, states, head = planted()
    exact = states @ head.T
    proven = [stage for stage in script("head_bounds").stages(seen, states, head) if "no proof" not in stage[0]]
    assert len(proven) == 8
    for name, _, approximate, error in proven:
        assert (np.abs(exact - approximate) <= error * 1.0001 + 1e-3).all(), name  # float32 sums on both sides
        assert not (np.abs(exact - approximate) <= error / 100).all(), name  # planted: a bound that is none


@pytest.mark.parametrize(("k", "share"), [(1, 0.25), (2, 0.5), (3, 0.75)])
def test_survivors_are_counted(script, k, share):
    approximate = np.array([[4.0, 3.0, 2.0, 0.0]], np.float32)
    assert script("head_bounds").survivors(approximate, np.full((1, 4), 0.4, np.float32), k) == (share, share)
    assert script("head_bounds").survivors(approximate, np.full((1, 4), 9.0, np.float32), k) == (1.0, 1.0)
