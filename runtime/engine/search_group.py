"""A beam search on rows of the cache: branches of one request that go on, fork and end together."""

from collections.abc import Callable
from collections.abc import Sequence as List

import numpy as np

from llmc.runtime.api.results import Delta, Output
from llmc.runtime.engine.scheduler import Scheduler
from llmc.runtime.engine.sequence import RequestState, SamplerOutput, Sequence, SequenceGroup
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.search.beam import BeamSearch, Branch, Hypothesis


class SearchSequence(Sequence):
    """A sequence of a search, which gets its tokens from it."""

    together = True

    @property
    def text_length(self) -> int:
        """As long as it may become: branches share rows, and switch none of them on the way."""
        return max(len(self.context), self.request.final_length)

    def sample(self, logits: Logits) -> SamplerOutput["SearchSequence"]:
        return SamplerOutput(self, logits=logits[0].copy())


class SearchGroup(SequenceGroup[SearchSequence]):
    """Carries a search out on up to ``width`` rows, copying only the positions in which two branches differ."""

    def __init__(
        self, request: RequestState, search: BeamSearch, width: int, finish: Callable[[int, Hypothesis], Output]
    ) -> None:
        super().__init__(request)
        self.width = width
        self._search = search
        self._finish = finish
        self._outputs: list[Output] = []

    @property
    def promised(self) -> int:
        return self.width - len(self.sequences)

    def sequence(self, index: int) -> SearchSequence:
        return SearchSequence(self, list(self.request.prompt))

    def begin(self, scheduler: Scheduler, sequence: SearchSequence, logits: Logits | None) -> bool:
        assert logits is not None
        scheduler.reserve(self.promised, sequence.cached + 1)
        return self._advance(scheduler, self._search.start(self.request.prompt, logits))

    def step(self, scheduler: Scheduler, outputs: List[SamplerOutput[SearchSequence]]) -> bool:
        scheduler.reserve(self.promised, outputs[0].sequence.cached + 1)
        by_key = {output.sequence.key: output for output in outputs}  # rows may have changed places
        ordered = [by_key[sequence.key] for sequence in self.sequences]
        logits = np.stack([output.logits for output in ordered if output.logits is not None])
        return self._advance(scheduler, self._search.step(logits))

    def outputs(self) -> list[Output]:
        return self._outputs

    def _advance(self, scheduler: Scheduler, branches: List[Branch]) -> bool:
        self._follow(scheduler, branches)
        if branches:
            self.request.timeline.token()
            return False
        self._outputs = [self._finish(index, found) for index, found in enumerate(self._search.outputs())]
        for output in self._outputs:
            self.request.emit(Delta(output.index, output.text, output.token_ids), timed=False)
        return True

    def _follow(self, scheduler: Scheduler, branches: List[Branch]) -> None:
        before = list(self.sequences)
        contexts = [[*before[branch.parent].context, branch.token] for branch in branches]
        after = before[: len(branches)]
        for i, branch in enumerate(branches):
            parent = before[branch.parent]
            if i >= len(before):
                after.append(SearchSequence(self, []))
                scheduler.fork(parent, after[i], len(contexts[i]) - 1)
            elif branch.parent != i:
                shared = common(before[i].context, parent.context)
                scheduler.share(parent, before[i], shared, len(contexts[i]) - 1)
        for sequence in before[len(branches) :]:
            scheduler.release(sequence)
        for sequence, context in zip(after, contexts, strict=True):
            sequence.context = context


def common(first: List[int], second: List[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
