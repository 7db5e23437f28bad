"""Strategies on rows of the cache: several strands of one request that go on, fork and end together."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.engine.sequence import Job, Strand
from llmc.runtime.kv.rows import Rows
from llmc.runtime.sampling import Logits
from llmc.runtime.search import Branch, Strategy


class Lockstep:
    """Carries a strategy's branches out on cache rows, copying only the positions in which two branches differ."""

    def __init__(self, job: Job, strategy: Strategy, rows: Rows) -> None:
        self.strategy = strategy
        self._job = job
        self._rows = rows
        self.strands: list[Strand] = []

    def start(self, leader: Strand, logits: Logits, hidden: NDArray[np.float32] | None) -> bool:
        """After the prompt, which ``leader`` decodes from; true when the strategy is done."""
        self.strands = [leader]
        return self._apply(self.strategy.start(self._job.prompt, logits, hidden))

    def step(self, logits: NDArray[np.float32], hidden: NDArray[np.float32] | None) -> bool:
        """After each strand's token, logits [strands, V]; true when the strategy is done."""
        return self._apply(self.strategy.step(logits, hidden))

    def _apply(self, branches: Sequence[Branch]) -> bool:
        before = self.strands
        contexts = [[*before[branch.parent].context, branch.token] for branch in branches]
        after = before[: len(branches)]
        for i, branch in enumerate(branches):
            parent = before[branch.parent]
            if i >= len(before):
                child = Strand(self._job, [])
                self._rows.fork(parent, child, len(contexts[i]) - 1)
                self._job.strands.append(child)
                after.append(child)
            elif branch.parent != i:
                shared = common(before[i].context, parent.context)
                self._rows.share(parent, before[i], shared, len(contexts[i]) - 1)
        for strand in before[len(branches) :]:
            self._rows.release(strand)
            self._job.strands.remove(strand)
        for strand, context in zip(after, contexts, strict=True):
            strand.context = context
        self.strands = after
        return not branches


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences share at their start."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
