"""Rows of embeddings in the places of a prompt's image tokens, and the names of these places in the prefix cache."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class ImageRows:
    """All of a prompt's images.

    Attributes:
        positions: int64 [R], ascending: the places of image tokens.
        names: int64 [R], negative, as no token is: what prefixes are named by in these places.
        rows: float32 [R, hidden or more]: what the decoder reads there in place of the token's own embedding.
        places: int64 [3, P]: where positions have several axes those of the prompt's tokens, whatever comes after them.
        whole: whether rows of an image see those after them, so that all of them must be fed in one call.
    """

    positions: NDArray[np.int64]
    names: NDArray[np.int64]
    rows: NDArray[np.float32]
    places: NDArray[np.int64] | None = None
    whole: bool = False

    def feeds(self, start: int, end: int) -> dict[str, NDArray[Any]]:
        """Inputs of a call of one row for the positions ``start`` ... ``end - 1``: the rows of images in them, and
        where positions have axes those."""
        found: dict[str, NDArray[Any]] = {} if self.places is None else {"positions": self.place(start, end)[:, None]}
        first, last = np.searchsorted(self.positions, [start, end])
        if first < last:
            found["embedding_indices"] = np.full((1, end - start), -1, np.int64)
            found["embedding_indices"][0, self.positions[first:last] - start] = np.arange(last - first)
            found["embeddings"] = self.rows[first:last]
        return found

    def place(self, start: int, end: int) -> NDArray[np.int64]:
        """Positions int64 [3, end - start] of the tokens ``start`` ... ``end - 1``, also of those behind the prompt."""
        assert self.places is not None
        length = self.places.shape[1]
        after = self.places[:, -1:].max() + 1 - length + np.arange(max(start, length), max(end, length))
        return np.concatenate([self.places[:, start:end], np.broadcast_to(after, (3, len(after)))], axis=1)

    def fit_end(self, start: int, end: int, total: int) -> int:
        """The end of a chunk from ``start`` that would cut an image at ``end``: in front of the image or, where it
        begins the chunk, behind it; after an even number of tokens, if there are ``total`` enough."""
        places = self.positions
        at = int(np.searchsorted(places, end))
        if not self.whole or at in (0, len(places)) or places[at] != end or places[at - 1] != end - 1:
            return end
        outside = np.flatnonzero(np.diff(places) > 1)  # the last row of each image but the last
        before, after = outside[outside < at], outside[outside >= at]
        first = int(places[before[-1] + 1 if len(before) else 0])
        if first - start >= 2:
            return first - (first - start) % 2
        last = int(places[after[0] if len(after) else -1]) + 1
        return min(total, last + (last - start) % 2)

    def name_tokens(self, tokens: Sequence[int]) -> list[int]:
        """``tokens``, of which the first are the prompt's, with the images' names in their places."""
        named = np.array(tokens, np.int64)
        named[self.positions] = self.names
        return list(map(int, named))


def make_names(digest: bytes, rows: int) -> NDArray[np.int64]:
    """Names of an image's rows: of two images they differ wherever 63 bits of SHAKE128 do."""
    names = np.frombuffer(hashlib.shake_128(digest).digest(8 * rows), "<i8").astype(np.int64)
    return names | np.iinfo(np.int64).min


def place_tokens(length: int, images: Sequence[tuple[int, tuple[int, int]]]) -> NDArray[np.int64]:
    """Positions int64 [3, length] on three axes, of time, row and column. An image, which begins at a token and has
    rows and columns, stands at one time, and what comes after it behind its longer side.

    Source: M-RoPE (arXiv 2409.12191).
    """
    found, begins, next_place = np.empty((3, length), np.int64), 0, 0
    for start, (rows, columns) in images:
        found[:, begins:start] = np.arange(next_place, next_place + start - begins)
        next_place += start - begins
        begins = start + rows * columns
        found[:, start:begins] = next_place
        found[1:, start:begins] += np.indices((rows, columns)).reshape(2, -1)
        next_place += max(rows, columns)
    found[:, begins:] = np.arange(next_place, next_place + length - begins)
    return found
