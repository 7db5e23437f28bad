"""From audio in a conversation to embedding rows."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle.model.audio import Audio, halve
from llmc.runtime.audio.decode import read_samples
from llmc.runtime.audio.spectrum import compute_spectrum
from llmc.runtime.vision.tower import RowTower


@dataclass(frozen=True, eq=False)
class Clip:
    """Audio ready for the tower."""

    features: NDArray[np.float32]  # its spectrum float32 [bands, frames]
    seconds: float

    @cached_property
    def digest(self) -> bytes:
        """A hash of the spectrum."""
        start = f"{self.features.shape} ".encode()
        return hashlib.blake2b(start + self.features.tobytes(), digest_size=32).digest()


class AudioTower(RowTower[Clip]):
    """Computes embedding rows of audio, by the sizes and settings of a model that hears."""

    kind = Audio.kind

    def __init__(self, audio: Audio, run: Callable[..., NDArray[np.float32]]) -> None:
        super().__init__(run)
        self._audio, self.token_id, self.token, self.placeholder = audio, audio.token_id, audio.token, audio.token

    def read(self, source: Any, name: str, most_rows: int) -> Clip:
        """The spectrum of audio, an input of :func:`llmc.runtime.audio.decode.read_samples`, or what was made of it."""
        if isinstance(source, Clip):
            return source
        spectrum, audio = self._audio.spectrum, self._audio
        most = (most_rows // halve(audio.chunk) + 1) * audio.chunk * spectrum.hop
        samples = read_samples(source, spectrum.rate, most, name)
        return Clip(compute_spectrum(samples, spectrum), len(samples) / spectrum.rate)

    def count(self, item: Clip) -> int:
        return self._audio.count_rows(item.features.shape[1])

    def write(self, item: Clip) -> str:
        return self.token * self.count(item)

    def make_feeds(self, item: Clip) -> Iterable[dict[str, NDArray[Any]]]:
        return make_feeds(item.features, self._audio)


def make_feeds(features: NDArray[np.float32], audio: Audio) -> Iterable[dict[str, NDArray[Any]]]:
    """Inputs of the tower for a spectrum [bands, frames], window by window: ``features`` float32 [chunks, bands, chunk]
    with zeros behind the last frame, and ``rows`` int64 [R], the numbers of the rows that are no padding."""
    most = audio.window * audio.chunk
    for start in range(0, features.shape[1], most):
        window = features[:, start : start + most]
        chunks, frames = -(-window.shape[1] // audio.chunk), window.shape[1]
        padded = np.pad(window, ((0, 0), (0, chunks * audio.chunk - frames))).reshape(audio.spectrum.bands, chunks, -1)
        yield {"features": padded.transpose(1, 0, 2), "rows": np.arange(audio.count_rows(frames))}
