"""Tiles of grids of any shape: images cut and laid out in patches, and positions weighed, for SigLIP 2's NaFlex.

Source: arXiv 2502.14786, and transformers' processor of LFM2-VL, which resizes by torchvision: of pixels that Pillow
resizes some differ from its by one of 255.
"""

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.errors import require
from llmc.inventory import Grids, Vision
from llmc.runtime.vision.tiles import Tiles, by_channel, cut_cells

if TYPE_CHECKING:
    from PIL.Image import Image

Floats = NDArray[np.float32]


def cut_grids(image: "Image", vision: Vision, grids: Grids) -> Tiles:
    """Resize an RGB image to the nearest sides of whole squares of patches within a range of tokens; cut a large one
    into tiles of one size before."""
    resample = require("PIL.Image", "vision").Resampling[vision.tiling.filter.upper()]
    unit = vision.patch * grids.merged
    whole = by_channel(image.resize(_find_size(*image.size, unit, grids), resample))
    sides = (max(vision.patch, round(side / unit) * unit) for side in image.size)
    if grids.most_tiles == 1 or math.prod(sides) <= grids.most_tokens * unit * unit * grids.tolerance:
        return Tiles((whole,))
    columns, rows = _find_layout(*image.size, vision.tile, grids)
    cells = cut_cells(image.resize((columns * vision.tile, rows * vision.tile), resample), vision.tile)
    return Tiles((*cells, whole), rows, columns)


def lay_patches(pixels: Floats, vision: Vision) -> dict[str, Floats]:
    """Inputs of a tower for normalized pixels float32 [1, 3, height, width] of a tile: these themselves or, of a tower
    for grids, patches [1, P, 3 * patch²] square by square, and how much of each learned position is in each of them
    [P, places²]."""
    if (grids := vision.grids) is None:
        return {"pixel_values": pixels}
    patch, merged = vision.patch, grids.merged
    rows, columns = (side // (patch * merged) for side in pixels.shape[2:])
    squares = pixels.reshape(3, rows, merged, patch, columns, merged, patch).transpose(1, 4, 2, 5, 3, 6, 0)
    down, across = (_weigh_places(count * merged, grids.places) for count in (rows, columns))
    weights = down[:, None, :, None] * across[None, :, None, :]  # (rows, columns, places, places) of patches
    ordered = weights.reshape(rows, merged, columns, merged, -1).transpose(0, 2, 1, 3, 4)
    return {
        "pixel_values": np.ascontiguousarray(squares).reshape(1, -1, 3 * patch * patch),
        "position_weights": np.ascontiguousarray(ordered).reshape(-1, grids.places**2),
    }


def _weigh_places(count: int, places: int) -> Floats:
    """Shares [count, places] of learned places in each of ``count`` that lie evenly over them: linear between two and,
    where there are fewer, over as many as lie in each."""
    scale = np.float32(places) / np.float32(count)
    centers = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    apart = np.abs(np.arange(places, dtype=np.float32) - centers[:, None]) / max(scale, np.float32(1))
    shares = np.maximum(np.float32(1) - apart, np.float32(0))
    found: Floats = shares / shares.sum(1, keepdims=True)
    return found


def _find_size(width: int, height: int, unit: int, grids: Grids) -> tuple[int, int]:
    """Width and height in multiples of ``unit``, of about the same ratio, within the range of tokens."""
    sides = [max(1, round(side / unit)) for side in (width, height)]
    tokens = math.prod(sides)
    if tokens > grids.most_tokens:
        shrunk = math.sqrt(height * width / (grids.most_tokens * unit**2))
        sides = [max(1, math.floor(side / shrunk / unit)) for side in (width, height)]
    elif tokens < grids.least_tokens:
        grown = math.sqrt(grids.least_tokens * unit**2 / (height * width))
        sides = [math.ceil(side * grown / unit) for side in (width, height)]
    return sides[0] * unit, sides[1] * unit


def _find_layout(width: int, height: int, tile: int, grids: Grids) -> tuple[int, int]:
    """Columns and rows of tiles whose ratio is the nearest; of equally near ones the more, if the image fills half."""
    most = range(1, grids.most_tiles + 1)
    layouts = [(x, y) for x in most for y in most if grids.least_tiles <= x * y <= grids.most_tiles]
    best, nearest = (1, 1), math.inf
    for columns, rows in sorted(layouts, key=math.prod):
        apart = abs(width / height - columns / rows)
        if apart < nearest or (apart == nearest and 2 * width * height > tile**2 * columns * rows):
            best, nearest = (columns, rows), apart
    return best
