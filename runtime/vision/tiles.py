"""Cut images into the tiles that a tower sees, bit for bit as transformers' Pillow processors do."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.bundle.model.vision import Patching, Tiling, Vision
from llmc.errors import require

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class Tiles:
    """An image cut for the tower."""

    # uint8 [3, height, width] each: the tiles row by row, then the whole image; or only the whole image
    pixels: Sequence[NDArray[np.uint8]] | NDArray[np.uint8]
    # of the tiles; 0 if the image was not cut
    rows: int = 0
    columns: int = 0

    @cached_property
    def digest(self) -> bytes:
        """A hash of everything: images with equal hashes have equal embedding rows at equal positions."""
        digest = hashlib.blake2b(f"{self.rows} {self.columns} ".encode(), digest_size=32)
        for tile in self.pixels:
            digest.update(f"{tile.shape} ".encode() + tile.tobytes())
        return digest.digest()


def cut_tiles(image: "Image", vision: Vision) -> Tiles:
    """Resize an RGB image, and cut it if the family's processor would."""
    side, tiling = vision.tile, vision.tiling
    assert tiling is not None
    resample = require("PIL.Image", "vision").Resampling[tiling.filter.upper()]
    if tiling.longest_edge:
        image = image.resize(_find_size(*image.size, tiling.longest_edge), resample)
    if tiling.cut:
        image = image.resize(_find_multiples(*image.size, side), resample)
    if not tiling.cut or image.size == (side, side):
        return Tiles(by_channel(image.resize((side, side), resample))[None])
    whole = by_channel(image.resize((side, side), resample))
    return Tiles(np.concatenate([cut_cells(image, side), whole[None]]), image.height // side, image.width // side)


def cut_cells(image: "Image", side: int) -> NDArray[np.uint8]:
    """Tiles of an image, row by row: uint8 [tiles, 3, side, side]."""
    columns, rows = image.width // side, image.height // side
    cells = by_channel(image).reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
    tiles: NDArray[np.uint8] = cells.reshape(-1, 3, side, side)
    return tiles


def normalize(pixels: NDArray[np.uint8], steps: Tiling | Patching) -> NDArray[np.float32]:
    """Rescaled and normalized values of uint8 [tiles, 3, side, side], in float32 as in transformers."""
    values = (np.arange(256, dtype=np.float64) * steps.rescale).astype(np.float32)
    table = [(values - np.float32(mean)) / np.float32(std) for mean, std in zip(steps.mean, steps.std, strict=True)]
    return np.stack([table[channel][pixels[:, channel]] for channel in range(3)], axis=1)


def count_rows(tiles: Tiles, vision: Vision) -> int:
    """Number of embedding rows that the tower computes for an image."""
    return sum(math.prod(vision.grid(*tile.shape[1:])) for tile in tiles.pixels)


def write_markers(tiles: Tiles, vision: Vision) -> str:
    """The text of an image in a prompt: one image token per embedding row, between markers."""
    markers = vision.markers
    grids = (vision.grid(*tile.shape[1:]) for tile in tiles.pixels)
    line_end = "\n".join(markers.line_end)
    *cells, whole = (line_end.join([markers.image * columns] * rows) for rows, columns in grids)
    before, after, row_end = ("\n".join(lines) for lines in (markers.before, markers.after, markers.row_end))
    tile, columns = "\n".join(markers.tile), tiles.columns
    for number, image in enumerate(cells):
        row, column = divmod(number, columns)
        before += tile.replace("{row}", str(row + 1)).replace("{column}", str(column + 1))
        before += image + row_end * (column + 1 == columns)
    return before + "\n".join(markers.whole if cells else markers.single) + whole + after


def _find_size(width: int, height: int, longest: int) -> tuple[int, int]:
    """Width and height with a longest edge of ``longest``; the other one is even, unless it is 1."""
    ratio = width / height
    if width >= height:
        height = int(longest / ratio)
        return longest, max(1, height + height % 2)
    width = int(longest * ratio)
    return max(1, width + width % 2), longest


def _find_multiples(width: int, height: int, side: int) -> tuple[int, int]:
    """Width and height rounded up to multiples of ``side``; the shorter one keeps the ratio first."""
    ratio = width / height
    if width >= height:
        width = ceil(width, side)
        return width, ceil(int(width / ratio), side)
    height = ceil(height, side)
    return ceil(int(height * ratio), side), height


def ceil(value: int, side: int) -> int:
    """``value`` rounded up to a multiple of ``side``."""
    return -(-value // side) * side


def by_channel(image: "Image") -> NDArray[np.uint8]:
    """Pixels uint8 [3, height, width]."""
    pixels: NDArray[np.uint8] = np.asarray(image).transpose(2, 0, 1)
    return pixels
