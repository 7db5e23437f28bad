"""Log-mel spectra of audio, those of transformers' feature extractor for Whisper's descendants."""

from functools import cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from llmc.bundle.model.audio import Spectrum

FLOOR = 1e-10  # least power of a band
DEPTH = 8.0  # powers of ten below the loudest band, below which nothing is told apart
PIECE = 1024  # frames that are computed at a time


def compute_spectrum(samples: NDArray[np.float32], spectrum: Spectrum) -> NDArray[np.float32]:
    """The spectrum float32 [bands, frames] of samples [N], scaled as Whisper's (arXiv 2212.04356); every ``hop``
    samples make a frame."""
    samples = np.pad(samples, (0, max(0, spectrum.least - len(samples))))
    half, frames = spectrum.frame // 2, len(samples) // spectrum.hop
    cut = sliding_window_view(np.pad(samples, half, mode="reflect"), spectrum.frame)[:: spectrum.hop][:frames]
    angles = np.arange(spectrum.frame) * (2 * np.pi / spectrum.frame)
    window, bands = (0.5 - 0.5 * np.cos(angles)).astype(np.float32), make_bands(spectrum)
    power = np.empty((spectrum.bands, frames), np.float32)
    for start in range(0, frames, PIECE):
        waves = np.abs(np.fft.rfft(cut[start : start + PIECE] * window)) ** 2
        power[:, start : start + PIECE] = bands @ waves.astype(np.float32).T
    logarithms = np.log10(np.maximum(power, np.float32(FLOOR), out=power), out=power)
    np.maximum(logarithms, logarithms.max() - np.float32(DEPTH), out=logarithms)
    found: NDArray[np.float32] = (logarithms + np.float32(4)) / np.float32(4)
    return found


@cache
def make_bands(spectrum: Spectrum) -> NDArray[np.float32]:
    """Weights float32 [bands, waves] of triangles on Slaney's mel scale, which have equal areas.

    Source: M. Slaney, Auditory Toolbox (1998), as in librosa.
    """
    top = spectrum.rate / 2
    edges = _mel_to_hertz(np.linspace(0, _hertz_to_mel(top), spectrum.bands + 2))
    waves = np.linspace(0, top, spectrum.frame // 2 + 1)
    low, middle, high = (edges[start : start + spectrum.bands, None] for start in range(3))
    triangles = np.maximum(0, np.minimum((waves - low) / (middle - low), (high - waves) / (high - middle)))
    return (triangles * (2 / (high - low))).astype(np.float32)


# The scale is linear up to 1000 Hz, which are 15 mel, and logarithmic above.
_HERTZ_PER_MEL, _KNEE, _STEP = 200 / 3, 1000.0, np.log(6.4) / 27


def _hertz_to_mel(hertz: float) -> float:
    if hertz < _KNEE:
        return hertz / _HERTZ_PER_MEL
    return float(_KNEE / _HERTZ_PER_MEL + np.log(hertz / _KNEE) / _STEP)


def _mel_to_hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    beyond = np.maximum(mel - _KNEE / _HERTZ_PER_MEL, 0)
    return np.where(beyond > 0, _KNEE * np.exp(_STEP * beyond), mel * _HERTZ_PER_MEL)
