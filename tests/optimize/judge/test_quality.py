"""The measures of quality, against transcriptions of their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmc.optimize.judge.quality import Tally, compare, negative_log_likelihood

# Nats: both sides compute in float64 from the same float32 logits, in another order.
TRANSCRIPTION_TOLERANCE = 1e-9


def transcribed_log_softmax(row: list[float]) -> list[float]:
    """Logarithm of the softmax, one number after the other, summed exactly."""
    largest = max(row)
    total = math.log(math.fsum(math.exp(x - largest) for x in row)) + largest
    return [x - total for x in row]


def transcribed_divergence(reference: list[float], candidate: list[float]) -> float:
    """KL(reference || candidate) in nats."""
    p, q = transcribed_log_softmax(reference), transcribed_log_softmax(candidate)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


shapes = st.tuples(st.integers(1, 4), st.integers(1, 40))
logits = arrays.arrays(np.float32, shapes, elements=st.floats(-60, 60, width=32))
pairs = shapes.flatmap(
    lambda shape: st.tuples(*[arrays.arrays(np.float32, shape, elements=st.floats(-60, 60, width=32))] * 2)
)


@settings(deadline=None)
@given(pairs)
def test_divergence_equals_its_transcription_and_is_never_negative(pair):
    reference, candidate = pair
    wanted = list(map(transcribed_divergence, reference.tolist(), candidate.tolist()))
    found, _ = compare(reference, candidate)
    np.testing.assert_allclose(found, wanted, atol=TRANSCRIPTION_TOLERANCE, rtol=0)
    assert found.min() >= -TRANSCRIPTION_TOLERANCE


@settings(deadline=None)
@given(logits, st.randoms(use_true_random=False))
def test_likelihood_equals_its_transcription(rows, random):
    targets = [random.randrange(rows.shape[1]) for _ in rows]
    wanted = -math.fsum(transcribed_log_softmax(row)[t] for row, t in zip(rows.tolist(), targets, strict=True))
    assert negative_log_likelihood(rows, np.array(targets)) == pytest.approx(wanted, abs=TRANSCRIPTION_TOLERANCE)


def test_a_tally_of_windows_is_that_of_the_whole():
    rng = np.random.default_rng(1)
    reference, candidate = (rng.normal(0, 2, (7, 11)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, 11, 7)
    tally = Tally()
    for span in (slice(0, 3), slice(3, 7)):
        tally.predict(candidate[span], targets[span])
        tally.compare(reference[span], candidate[span])
    rows = zip(map(transcribed_log_softmax, candidate.tolist()), targets, strict=True)
    assert tally.perplexity == pytest.approx(math.exp(-math.fsum(row[t] for row, t in rows) / 7))
    kl, same = compare(reference, candidate)
    assert tally.quality.mean_kl == pytest.approx(kl.mean())
    assert tally.quality.p99_kl == pytest.approx(np.percentile(kl, 99))
    assert tally.quality.top1_agreement == same.mean()


def test_a_planted_error_exceeds_the_transcription_tolerance():
    rng = np.random.default_rng(0)
    reference, candidate = (rng.normal(0, 1, (3, 20)).astype(np.float32) for _ in range(2))
    found = compare(reference, candidate)[0].sum()
    for p, q in ((candidate, reference), (reference, candidate + np.eye(3, 20, dtype=np.float32) * 1e-5)):
        wrong = math.fsum(map(transcribed_divergence, p.tolist(), q.tolist()))
        assert abs(found - wrong) > TRANSCRIPTION_TOLERANCE
