"""Truncations keep what transformers' warpers keep, and what the papers say, transcribed here in float64."""

import math
from collections.abc import Callable, Collection

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.sampling.logits import largest
from llmc.runtime.sampling.truncation import min_p, top_n_sigma, top_p, typical_p, xtc

# Relative distance from an edge (of mass, probability or logit) within which float32 may decide either way.
EDGE_TOLERANCE = 1e-5
# Nats by which float32 may misplace the entropy that deviations are measured from, and each of them.
CENTRE_TOLERANCE = 5e-6

# What a large vocabulary does (block maxima, parts of the weights) starts above 2048 tokens.
SIZES = [1, 2, 50, 2049, 5000]
PROBABILITIES = [0.05, 0.3, 0.7, 0.9, 0.99]

Truncation = Callable[[np.ndarray, float], np.ndarray]


def probabilities64(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


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


def kept_typical_p(logits: np.ndarray, mass: float, shift: float = 0.0) -> np.ndarray:
    p = probabilities64(logits)
    with np.errstate(divide="ignore"):
        surprises = -np.log(p)
    entropy = (p[p > 0] * surprises[p > 0]).sum()
    return mass_before(np.abs(surprises - entropy + shift), p) < mass


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
    "top_k": (largest, kept_top_k, [1, 7, 50, 700, 4000], "TopKLogitsWarper"),
    "top_p": (top_p, kept_top_p, PROBABILITIES, "TopPLogitsWarper"),
    "min_p": (min_p, kept_min_p, [1e-3, 0.05, 0.3, 1.0], "MinPLogitsWarper"),
    "typical_p": (typical_p, kept_typical_p, PROBABILITIES, "TypicalLogitsWarper"),
    "top_n_sigma": (top_n_sigma, kept_top_n_sigma, [0.3, 1.0, 2.5], None),
}


def bounds(name: str, logits: np.ndarray, value: float) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that must stay and those that may, given what float32 cannot tell."""
    reference = RULES[name][1]
    if name == "top_k":
        kept = reference(logits, value) & (logits > -np.inf)
        return kept, kept
    near = [reference(logits, value * (1 + sign * EDGE_TOLERANCE)) for sign in (-1, 1)]
    if name == "typical_p":
        near += [kept_typical_p(logits, value, shift) for shift in (-CENTRE_TOLERANCE, CENTRE_TOLERANCE)]
    possible = logits > -np.inf
    return np.logical_and.reduce(near) & possible, np.logical_or.reduce(near) & possible


def agrees(name: str, logits: np.ndarray, value: float, kept: np.ndarray) -> bool:
    """Whether the tokens ``kept`` are those of the paper, up to what float32 cannot tell."""
    must, may = bounds(name, logits, value)
    return bool((kept | ~must).all() and (may | ~kept).all())


def truncate(rule: Truncation, logits: np.ndarray, value: float) -> np.ndarray:
    """Tells which possible tokens remain; checks that there is one, and that the logits stay as they are."""
    before = logits.copy()
    kept = np.zeros(logits.size, np.bool_)
    kept[rule(logits, int(value) if rule is largest else value)] = True
    assert np.array_equal(logits, before) and (kept[logits.argmax()] or rule is typical_p)
    return kept & (logits > -np.inf)


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
    def test_keeps_what_the_paper_and_transformers_keep(self, name, logits, data):
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
    def test_keeps_it_on_a_real_vocabulary(self, name, deviation, peaks):
        rule, _, values, _ = RULES[name]
        logits = make_logits(151_936, deviation, 5, peaks)
        for value in values[1:-1]:
            assert agrees(name, logits, value, truncate(rule, logits, value))

    def test_at_another_value_fails_that_check(self, name):
        rule, _, values, _ = RULES[name]
        logits = make_logits(1000, 1.5, 1)
        others = [value + 1 if name == "top_k" else value * 0.98 for value in values]
        assert not all(
            agrees(name, logits, value, truncate(rule, logits, other))
            for value, other in zip(values, others, strict=True)
        )

    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(levels=st.integers(1, 6), size=st.sampled_from(SIZES), seed=st.integers(0, 9999), data=st.data())
    def test_keeps_equals_together(self, name, levels, size, seed, data):
        rule, _, values, _ = RULES[name]
        value = data.draw(st.sampled_from(values))
        logits = np.random.default_rng(seed).integers(0, levels, size).astype(np.float32)
        kept = truncate(rule, logits, value)
        assert agrees(name, logits, value, kept)
        for level in np.unique(logits):
            assert np.unique(kept[logits == level]).size == 1

    @pytest.mark.parametrize("size", [1, 10, 3000])
    def test_keeps_the_only_possible_token(self, name, size):
        rule, _, values, _ = RULES[name]
        logits = np.full(size, -np.inf, np.float32)
        logits[size // 2] = -3.0
        for value in values:
            assert np.flatnonzero(truncate(rule, logits, value)).tolist() == [size // 2]

    @pytest.mark.parametrize("scale", [1e-30, 1e5, 1e30, 3e38])
    def test_takes_logits_of_any_finite_size(self, name, scale):
        rule, _, values, _ = RULES[name]
        logits = np.linspace(-1.0, 1.0, 3000, dtype=np.float32) * np.float32(scale)
        for value in values:
            assert truncate(rule, logits, value).any()


@pytest.mark.parametrize("rule", [top_p, typical_p])
@pytest.mark.parametrize("size", [10, 20_000])
@pytest.mark.parametrize("deviation", [0.0, 1.0, 40.0])
@pytest.mark.parametrize("missing", [2.0**-53, 1e-8])
def test_a_mass_just_below_1_keeps_all_that_holds_it(rule, size, deviation, missing):
    logits = make_logits(size, deviation, 2)
    p = probabilities64(logits)
    assert p[~truncate(rule, logits, 1 - missing)].sum() <= missing + EDGE_TOLERANCE * missing + 2.0**-50


@pytest.mark.parametrize("rule", [top_p, typical_p])
@pytest.mark.parametrize("size", [10, 20_000])
def test_a_mass_just_above_0_keeps_one(rule, size):
    assert truncate(rule, make_logits(size, 1.0, 2), 1e-300).sum() == 1


def test_typical_p_cuts_a_peak_that_is_too_predictable():
    p = np.array([0.3] + [0.07] * 10)  # entropy 2.22, surprises 1.20 and 2.66
    assert truncate(typical_p, np.log(p).astype(np.float32), 0.5).tolist() == [False] + [True] * 10


def test_top_n_sigma_is_of_the_whole_population():
    logits = np.array([2.0, 0.0], np.float32)  # deviation 1 for the population, 1.41 for a sample
    assert truncate(top_n_sigma, logits, 1.9).tolist() == [True, False]
    assert truncate(top_n_sigma, logits, 2.0).tolist() == [True, True]


def transcription(logits: np.ndarray, threshold: float, protected: Collection[int]) -> np.ndarray:
    """The author's code: sort; each token whose next one reaches the threshold goes, unless one is protected."""
    p = probabilities64(logits)
    order = sorted(range(p.size), key=lambda token: -p[token])
    removed = [order[rank] for rank in range(p.size - 1) if p[order[rank + 1]] >= threshold]
    kept = np.ones(p.size, np.bool_)
    if not set(removed) & set(protected):
        kept[removed] = False
    return kept


def run_xtc(logits: np.ndarray, threshold: float, protected: Collection[int] = ()) -> np.ndarray:
    return xtc(np.arange(logits.size), logits, threshold, protected)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    size=st.sampled_from([1, 2, 5, 50, 3000]),
    deviation=st.sampled_from([0.1, 1.0, 3.0, 6.0]),
    seed=st.integers(0, 9999),
    threshold=st.sampled_from([1e-4, 0.02, 0.1, 0.3, 0.5]),
    protected=st.sampled_from([(), (0,), (1, 3)]),
)
def test_xtc_equals_the_transcription(size, deviation, seed, threshold, protected):
    logits = make_logits(size, deviation, seed)
    if np.any(np.abs(probabilities64(logits) / threshold - 1) < EDGE_TOLERANCE):
        return
    assert np.array_equal(run_xtc(logits, threshold, protected), transcription(logits, threshold, protected))


def test_xtc_of_another_threshold_fails_that_check():
    logits = make_logits(50, 3.0, 0)
    assert not np.array_equal(run_xtc(logits, 0.09), transcription(logits, 0.03, ()))


@pytest.mark.parametrize(
    ("logits", "threshold", "kept"),
    [
        ([2.0, 1.0, 1.0, -9.0], 0.1, [False, True, True, True]),  # all of several that are the least probable
        ([0.0, 0.0], 0.5, [True, True]),
        ([2.0, -np.inf, 1.0, -np.inf], 0.0, [False, True, True, True]),  # impossible tokens are no choices
        ([9.0, 0.0, -1.0], 0.1, [True, True, True]),  # a single choice
    ],
)
def test_xtc_keeps_the_least_probable_of_the_choices(logits, threshold, kept):
    assert run_xtc(np.array(logits, np.float32), threshold).tolist() == kept
