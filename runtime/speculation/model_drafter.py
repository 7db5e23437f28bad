"""A second, smaller model as drafter: any bundle with the same tokenizer."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import TOKENIZER_FILE
from llmc.errors import DraftError, ResourceError
from llmc.runtime.kv.rows import Slot
from llmc.runtime.runner.model_runner import Watch
from llmc.runtime.runner.prefill import batch, prefill
from llmc.runtime.sessions.base import Phase
from llmc.strict import read_json

log = logging.getLogger(__name__)

STEPS = 2
"""New tokens up to which a step for each is as fast as a call for all: after an accepted proposal there are two."""


class ModelDrafter:
    """Proposes the tokens that a second model finds most probable.

    Each sequence has a row of that model's cache, as many as its bundle's ``max_batch``; the one that was idle longest
    makes room for a new one. The model reads a prompt in chunks, one or two tokens in steps. Rejected drafts are left
    in the cache and overwritten; states become again what they were before all drafts, and those that came true are fed
    anew.

    Args:
        model: a loaded :class:`llmc.runtime.Model`, which the drafter takes over and closes.
        target: the loaded bundle that is drafted for.

    Raises:
        DraftError: the two have different tokenizers.
    """

    costs_by_token = True
    watch: Watch | None = None

    def __init__(self, model: Any, target: Any) -> None:
        check_same_tokenizer(model, target)
        self._model = model
        self._session = model.runner.session
        self._context = model.runner.max_context
        self._chunk = model.runner.prefill_chunk
        self._known_ids = model.manifest.geometry.vocab_size
        # Either may be padded beyond the tokenizer; what the target lacks must not be proposed.
        self._vocab_size = min(self._known_ids, target.manifest.geometry.vocab_size)
        self._most_rows = model.manifest.limits.max_batch
        self._sequences: OrderedDict[int, Any] = OrderedDict()
        self._free: list[int] = []
        self._warned = False

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` most probable tokens after ``tokens``; none beyond its context, memory or vocabulary."""
        count = min(count, self._context - len(tokens) + 1)  # the last draft is not fed
        if count < 1 or not tokens:
            return []
        sequence = self._sequence(key)
        self._agree(sequence, tokens)
        if max(tokens[sequence.cached :]) >= self._known_ids or not self._reserve(len(tokens) + count - 1):
            return []
        # One or two tokens, as after an accepted proposal, are fed in steps.
        phase = Phase.DECODE if len(tokens) - sequence.cached <= STEPS else Phase.PREFILL
        for logits in prefill(self._session.run, sequence, self._chunk, phase=phase):  # noqa: B007  # the last ones
            self._session.cache.let_go(sequence.row, sequence.cached)
        if count > 1 and not self._session.cache.can_rewind:
            sequence.before = self._session.cache.read_states(sequence.row, sequence.cached)
        while True:
            token = int(logits[-1, : self._vocab_size].argmax())
            if len(sequence.drafts) == count - 1:
                return [*sequence.drafts, token]
            past = len(tokens) + len(sequence.drafts)
            logits = self._session.run(batch(Phase.DECODE, np.array([[token]]), [past], [0], sequence.row))[0]
            sequence.drafts.append(token)

    def _agree(self, sequence: "DraftedSequence", tokens: Sequence[int]) -> None:
        """Go back over rejected drafts; states whose tokens are the same once more begin anew."""
        read, fed = sequence.cached, sequence.cached + len(sequence.drafts)
        sequence.agree(tokens)
        if sequence.cached < fed and not self._session.cache.can_rewind:
            sequence.cached = read if sequence.before is not None and read < len(tokens) else 0
            if sequence.cached and sequence.before is not None:
                self._session.cache.write_states(sequence.row, read, sequence.before)
        sequence.before = None

    def forget(self, key: int) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._free.append(sequence.row)

    def close(self) -> None:
        self._sequences.clear()
        self._model.close()

    def _make_sequence(self, row: int) -> "DraftedSequence":
        return DraftedSequence([], row=row)

    def _sequence(self, key: int) -> Any:
        if key not in self._sequences:
            if not self._free and len(self._sequences) >= self._most_rows:
                self.forget(next(iter(self._sequences)))
            row = self._free.pop() if self._free else len(self._sequences)
            self._sequences[key] = self._make_sequence(row)
        self._sequences.move_to_end(key)
        return self._sequences[key]

    def _reserve(self, positions: int) -> bool:
        """Make room for ``positions`` in all rows in use; drafting is no reason to fail, so lack of memory ends it."""
        rows = 1 + max(sequence.row for sequence in self._sequences.values())
        try:
            self._session.cache.grow(rows, positions, self._context)
        except ResourceError as error:
            if not self._warned:
                log.warning("%s: the draft model does not go on with a sequence: %s", self._model.folder, error)
            self._warned = True
            return False
        return True


@dataclass(eq=False)
class DraftedSequence(Slot):
    """A sequence of the target in a row of the draft model's cache, followed by drafts that are not verified yet.

    ``before`` are states of the row before the drafts, None without states.
    """

    before: NDArray[np.float32] | None = None

    def agree(self, tokens: Sequence[int]) -> None:
        """Keep the drafts that came true, and at least one token to read, for its logits are needed."""
        for draft, token in zip(self.drafts, tokens[self.cached : self.cached + len(self.drafts)], strict=False):
            if draft != token:
                break
            self.cached += 1
        self.cached = min(self.cached, len(tokens) - 1)
        self.context, self.drafts = tokens, []


def check_same_tokenizer(draft: Any, target: Any) -> None:
    """Refuse a draft model whose token ids mean something else, with the first difference; padding is none."""
    theirs, ours = draft.tokenizer.special_tokens, target.tokenizer.special_tokens
    files = [loaded.manifest.files.get(TOKENIZER_FILE) for loaded in (draft, target)]
    if files[0] is None or files[1] is None or files[0].sha256 != files[1].sha256:
        theirs, ours = _vocabulary(draft.folder) | theirs, _vocabulary(target.folder) | ours
    for token in sorted(theirs.keys() | ours.keys()):
        if theirs.get(token) != ours.get(token):
            raise DraftError(
                f"this draft model has another tokenizer than the model, expected the same one: {token} is "
                f"{theirs.get(token)!r}, there {ours.get(token)!r}",
                "draft with a model of the same family",
                path=draft.folder,
            )


def _vocabulary(folder: Path) -> dict[str, str]:
    content: dict[str, Any] = read_json(folder / TOKENIZER_FILE)
    listed = content["model"].get("vocab", {})
    # A unigram model lists [text, score] pairs in the order of their ids, the others map text to id.
    pairs = ((text, i) for i, (text, _) in enumerate(listed)) if isinstance(listed, list) else listed.items()
    added = ((token["content"], token["id"]) for token in content.get("added_tokens") or [])
    return {f"token {number}": text for text, number in (*pairs, *added)}
