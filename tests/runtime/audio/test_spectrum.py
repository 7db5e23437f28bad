"""Spectra of audio."""

import numpy as np
import pytest
from doubles import asr

from llmc.bundle.model.audio import Spectrum
from llmc.runtime.audio.spectrum import compute_spectrum, make_bands

# As published.
SPECTRUM = Spectrum(rate=16_000, bands=128, frame=400, hop=160, least=8000)
# Of values about -1 to 1.5: float32 transforms of another library, 1e-6 here, and rounding near the floor.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def extract():
    transformers = pytest.importorskip("transformers.models.qwen3_asr.feature_extraction_qwen3_asr")
    found = transformers.Qwen3ASRFeatureExtractor()
    return lambda samples: found(samples, sampling_rate=16_000, padding=True, return_attention_mask=True)


@pytest.mark.parametrize("seconds", [0.01, 0.5, 1.005, 12.34])
def test_it_is_that_of_transformers(extract, seconds):
    samples = asr.hum(seconds)
    made, found = extract(samples), compute_spectrum(samples, SPECTRUM)
    assert found.shape == (128, int(made["attention_mask"].sum()))
    expected = made["input_features"][0].numpy()
    assert np.abs(found - expected[:, : found.shape[1]]).max() < TOLERANCE
    assert not expected[:, found.shape[1] :].any()  # zeros behind the last frame, as the tower's inputs have them


def test_silence_and_the_loudest_samples_have_finite_values():
    for samples in (np.zeros(9000, np.float32), np.full(9000, 1e6, np.float32)):
        assert np.isfinite(compute_spectrum(samples, SPECTRUM)).all()


def test_a_tone_is_in_its_band():
    tone = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000).astype(np.float32)
    loudest = compute_spectrum(tone, SPECTRUM).mean(1).argmax()
    assert make_bands(SPECTRUM)[loudest].argmax() == 440 // 40  # waves are 40 Hz apart
