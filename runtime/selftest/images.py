"""The golden image or audio of a tower: made up, and some values of its rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import GoldenVector
from llmc.bundle.model.audio import Audio
from llmc.bundle.model.vision import Vision
from llmc.runtime.audio.spectrum import compute_spectrum
from llmc.runtime.audio.tower import make_feeds as make_audio_feeds
from llmc.runtime.selftest.values import compare, sample_rows
from llmc.runtime.vision.patches import make_feeds


def make_image(vision: Vision) -> dict[str, NDArray[Any]]:
    """Inputs of the tower for a made-up image of slanted stripes, the same on every machine: a tile, or one with more
    rows and columns of squares than a window."""
    side, square = max(vision.patching.window, 3) if vision.patching else 0, vision.square
    size = ((side + 1) * square, (side + 2) * square) if vision.patching else (vision.tile, vision.tile)
    colors, rows, columns = np.indices((3, *size))
    return make_feeds(((85 * colors + 5 * rows + 3 * columns) % 256).astype(np.uint8), vision)


def make_audio(audio: Audio) -> dict[str, NDArray[Any]]:
    """Inputs of the tower for a made-up tone that rises: two chunks and a part of the third, or a window of fewer."""
    spectrum = audio.spectrum
    times = np.arange(spectrum.hop * (audio.chunk * 7 // 3)) / spectrum.rate
    tone = (np.sin(2 * np.pi * (200 + 300 * times) * times) / 2).astype(np.float32)
    return next(iter(make_audio_feeds(compute_spectrum(tone, spectrum), audio)))


def make_golden(part: Vision | Audio) -> dict[str, NDArray[Any]]:
    """Inputs of a tower for a made-up image or audio."""
    return make_audio(part) if isinstance(part, Audio) else make_image(part)


def replay_tower(model: Any, progress: Callable[[str], None]) -> None:
    """Refuse a tower that makes other rows than were recorded; do nothing without a tower."""
    if (part := model.manifest.geometry.tower) is None:
        return
    progress(f"golden {part.kind}")
    (case,) = model.manifest.vectors or (GoldenVector((), ()),)
    found = sample_rows(model.tower.run(**make_golden(part)))
    compare(model.folder, f"rows of an {part.kind}", case, found)
