"""The golden image of a tower: a made-up image, and some values of its rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import GoldenVector
from llmc.bundle.model.vision import Vision
from llmc.runtime.selftest.values import compare, sample_rows
from llmc.runtime.vision.patches import make_feeds


def make_image(vision: Vision) -> dict[str, NDArray[Any]]:
    """Inputs of the tower for a made-up image of slanted stripes, the same on every machine: a tile, or one with more
    rows and columns of squares than a window."""
    side, square = max(vision.patching.window, 3) if vision.patching else 0, vision.square
    size = ((side + 1) * square, (side + 2) * square) if vision.patching else (vision.tile, vision.tile)
    colors, rows, columns = np.indices((3, *size))
    return make_feeds(((85 * colors + 5 * rows + 3 * columns) % 256).astype(np.uint8), vision)


def replay_image(model: Any, progress: Callable[[str], None]) -> None:
    """Refuse a tower that makes other rows of the made-up image than were recorded; do nothing without a tower."""
    if model.manifest.geometry.vision is None:
        return
    progress("golden image")
    (case,) = model.manifest.vectors or (GoldenVector((), ()),)
    image = make_image(model.manifest.geometry.vision)
    compare(model.folder, "rows of an image", case, sample_rows(model.tower.run(**image)))
