"""Cut images of any shape into tiles and patches, as transformers' processors of Qwen's models, LFM2-VL, Pixtral and
Gemma 4 do.

LFM2-VL's processor resizes with torchvision: some pixels differ by 1 of 255 from Pillow's, which are used here. So does
that of Gemma 4 12B, whose bicubic filter rounds otherwise: by less than 0.3 on average, and in noise by up to 12.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle.model.vision import Patching, Vision
from llmc.errors import require
from llmc.runtime.vision.tiles import Tiles, by_channel, ceil, cut_cells, normalize

if TYPE_CHECKING:
    from PIL.Image import Image


def cut_patches(image: "Image", vision: Vision, patching: Patching) -> Tiles:
    """Resize an RGB image as the family's processor does, and also cut a large one into tiles."""
    resample = require("PIL.Image", "vision").Resampling[patching.filter.upper()]
    find = _fill_size if patching.filled else _find_size
    whole = by_channel(image.resize(find(*image.size, vision.square, patching), resample))
    rounded = (max(vision.patch, round(side / vision.square) * vision.square) for side in image.size)
    if patching.most_tiles == 1 or math.prod(rounded) <= patching.most_pixels * patching.tolerance:
        return Tiles((whole,))
    columns, rows = _find_layout(*image.size, vision.tile, patching)
    cells = cut_cells(image.resize((columns * vision.tile, rows * vision.tile), resample), vision.tile)
    return Tiles((*cells, whole), rows, columns)


def _find_size(width: int, height: int, square: int, patching: Patching) -> tuple[int, int]:
    """Width and height in whole squares; their product is within the bounds unless the image is too long for them."""
    if patching.longest_edge:
        ratio = max(width, height) / patching.longest_edge
        size = [max(1, math.floor(side / ratio)) if ratio > 1 else side for side in (width, height)]
        return ceil(size[0], square), ceil(size[1], square)
    # Qwen's processor rounds a short side to 0, which is too few pixels; LFM2-VL's rounds it to one square.
    size = [max(int(patching.naflex), round(side / square)) * square for side in (width, height)]
    if math.prod(size) > patching.most_pixels:
        factor = math.sqrt(width * height / patching.most_pixels)
        size = [max(1, math.floor(side / factor / square)) * square for side in (width, height)]
    elif math.prod(size) < patching.least_pixels:
        factor = math.sqrt(patching.least_pixels / (width * height))
        size = [math.ceil(side * factor / square) * square for side in (width, height)]
    return size[0], size[1]


def _fill_size(width: int, height: int, square: int, patching: Patching) -> tuple[int, int]:
    """Width and height in whole squares, as large as ``most_pixels`` lets them be with nearly the same ratio; at least
    a square wide and high."""
    factor = math.sqrt(patching.most_pixels / (width * height))
    columns, rows = (math.floor(factor * side / square) for side in (width, height))
    most = patching.most_pixels // square**2
    if not rows:
        columns, rows = min(width // height, most), 1
    elif not columns:
        columns, rows = 1, min(height // width, most)
    return columns * square, rows * square


def _find_layout(width: int, height: int, tile: int, patching: Patching) -> tuple[int, int]:
    """Columns and rows of tiles with the nearest ratio; ties go to more tiles if the image fills half of them."""
    most = range(1, patching.most_tiles + 1)
    layouts = [(x, y) for x in most for y in most if patching.least_tiles <= x * y <= patching.most_tiles]
    best, nearest = (1, 1), math.inf
    for columns, rows in sorted(layouts, key=math.prod):
        apart = abs(width / height - columns / rows)
        if apart < nearest or (apart == nearest and 2 * width * height > tile**2 * columns * rows):
            best, nearest = (columns, rows), apart
    return best


def make_feeds(tile: NDArray[np.uint8], vision: Vision) -> dict[str, NDArray[Any]]:
    """Inputs of the tower for a tile uint8 [3, height, width].

    Returns ``pixel_values`` float32 [1, 3, height, width] or, for P patches, [P, K] with the patches of a square next
    to each other. With learned positions for grids of any shape: ``corners`` int64 [C, P], the table entries that each
    patch combines, and ``corner_weights`` float32 [C, P]. With rotary heads, or vectors of rows and of columns:
    ``positions`` int64 [P, 2], rows and columns. If some layers attend within windows of L patches: ``windows`` int64
    [W, L], padded with -1, and ``window_places`` int64 [P]. If some layers convolve K x K patches: ``neighbors`` int64
    [K * K, P], -1 beyond the image.
    """
    values = normalize(tile[None], vision.steps)
    if (patching := vision.patching) is None:
        return {"pixel_values": values}
    (rows, columns), patch, merged = vision.grid(*tile.shape[1:]), vision.patch, vision.square // vision.patch
    squares = values.reshape(3, rows, merged, patch, columns, merged, patch).transpose(1, 4, 2, 5, 0, 3, 6)
    sizes = rows * merged, columns * merged
    positions = np.indices(sizes).reshape(2, rows, merged, columns, merged).transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    if patching.naflex or patching.filled:
        pixels = squares.transpose(0, 1, 2, 3, 5, 6, 4)
    else:
        pixels = np.repeat(squares[:, :, :, :, :, None], patching.frames, axis=5)
    feeds: dict[str, NDArray[Any]] = {"pixel_values": pixels.reshape(len(positions), -1)}
    if not patching.naflex:
        feeds["positions"] = positions
    if patching.places:
        feeds |= _stretch(positions, sizes, patching)
    if patching.window:
        feeds |= _list_windows(rows, columns, patching.window, merged**2)
    if patching.kernel:
        feeds["neighbors"] = _list_neighbors(positions, sizes, patching.kernel)
    return feeds


def _list_neighbors(positions: NDArray[np.int64], sizes: tuple[int, int], kernel: int) -> NDArray[np.int64]:
    """Patches around each patch, int64 [kernel * kernel, P], row by row; -1 beyond the image."""
    numbers = np.full([side + kernel - 1 for side in sizes], -1)
    rows, columns = positions.T
    numbers[rows + kernel // 2, columns + kernel // 2] = np.arange(len(positions))
    return np.stack([numbers[rows + row, columns + column] for row in range(kernel) for column in range(kernel)])


def _stretch(positions: NDArray[np.int64], sizes: tuple[int, int], patching: Patching) -> dict[str, NDArray[Any]]:
    """Entries of a table [places, places] stretched over an image of so many patches, and their weights."""
    (rows, tall), (columns, wide) = (_weigh_places(size, patching) for size in sizes)
    down, across = positions.T
    return {
        "corners": (rows[:, None, down] * patching.places + columns[None, :, across]).reshape(-1, len(positions)),
        "corner_weights": (tall[:, None, down] * wide[None, :, across]).reshape(-1, len(positions)),
    }


def _weigh_places(count: int, patching: Patching) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Learned places for each of ``count`` evenly spaced positions, and their weights, both [C, count]: linear between
    two places, or by the area of several; float32 as in transformers."""
    places, numbers = patching.places, np.arange(count, dtype=np.float32)
    reach, centers = np.float32(1), numbers * np.float32(places - 1) / np.float32(max(count - 1, 1))
    if patching.naflex:
        scale = np.float32(places) / np.float32(count)
        reach, centers = max(scale, reach), (numbers + np.float32(0.5)) * scale - np.float32(0.5)
    apart = np.abs(np.arange(places, dtype=np.float32) - centers[:, None]) / reach
    shares = np.maximum(np.float32(1) - apart, np.float32(0))
    shares /= shares.sum(1, keepdims=True)
    chosen = np.argsort(-shares, axis=1, kind="stable")[:, : int((shares > 0).sum(1).max())]
    return chosen.T, np.take_along_axis(shares, chosen, 1).T


def _list_windows(rows: int, columns: int, window: int, square: int) -> dict[str, NDArray[Any]]:
    """Patches by window; ``square`` patches form a square."""
    slots = list[NDArray[np.int64]]()
    numbers = np.arange(rows * columns * square).reshape(rows, columns, square)
    for row in range(0, rows, window):
        for column in range(0, columns, window):
            slot = numbers[row : row + window, column : column + window].ravel()
            slots.append(np.pad(slot, (0, window**2 * square - len(slot)), constant_values=-1))
    windows = np.stack(slots)
    places = np.empty(rows * columns * square, np.int64)
    filled = np.flatnonzero(windows >= 0)
    places[windows.ravel()[filled]] = filled
    return {"windows": windows, "window_places": places}
