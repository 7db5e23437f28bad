"""Prompts that wait together and share a call: as many as it pays for, and no more than a chunk has room for.

Weights are read once for all of them, which is most of what a prompt of a few tokens costs.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np

from llmc.runtime.kv.rows import Slot
from llmc.runtime.runner.costs import StepCosts
from llmc.runtime.sessions import Batch, Phase

# Tokens of a shared call. Beyond, reading weights is a sixth of its time (0.5B, int4, two cores), and those who share
# it wait longer for the others than they would for their turn.
SHARED_TOKENS = 128
# Calls of as many tokens that were seen before their cost counts: a first one pays for what later ones reuse.
SEEN = 3

_S = TypeVar("_S", bound=Slot)


def sharing(waiting: Sequence[_S], chunk: int, capacity: int, costs: StepCosts) -> list[_S]:
    """The first of those who wait, and who after it are fed whole in the same call: one of each request, so that what
    a request alone comes to never depends on what was learnt.

    Args:
        waiting: sequences in rows side by side, of which nothing was fed yet.
        chunk: tokens that a call may have, padding included.
        capacity: positions of a row; padding needs some, too.
        costs: of calls so far.
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
        and all(waiting[count].owner is not each.owner for each in waiting[:count])
        and _pays(costs, tokens[count - 1], lengths[count])
    ):
        count += 1
    return list(waiting[:count])


def _pays(costs: StepCosts, tokens: int, more: int) -> bool:
    """False if a call of ``tokens`` and one of ``more`` are known to cost less than one of both."""
    shapes = tokens, more, tokens + more
    if min(costs.count(Phase.PREFILL, 1, shape) for shape in shapes) < SEEN:
        return True
    apart, other, together = (costs.predict(Phase.PREFILL, 1, shape) or 0.0 for shape in shapes)
    return together <= apart + other


def shared_batch(sequences: Sequence[Slot]) -> Batch:
    """The call that feeds what is left of each, with logits after its last token."""
    rest = [sequence.context[sequence.cached :] for sequence in sequences]
    lengths = np.array([len(tokens) for tokens in rest], np.int64)
    ids = np.zeros((len(rest), lengths.max()), np.int64)
    for row, tokens in zip(ids, rest, strict=True):
        row[: len(tokens)] = tokens
    past = np.array([sequence.cached for sequence in sequences], np.int64)
    return Batch(Phase.PREFILL, ids, past, lengths[:, None] - 1, sequences[0].row, new_lengths=lengths)
