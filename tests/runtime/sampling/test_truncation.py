"""Truncations keep what transformers' warpers keep, and what the papers say, transcribed here in float64."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import RequestError
from llmc.runtime.sampling.truncation import (
    distribution,
    min_p,
    standard_deviation,
    top_k,
    top_n_sigma,
    top_p,
    typical,
)

# Relative distance from an edge (of mass, probability or logit) within which float32 may decide either way.
EDGE_TOLERANCE = 1e-5
# Nats by which float32 may misplace the entropy that typical measures deviations from.
CENTRE_TOLERANCE = 5e-6
# Float32 exponentials and their float64 sums, against float64 throughout; relative.
SUM_TOLERANCE = 1e-6

# What a large vocabulary does (candidates, bins, block maxima) starts above 2048 tokens.
SIZES = [1, 2, 3, 50, 1000, 2049, 5000]
PROBABILITIES = [0.05, 0.3, 0.7, 0.9, 0.99]

Truncation = Callable[[np.ndarray, float], np.ndarray]


def probabilities64(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def entropy64(p: np.ndarray) -> float:
    possible = p[p > 0]
    return float(-(possible * np.log(possible)).sum())


def mass_before(keys: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Of each token, the mass of those with a strictly smaller key."""
    order = np.argsort(keys, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(p[order])])
    return before[np.searchsorted(keys[order], keys, side="left")]


def kept_top_k(logits: np.ndarray, k: float) -> np.ndarray:
    return logits >= np.sort(logits)[-min(int(k), logits.size)]


def kept_top_p(logits: np.ndarray, mass: float) -> np.ndarray:
    return mass_before(-logits, probabilities64(logits)) < mass


def kept_min_p(logits: np.ndarray, ratio: float) -> np.ndarray:
    p = probabilities64(logits)
    return p >= min(ratio, 1.0) * p.max()


def kept_typical(logits: np.ndarray, mass: float, shift: float = 0.0) -> np.ndarray:
    p = probabilities64(logits)
    with np.errstate(divide="ignore"):
        deviations = np.abs(-np.log(p) - entropy64(p) + shift)
    return mass_before(deviations, p) < mass


def kept_top_n_sigma(logits: np.ndarray, n: float) -> np.ndarray:
    values = logits[np.isfinite(logits)].astype(np.float64)
    sigma = math.sqrt(float(((values - values.mean()) ** 2).mean()))
    return logits >= values.max() - n * sigma


def kept_by_transformers(name: str, logits: np.ndarray, value: float) -> np.ndarray:
    import torch
    from transformers.generation import logits_process

    warper = getattr(logits_process, name)(value)
    scores = torch.from_numpy(logits.copy())[None]
    return torch.isfinite(warper(torch.zeros(1, 0, dtype=torch.long), scores))[0].numpy()


RULES: dict[str, tuple[Truncation, Truncation, list[float], str | None]] = {
    "top_k": (top_k, kept_top_k, [1, 7, 50, 700, 4000], "TopKLogitsWarper"),
    "top_p": (top_p, kept_top_p, PROBABILITIES, "TopPLogitsWarper"),
    "min_p": (min_p, kept_min_p, [1e-3, 0.05, 0.3, 1.0], "MinPLogitsWarper"),
    "typical": (typical, kept_typical, PROBABILITIES, "TypicalLogitsWarper"),
    "top_n_sigma": (top_n_sigma, kept_top_n_sigma, [0.3, 1.0, 2.5], None),
}


def bounds(name: str, logits: np.ndarray, value: float) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that must stay and those that may, given what float32 cannot tell."""
    reference = RULES[name][1]
    if name == "top_k":
        kept = reference(logits, value) & (logits > -np.inf)
        return kept, kept
    near = [reference(logits, value * (1 + sign * EDGE_TOLERANCE)) for sign in (-1, 1)]
    if name == "typical":
        near += [kept_typical(logits, value, shift) for shift in (-CENTRE_TOLERANCE, CENTRE_TOLERANCE)]
    possible = logits > -np.inf
    return np.logical_and.reduce(near) & possible, np.logical_or.reduce(near) & possible


def agrees(name: str, logits: np.ndarray, value: float, kept: np.ndarray) -> bool:
    """Whether the tokens ``kept`` are those of the paper, up to what float32 cannot tell."""
    must, may = bounds(name, logits, value)
    return bool((kept | ~must).all() and (may | ~kept).all())


def truncate(rule: Truncation, logits: np.ndarray, value: float) -> np.ndarray:
    """Which tokens remain; checks that they keep their logits and that the others are -inf."""
    result = rule(logits.copy(), value)
    assert result.dtype == np.float32 and result.shape == logits.shape
    kept = result > -np.inf
    assert np.array_equal(result[kept], logits[kept]) and kept.any()
    return kept


def make_logits(size: int, deviation: float, seed: int, peaks: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    logits = random.normal(0.0, deviation, size)
    logits[random.integers(0, size, peaks)] += random.uniform(5.0, 15.0, peaks)
    return logits.astype(np.float32)


@st.composite
def some_logits(draw: st.DrawFn) -> np.ndarray:
    logits = make_logits(
        draw(st.sampled_from(SIZES)),
        draw(st.sampled_from([0.3, 1.0, 3.0, 20.0])),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from([0, 0, 1, 5])),
    )
    masked = draw(st.sampled_from([0.0, 0.0, 0.3, 0.98, 0.999]))
    peak = logits.argmax()
    hidden = np.random.default_rng(draw(st.integers(0, 99))).random(logits.size) < masked
    hidden[peak] = False
    logits[hidden] = -np.inf
    return logits


@pytest.mark.parametrize("name", RULES)
class TestEveryTruncation:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(logits=some_logits(), data=st.data())
    def test_keeps_what_the_paper_and_transformers_keep(
        self, name: str, logits: np.ndarray, data: st.DataObject
    ) -> None:
        rule, _, values, warper = RULES[name]
        value = data.draw(st.sampled_from(values))
        kept = truncate(rule, logits, value)
        assert agrees(name, logits, value, kept)
        values_of_tokens = logits[logits > -np.inf]
        has_ties = np.unique(values_of_tokens).size < values_of_tokens.size  # transformers cuts through some
        if warper and not has_ties and np.array_equal(*bounds(name, logits, value)):
            expected = kept_by_transformers(warper, logits, int(value) if name == "top_k" else value)
            assert np.array_equal(kept, expected)

    @pytest.mark.parametrize(("deviation", "peaks"), [(1.0, 0), (2.5, 20), (8.0, 0)])
    def test_keeps_it_on_a_real_vocabulary(self, name: str, deviation: float, peaks: int) -> None:
        rule, _, values, _ = RULES[name]
        logits = make_logits(151_936, deviation, 5, peaks)
        for value in values[1:-1]:
            assert agrees(name, logits, value, truncate(rule, logits, value))

    def test_at_another_value_fails_that_check(self, name: str) -> None:
        rule, _, values, _ = RULES[name]
        logits = make_logits(1000, 1.5, 1)
        others = [value + 1 if name == "top_k" else value * 0.98 for value in values]
        assert not all(
            agrees(name, logits, value, truncate(rule, logits, other))
            for value, other in zip(values, others, strict=True)
        )

    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(levels=st.integers(1, 6), size=st.sampled_from(SIZES), seed=st.integers(0, 9999), data=st.data())
    def test_keeps_equals_together(self, name: str, levels: int, size: int, seed: int, data: st.DataObject) -> None:
        rule, _, values, _ = RULES[name]
        value = data.draw(st.sampled_from(values))
        logits = np.random.default_rng(seed).integers(0, levels, size).astype(np.float32)
        kept = truncate(rule, logits, value)
        assert agrees(name, logits, value, kept)
        for level in np.unique(logits):
            assert np.unique(kept[logits == level]).size == 1

    @pytest.mark.parametrize("size", [1, 10, 3000])
    def test_keeps_the_only_possible_token(self, name: str, size: int) -> None:
        rule, _, values, _ = RULES[name]
        logits = np.full(size, -np.inf, np.float32)
        logits[size // 2] = -3.0
        for value in values:
            assert np.flatnonzero(truncate(rule, logits, value)).tolist() == [size // 2]

    @pytest.mark.parametrize("scale", [1e-30, 1e5, 1e30, 3e38])
    def test_takes_logits_of_any_finite_size(self, name: str, scale: float) -> None:
        rule, _, values, _ = RULES[name]
        logits = np.linspace(-1.0, 1.0, 3000, dtype=np.float32) * np.float32(scale)
        for value in values:
            assert truncate(rule, logits, value).any()

    @pytest.mark.parametrize(("bad", "what"), [(np.nan, "NaN"), (np.inf, r"\+inf"), (-np.inf, "all -inf")])
    def test_refuses_logits_without_a_peak(self, name: str, bad: float, what: str) -> None:
        rule, _, values, _ = RULES[name]
        with pytest.raises(RequestError, match=what):
            rule(np.full(10, bad, np.float32), values[0])


@pytest.mark.parametrize("rule", [top_k, top_p, min_p, top_n_sigma])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(logits=some_logits(), value=st.floats(1e-6, 1.0))
def test_the_peak_survives_all_but_typical(rule: Truncation, logits: np.ndarray, value: float) -> None:
    value = math.ceil(value * 10) if rule is top_k else value
    assert truncate(rule, logits, value)[logits.argmax()]


@pytest.mark.parametrize("rule", [top_p, typical])
@pytest.mark.parametrize("size", [10, 2049, 20_000])
@pytest.mark.parametrize("deviation", [0.0, 1.0, 40.0])
@pytest.mark.parametrize("missing", [2.0**-53, 1e-12, 1e-8])
def test_a_mass_just_below_1_keeps_all_that_holds_it(
    rule: Truncation, size: int, deviation: float, missing: float
) -> None:
    logits = make_logits(size, deviation, 2)
    p = probabilities64(logits)
    assert p[~truncate(rule, logits, 1 - missing)].sum() <= missing + EDGE_TOLERANCE * missing + 2.0**-50


@pytest.mark.parametrize("rule", [top_p, typical])
@pytest.mark.parametrize("size", [10, 2049, 20_000])
def test_a_mass_just_above_0_keeps_one(rule: Truncation, size: int) -> None:
    assert truncate(rule, make_logits(size, 1.0, 2), 1e-300).sum() == 1


def test_typical_cuts_a_peak_that_is_too_predictable() -> None:
    p = np.array([0.3] + [0.07] * 10)  # entropy 2.22, surprises 1.20 and 2.66
    kept = truncate(typical, np.log(p).astype(np.float32), 0.5)
    assert kept.tolist() == [False] + [True] * 10


def test_top_n_sigma_is_of_the_whole_population() -> None:
    logits = np.array([2.0, 0.0], np.float32)  # deviation 1 for the population, 1.41 for a sample
    assert standard_deviation(logits) == 1.0
    assert truncate(top_n_sigma, logits, 1.9).tolist() == [True, False]
    assert truncate(top_n_sigma, logits, 2.0).tolist() == [True, True]


class TestDistribution:
    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(logits=some_logits())
    def test_has_the_sums_of_float64(self, logits: np.ndarray) -> None:
        found, p = distribution(logits), probabilities64(logits)
        np.testing.assert_allclose(found.weights / found.total, p, rtol=1e-5, atol=1e-30)
        assert found.total == pytest.approx(1 / p.max(), rel=SUM_TOLERANCE)
        expected = entropy64(p) + math.log(p.max())
        assert found.mean_distance() == pytest.approx(expected, rel=SUM_TOLERANCE, abs=SUM_TOLERANCE)

    def test_with_one_token_more_fails_that_check(self) -> None:
        logits = make_logits(5000, 1.0, 0)
        p = probabilities64(np.append(logits, np.float32(0)))
        assert distribution(logits).total != pytest.approx(1 / p.max(), rel=SUM_TOLERANCE)
