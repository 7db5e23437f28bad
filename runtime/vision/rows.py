"""Embedding rows at the tokens of images or audio in a prompt, and names for these positions in the prefix cache."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class ImageRows:
    """The embedding rows of all images, or of all audio, in a prompt."""

    positions: NDArray[np.int64]  # int64 [R], ascending: the positions of image tokens
    names: NDArray[np.int64]  # int64 [R], negative, unlike any token: the names of these positions in the prefix cache
    rows: NDArray[np.float32]  # float32 [R, hidden or more]: replace the embeddings of these tokens
    # int64 [3, P]: coordinates of the prompt's tokens if positions have several axes; else None
    places: NDArray[np.int64] | None = None
    whole: bool = False  # True if an image's rows attend to later rows, so that all of them must be fed in one call

    def feeds(self, start: int, end: int) -> dict[str, NDArray[Any]]:
        """Inputs of a one-row call for the positions ``start`` ... ``end - 1``: image rows, and any coordinates."""
        feeds: dict[str, NDArray[Any]] = {} if self.places is None else {"positions": self.place(start, end)[:, None]}
        first, last = np.searchsorted(self.positions, [start, end])
        if first < last:
            feeds["embedding_indices"] = np.full((1, end - start), -1, np.int64)
            feeds["embedding_indices"][0, self.positions[first:last] - start] = np.arange(last - first)
            feeds["embeddings"] = self.rows[first:last]
        return feeds

    def place(self, start: int, end: int) -> NDArray[np.int64]:
        """Coordinates int64 [3, end - start] of the tokens ``start`` ... ``end - 1``, also after the prompt's end."""
        assert self.places is not None
        length = self.places.shape[1]
        after = self.places[:, -1:].max() + 1 - length + np.arange(max(start, length), max(end, length))
        return np.concatenate([self.places[:, start:end], np.broadcast_to(after, (3, len(after)))], axis=1)

    def fit_end(self, start: int, end: int, total: int) -> int:
        """The end of a chunk from ``start``, moved so that it does not cut an image: before the image or, if it begins
        the chunk, after it; after an even number of tokens, if ``total`` has enough."""
        places = self.positions
        at = int(np.searchsorted(places, end))
        if not self.whole or at in (0, len(places)) or places[at] != end or places[at - 1] != end - 1:
            return end
        outside = np.flatnonzero(np.diff(places) > 1)  # the last row of every image except the last
        before, after = outside[outside < at], outside[outside >= at]
        first = int(places[before[-1] + 1 if len(before) else 0])
        if first - start >= 2:
            return first - (first - start) % 2
        last = int(places[after[0] if len(after) else -1]) + 1
        return min(total, last + (last - start) % 2)

    def name_tokens(self, tokens: Sequence[int]) -> list[int]:
        """``tokens``, which begin with the prompt's, with image positions replaced by the images' names."""
        named = np.array(tokens, np.int64)
        named[self.positions] = self.names
        return list(map(int, named))


def make_names(digest: bytes, rows: int) -> NDArray[np.int64]:
    """Names for an image's rows; two images differ in them unless 63 bits of SHAKE128 collide."""
    names = np.frombuffer(hashlib.shake_128(digest).digest(8 * rows), "<i8").astype(np.int64)
    return names | np.iinfo(np.int64).min


def place_tokens(length: int, images: Sequence[tuple[int, tuple[int, int]]]) -> NDArray[np.int64]:
    """Coordinates int64 [3, length] of tokens: time, row and column. ``images``: first token, and (rows, columns). An
    image has one time; the tokens after it continue after its longer side.

    Source: M-RoPE (arXiv 2409.12191).
    """
    positions, begins, next_place = np.empty((3, length), np.int64), 0, 0
    for start, (rows, columns) in images:
        positions[:, begins:start] = np.arange(next_place, next_place + start - begins)
        next_place += start - begins
        begins = start + rows * columns
        positions[:, start:begins] = next_place
        positions[1:, start:begins] += np.indices((rows, columns)).reshape(2, -1)
        next_place += max(rows, columns)
    positions[:, begins:] = np.arange(next_place, next_place + length - begins)
    return positions
