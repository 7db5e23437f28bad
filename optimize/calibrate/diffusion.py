"""Texts of diffusion language models, half of whose tokens are masks; other models predict each next token."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Geometry

Ids = NDArray[np.int64]


def hide_half(ids: Ids, geometry: Geometry) -> Ids:
    """Tokens as a model is fed them: a diffusion model sees masks in half of the places."""
    if geometry.diffusion is None:
        return ids
    return np.where(np.random.default_rng(0).random(ids.shape) < 0.5, geometry.diffusion.mask_token_id, ids)


def find_targets(ids: Sequence[int] | Ids, fed: Sequence[int] | Ids, geometry: Geometry) -> tuple[Ids, Ids]:
    """Rows of the logits of ``fed`` that predict tokens of a text ``ids``, and these tokens: the next token of each
    row, or the masked tokens of a diffusion model."""
    if (diffusion := geometry.diffusion) is None:
        return np.arange(len(ids) - 1), np.array(ids[1:], np.int64)
    masked = np.flatnonzero(np.array(fed) == diffusion.mask_token_id)
    masked = masked[masked >= diffusion.shift]
    return masked - diffusion.shift, np.array(ids, np.int64)[masked]
