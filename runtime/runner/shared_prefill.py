"""Prompts that wait together share a call, as many as a chunk has room for.

Weights are read once for all of them, which is most of what a prompt of a few tokens costs.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np

from llmc.runtime.kv.rows import Slot
from llmc.runtime.sessions import Batch, Phase

# Tokens of a shared call. Beyond, reading weights is a sixth of its time (0.5B, int4, two cores), and those who share
# it wait longer for the others than they would for their turn.
SHARED_TOKENS = 128

_S = TypeVar("_S", bound=Slot)


def sharing(waiting: Sequence[_S], chunk: int, capacity: int) -> list[_S]:
    """The waiting sequences, of which nothing was fed yet, from the first on that are fed whole in the same call:
    within ``chunk`` tokens, padding included, and within the ``capacity`` of a row.
    """
    lengths = [len(sequence.context) - sequence.cached for sequence in waiting]
    tokens, widths = list(accumulate(lengths)), list(accumulate(lengths, max))
    past = list(accumulate((sequence.cached for sequence in waiting), max))
    count = 1
    while (
        count < len(waiting)
        and tokens[count] <= min(SHARED_TOKENS, chunk)
        and widths[count] * (count + 1) <= chunk
        and past[count] + widths[count] <= capacity
    ):
        count += 1
    return list(waiting[:count])


def shared_batch(sequences: Sequence[Slot]) -> Batch:
    """The call that feeds what is left of each, with logits after its last token."""
    rest = [sequence.context[sequence.cached :] for sequence in sequences]
    lengths = np.array([len(tokens) for tokens in rest], np.int64)
    ids = np.zeros((len(rest), lengths.max()), np.int64)
    for row, tokens in zip(ids, rest, strict=True):
        row[: len(tokens)] = tokens
    past = np.array([sequence.cached for sequence in sequences], np.int64)
    return Batch(Phase.PREFILL, ids, past, lengths[:, None] - 1, sequences[0].row, new_lengths=lengths)
