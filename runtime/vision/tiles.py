"""Images cut into the tiles that a tower sees, bit for bit as transformers' Pillow processors of the families do it."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.errors import require
from llmc.inventory import Markers, Tiling, Vision

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class Tiles:
    """An image as a tower sees it.

    Attributes:
        pixels: uint8 [tiles, 3, side, side]: row by row, and last the whole image; or this alone.
        rows, columns: of the tiles that were cut; 0 where none were.
    """

    pixels: NDArray[np.uint8]
    rows: int = 0
    columns: int = 0

    @cached_property
    def digest(self) -> bytes:
        """A hash of all of it: equal ones make equal rows of embeddings in equal places."""
        shape = f"{self.rows} {self.columns} ".encode()
        return hashlib.blake2b(shape + self.pixels.tobytes(), digest_size=32).digest()


def cut_tiles(image: "Image", vision: Vision) -> Tiles:
    """Resize an RGB image, and cut it where the family's processor does."""
    side, tiling = vision.tile, vision.tiling
    resample = require("PIL.Image", "vision").Resampling[tiling.filter.upper()]
    if tiling.longest_edge:
        image = image.resize(_find_size(*image.size, tiling.longest_edge), resample)
    if tiling.cut:
        image = image.resize(_find_multiples(*image.size, side), resample)
    if not tiling.cut or image.size == (side, side):
        return Tiles(_by_channel(image.resize((side, side), resample))[None])
    columns, rows = image.width // side, image.height // side
    cells = _by_channel(image).reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
    whole = _by_channel(image.resize((side, side), resample))
    return Tiles(np.concatenate([cells.reshape(-1, 3, side, side), whole[None]]), rows, columns)


def normalize(pixels: NDArray[np.uint8], tiling: Tiling) -> NDArray[np.float32]:
    """Rescaled and normalized values of uint8 [tiles, 3, side, side], in float32 as transformers computes them."""
    values = (np.arange(256, dtype=np.float64) * tiling.rescale).astype(np.float32)
    table = [(values - np.float32(mean)) / np.float32(std) for mean, std in zip(tiling.mean, tiling.std, strict=True)]
    return np.stack([table[channel][pixels[:, channel]] for channel in range(3)], axis=1)


def write_markers(tiles: Tiles, markers: Markers, tokens: int) -> str:
    """The text of an image in a prompt: its token as often as there are rows of embeddings, between marks.

    ``tokens`` are those of each tile.
    """
    image = markers.image * tokens
    after = "\n".join(markers.after)
    if not tiles.rows:
        return "\n".join(markers.single) + image + after
    tile, row_end = "\n".join(markers.tile), "\n".join(markers.row_end)
    cells = "".join(
        "".join(_place(tile, row, column) + image for column in range(1, tiles.columns + 1)) + row_end
        for row in range(1, tiles.rows + 1)
    )
    return cells + "\n".join(markers.whole) + image + after


def _place(tile: str, row: int, column: int) -> str:
    return tile.replace("{row}", str(row)).replace("{column}", str(column))


def _find_size(width: int, height: int, longest: int) -> tuple[int, int]:
    """Width and height with a longest edge of ``longest``; the other one is even, unless it is 1."""
    ratio = width / height
    if width >= height:
        height = int(longest / ratio)
        return longest, max(1, height + height % 2)
    width = int(longest * ratio)
    return max(1, width + width % 2), longest


def _find_multiples(width: int, height: int, side: int) -> tuple[int, int]:
    """Width and height as the next multiples of ``side``, the shorter one after the ratio is kept."""
    ratio = width / height
    if width >= height:
        width = _ceil(width, side)
        return width, _ceil(int(width / ratio), side)
    height = _ceil(height, side)
    return _ceil(int(height * ratio), side), height


def _ceil(value: int, side: int) -> int:
    return -(-value // side) * side


def _by_channel(image: "Image") -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = np.asarray(image).transpose(2, 0, 1)
    return pixels
