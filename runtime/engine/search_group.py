"""A beam search on rows of the cache: branches of one request that go on, fork and end together."""

from collections.abc import Callable, Sequence

import numpy as np

from llmc.runtime.api.results import Delta, Output
from llmc.runtime.engine.branch import Branch, BranchGroup, RequestState, SamplerOutput
from llmc.runtime.engine.scheduler import Scheduler
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.search.beam import BeamSearch, Continuation, Hypothesis


class SearchBranch(Branch):
    """A beam; the search appends its tokens."""

    together = True

    @property
    def text_length(self) -> int:
        """As long as it may become: beams copy rows of one another, so all of them use the same rope factors."""
        return max(len(self.context), self.request.final_length)

    def sample(self, logits: Logits) -> SamplerOutput["SearchBranch"]:
        return SamplerOutput(self, logits=logits[0].copy())


class SearchGroup(BranchGroup[SearchBranch]):
    """Runs a search on up to ``width`` rows. Copies only the positions in which two branches differ."""

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
        return self.width - len(self.branches)

    def branch(self, index: int) -> SearchBranch:
        return SearchBranch(self, list(self.request.prompt))

    def begin(self, scheduler: Scheduler, branch: SearchBranch, logits: Logits | None) -> bool:
        assert logits is not None
        scheduler.reserve(self.promised, branch.cached + 1)
        return self._advance(scheduler, self._search.start(self.request.prompt, logits))

    def step(self, scheduler: Scheduler, outputs: Sequence[SamplerOutput[SearchBranch]]) -> bool:
        scheduler.reserve(self.promised, outputs[0].branch.cached + 1)
        by_key = {output.branch.key: output for output in outputs}  # rows may have changed places
        ordered = [by_key[branch.key] for branch in self.branches]
        logits = np.stack([output.logits for output in ordered if output.logits is not None])
        return self._advance(scheduler, self._search.step(logits))

    def outputs(self) -> list[Output]:
        return self._outputs

    def _advance(self, scheduler: Scheduler, grown: Sequence[Continuation]) -> bool:
        self._follow(scheduler, grown)
        if grown:
            self.request.timeline.token()
            return False
        self._outputs = [self._finish(index, found) for index, found in enumerate(self._search.outputs())]
        for output in self._outputs:
            self.request.emit(Delta(output.index, output.text, output.token_ids), timed=False)
        return True

    def _follow(self, scheduler: Scheduler, grown: Sequence[Continuation]) -> None:
        before = list(self.branches)
        contexts = [[*before[chosen.parent].context, chosen.token] for chosen in grown]
        after = before[: len(grown)]
        for i, chosen in enumerate(grown):
            parent = before[chosen.parent]
            if i >= len(before):
                after.append(SearchBranch(self, []))
                scheduler.fork(parent, after[i], len(contexts[i]) - 1)
            elif chosen.parent != i:
                shared = common(before[i].context, parent.context)
                scheduler.copy(parent, before[i], shared, len(contexts[i]) - 1)
        for branch in before[len(grown) :]:
            scheduler.release(branch)
        for branch, context in zip(after, contexts, strict=True):
            branch.context = context


def common(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
