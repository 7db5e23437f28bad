"""Draft heads as drafters: a layer or so that reads the hidden states of the model that it guesses for."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import DraftError
from llmc.runtime.runner.prefill import batch
from llmc.runtime.sessions.base import Phase
from llmc.runtime.speculation.drafters import LONGEST
from llmc.runtime.speculation.model_drafter import DraftedSequence, ModelDrafter

Floats = NDArray[np.float32]

STEPS = 4
"""Tokens up to which the graph of decode reads them: that of prefill pays from five on."""


class HeadDrafter(ModelDrafter):
    """Proposes the tokens that a draft head finds most probable.

    At each position the head reads the model's hidden states and the token after it. Beyond the last position it reads
    its own hidden states and guesses, and reads these positions again once the model's hidden states are known. It
    skips what the model did not compute, such as a cached prefix: only distances between positions count. Source:
    EAGLE-3, https://arxiv.org/abs/2503.01840.

    Args:
        model: a loaded :class:`llmc.runtime.Model` of a draft head, which the drafter takes over and closes.
        target: the loaded bundle that is drafted for.

    Raises:
        DraftError: the two have different tokenizers, or the target gives other hidden states, or none.
    """

    def __init__(self, model: Any, target: Any) -> None:
        super().__init__(model, target)
        head, width = model.manifest.geometry.head, model.manifest.geometry.row_width
        given = target.manifest.hidden, target.manifest.geometry.hidden_size
        if given != (head.borders, head.width):
            raise DraftError(
                f"this draft head reads {head.width} values after each of {list(head.borders)} layers, the model gives "
                f"{given[1]} after each of {list(given[0])}",
                "build the model with --head and the head's export",
                path=model.folder,
            )
        self._row_width, self._given = width, width - head.own_width

    def watch(self, slot: Any, past: int, hidden: Floats) -> None:
        """Take in the hidden states [n, W] of tokens that were just fed to the model, from the position ``past`` on, if
        drafts may follow; only in texts, for a head does not see other rows."""
        if not (slot.speculates and slot.is_text):
            return
        sequence = self._sequence(slot.key)
        if not sequence.end <= past <= sequence.end + len(sequence.waiting):
            sequence.begin(past)
        del sequence.waiting[past - sequence.end :]
        sequence.waiting += list(hidden.copy())
        known = min(len(sequence.waiting), len(slot.context) - 1 - sequence.end)  # with the token after them
        if len(sequence.waiting) > self._chunk and known > 0 and self._read(sequence, slot.context, known, 0) is None:
            sequence.begin(past + len(hidden))

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` most probable tokens after ``tokens``; none beyond its context and memory, or without the
        hidden states of the last but one."""
        sequence, drafts = self._sequences.get(key), list[int]()
        known = 0 if sequence is None else len(tokens) - 1 - sequence.end
        if sequence is None or not 0 < known <= len(sequence.waiting):
            return []
        count = min(count, self._context - sequence.cached - known + 1)  # the last draft is not fed
        logits = self._read(sequence, tokens, known, count - 1) if count > 0 else None
        while logits is not None:
            drafts.append(int(logits[: self._vocab_size].argmax()))
            if len(drafts) == count:
                break
            own = self._session.hidden[0, -1:]
            logits = self._run(
                sequence.row, drafts[-1:], sequence.cached + len(drafts) - 1, own, slice(self._given, None)
            )
        return drafts

    def _read(self, sequence: "_Sequence", tokens: Sequence[int], count: int, more: int) -> Floats | None:
        """Feed the first ``count`` hidden states that wait, with the tokens after them; logits [V] after the last, or
        None without room for these and ``more`` positions."""
        if sequence.cached + count + more > self._context or not self._reserve(sequence.cached + count + more):
            return None
        logits = None
        for start in range(0, count, self._chunk):
            part = sequence.waiting[start : min(start + self._chunk, count)]
            after = tokens[sequence.end + 1 : sequence.end + 1 + len(part)]
            logits = self._run(sequence.row, after, sequence.cached, part, slice(self._given))
            sequence.cached += len(part)
        del sequence.waiting[:count]
        return logits

    def _run(self, row: int, tokens: Sequence[int], past: int, hidden: Any, place: slice) -> Floats:
        rows = np.zeros((len(tokens), self._row_width), np.float32)
        rows[:, place] = hidden
        phase = Phase.DECODE if len(tokens) <= STEPS else Phase.PREFILL
        call = batch(phase, np.array([tokens]), [past], [len(tokens) - 1], row)
        call = call.feed(embedding_indices=np.arange(len(tokens))[None], embeddings=rows)
        logits: Floats = self._session.run(call)[0, -1]
        return logits

    def _make_sequence(self, row: int) -> "_Sequence":
        return _Sequence([], row=row)


class AssistantDrafter(HeadDrafter):
    """Proposes the tokens that a head without keys and values of its own finds most probable.

    It reads the model's keys and values in the model's own cache, a cached prefix included, and the hidden states
    before the last token; for further drafts its own hidden states, at the same position. Source:
    ``SinglePositionMultiTokenCandidateGenerator`` of transformers.

    Raises:
        DraftError: as above, or the model's cache is of another shape or type.
    """

    def __init__(self, model: Any, target: Any) -> None:
        super().__init__(model, target)
        mine, kinds = model.manifest.geometry.caches, (model.manifest.cache, target.manifest.cache)
        known = {replace(cache, lent=False) for cache in mine} <= {*target.manifest.geometry.caches}
        if not known or kinds[0] != kinds[1]:
            raise DraftError(
                f"this draft head reads caches of layers {' and '.join(it.name for it in mine)} in {kinds[0]}, "
                f"the model has {'them' if known else 'others'} in {kinds[1]}",
                "export the head --of that model, and build both with one type of cache, float32 or float16",
                path=model.folder,
            )
        self._session.borrow(target.runner.session.cache)
        self._seen: dict[int, tuple[Any, int, Floats]] = {}

    def watch(self, slot: Any, past: int, hidden: Floats) -> None:
        """Keep the last hidden states [n, W] of a sequence, as many as drafts and the token before them have."""
        if slot.speculates and slot.is_text:
            skipped = max(0, len(hidden) - LONGEST - 1)
            self._seen[slot.key] = slot, past + skipped, hidden[skipped:].copy()

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` most probable tokens after ``tokens``; none beyond its context, or without the hidden states
        of the last but one."""
        slot, first, hidden = self._seen.get(key, (None, 0, np.empty((0, 0), np.float32)))
        past, drafts = len(tokens) - 1, list[int]()
        if not 0 <= past - 1 - first < len(hidden) or past >= self._context or slot.cached != past:
            return []
        rows, place = hidden[past - 1 - first], slice(self._given)
        for _ in range(count):
            logits = self._run(slot.row, [*tokens[-1:], *drafts][-1:], past, rows, place)
            drafts.append(int(logits[: self._vocab_size].argmax()))
            rows, place = self._session.hidden[0, -1], slice(self._given, None)
        return drafts

    def forget(self, key: int) -> None:
        self._seen.pop(key, None)


@dataclass(eq=False)
class _Sequence(DraftedSequence):
    """A sequence of the target model, as far as the head has read it."""

    first: int = 0  # position from which on the head has read ``cached`` ones
    waiting: list[Floats] = field(default_factory=list)  # hidden states of the positions after them

    @property
    def end(self) -> int:
        """The target's position that is read next."""
        return self.first + self.cached

    def begin(self, position: int) -> None:
        """Leave out all that lies before ``position``."""
        self.first, self.cached, self.waiting = position, 0, []
