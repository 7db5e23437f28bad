"""Images resized and cut into the patches of a tower that sees them whole, as transformers' Pillow processors do it."""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import RequestError, require
from llmc.inventory import Patching, Vision
from llmc.runtime.vision.tiles import normalize

if TYPE_CHECKING:
    from PIL.Image import Image

# A longer side divided by the shorter one. Source: transformers, qwen2_vl.
MOST_STRETCHED = 200


@dataclass(frozen=True, eq=False)
class Patches:
    """An image as a tower sees it: uint8 [3, height, width]."""

    pixels: NDArray[np.uint8]

    @cached_property
    def digest(self) -> bytes:
        """A hash of all of it: equal ones make equal rows of embeddings in equal places."""
        shape = "{} {} {} ".format(*self.pixels.shape).encode()
        return hashlib.blake2b(shape + self.pixels.tobytes(), digest_size=32).digest()

    def grid(self, vision: Vision) -> tuple[int, int]:
        """Rows and columns of the squares of patches, each of which becomes a row of embeddings."""
        _, height, width = self.pixels.shape
        return height // vision.tile, width // vision.tile


def cut_patches(image: "Image", vision: Vision, name: str = "the image") -> Patches:
    """Resize an RGB image as the family's processor does.

    Raises:
        RequestError: one of its sides is more than 200 times as long as the other.
    """
    patching = vision.patching
    assert patching is not None
    if max(image.size) > MOST_STRETCHED * min(image.size):
        raise RequestError(
            f"{name} has {image.width} x {image.height} pixels, expected sides of which none is more than "
            f"{MOST_STRETCHED} times as long as the other; cut it into pieces"
        )
    resample = require("PIL.Image", "vision").Resampling[patching.filter.upper()]
    resized = image.resize(find_size(*image.size, vision.tile, patching), resample)
    return Patches(np.asarray(resized).transpose(2, 0, 1))


def find_size(width: int, height: int, tile: int, patching: Patching) -> tuple[int, int]:
    """Width and height in whole tiles, whose product is within the bounds unless an image is too long for them."""
    found = [round(side / tile) * tile for side in (width, height)]
    if math.prod(found) > patching.most_pixels:
        factor = math.sqrt(width * height / patching.most_pixels)
        found = [max(tile, math.floor(side / factor / tile) * tile) for side in (width, height)]
    elif math.prod(found) < patching.least_pixels:
        factor = math.sqrt(patching.least_pixels / (width * height))
        found = [math.ceil(side * factor / tile) * tile for side in (width, height)]
    return found[0], found[1]


def make_feeds(patches: Patches, vision: Vision) -> dict[str, NDArray[Any]]:
    """Inputs of the tower for an image of P patches, those of a square one after the other.

    Returns ``pixel_values`` float32 [P, K] and ``positions`` int64 [P, 2], rows and columns; with learned positions
    ``corners`` int64 [4, P] and ``corner_weights`` float32 [4, P]; and where some layers attend within windows of L
    patches ``windows`` int64 [W, L], -1 behind a window's patches, and ``window_places`` int64 [P].
    """
    patching, patch = vision.patching, vision.patch
    assert patching is not None
    (rows, columns), merged = patches.grid(vision), vision.tile // patch
    values = normalize(patches.pixels[None], patching)[0].reshape(3, rows, merged, patch, columns, merged, patch)
    squares = values.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    repeated = np.broadcast_to(squares, (*squares.shape[:5], patching.frames, *squares.shape[6:]))
    grid = np.indices((rows * merged, columns * merged)).reshape(2, rows, merged, columns, merged)
    positions = grid.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    feeds: dict[str, NDArray[Any]] = {"pixel_values": repeated.reshape(len(positions), -1), "positions": positions}
    if patching.places:
        feeds |= _stretch(positions, (rows * merged, columns * merged), patching.places)
    if patching.window:
        feeds |= _list_windows(rows, columns, patching.window, merged**2)
    return feeds


def _stretch(positions: NDArray[np.int64], sizes: tuple[int, int], places: int) -> dict[str, NDArray[Any]]:
    """The four entries around each patch in a table [places, places] that is stretched over the image, and their
    weights; in float32, as transformers computes them."""
    corners, weights = list[NDArray[np.int64]](), list[NDArray[np.float32]]()
    for index, size in zip(positions.T, sizes, strict=True):
        place = index.astype(np.float32) * np.float32(places - 1) / np.float32(max(size - 1, 1))
        first = np.floor(place)
        corners.append(np.clip(first.astype(np.int64) + np.arange(2)[:, None], 0, places - 1))
        weights.append(np.maximum(1 - np.abs(place - first - np.arange(2, dtype=np.float32)[:, None]), 0))
    return {
        "corners": (corners[0][:, None] * places + corners[1][None]).reshape(4, -1),
        "corner_weights": (weights[0][:, None] * weights[1][None]).reshape(4, -1).astype(np.float32),
    }


def _list_windows(rows: int, columns: int, window: int, square: int) -> dict[str, NDArray[Any]]:
    """Patches by window, of squares of so many patches."""
    slots = list[NDArray[np.int64]]()
    numbers = np.arange(rows * columns * square).reshape(rows, columns, square)
    for row in range(0, rows, window):
        for column in range(0, columns, window):
            own = numbers[row : row + window, column : column + window].ravel()
            slots.append(np.pad(own, (0, window**2 * square - len(own)), constant_values=-1))
    windows = np.stack(slots)
    places = np.empty(rows * columns * square, np.int64)
    filled = np.flatnonzero(windows >= 0)
    places[windows.ravel()[filled]] = filled
    return {"windows": windows, "window_places": places}
