"""What comes of a step: tokens from logits, and who can share a call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.engine.sequence import Sample, Strand
from llmc.runtime.sampling import Choice, Logits
from llmc.runtime.speculation import verify


@dataclass
class Drawn:
    """What came of one strand's step: tokens of a sample, logits and hidden state for a strategy, or an error."""

    strand: Strand
    drafted: int = 0
    choices: list[Choice] = field(default_factory=list)
    logits: Logits | None = None
    hidden: Logits | None = None
    error: BaseException | None = None


def draw(strand: Strand, guesses: Sequence[int], logits: NDArray[np.float32]) -> Drawn:
    """A sample's tokens as long as they agree with the guesses, and one more, from logits [1 + guesses, V]."""
    assert isinstance(strand, Sample)
    drawn = Drawn(strand, len(guesses))

    def token(i: int) -> int:
        tokens = [*strand.tokens, *(choice.token for choice in drawn.choices)] if drawn.choices else strand.tokens
        drawn.choices.append(strand.sampler(logits[i], tokens))
        return drawn.choices[-1].token

    try:
        for _ in verify(guesses, token):
            if strand.complete:
                break
    except BaseException as error:  # noqa: BLE001  # raised again where the job is known
        drawn.error = error
    return drawn


def draw_one(work: tuple[Strand, Logits, Logits | None]) -> Drawn:
    """A sample's next token; for a strand in lockstep copies of its logits [V] and hidden state [H]."""
    strand, logits, hidden = work
    if isinstance(strand, Sample):
        return draw(strand, (), logits[None])
    return Drawn(strand, logits=logits.copy(), hidden=None if hidden is None else hidden.copy())


def neighbours(strands: Sequence[Strand], drafts: dict[int, list[int]]) -> Iterator[list[Strand]]:
    """Strands that can share a call: in rows side by side, none with drafts; those with drafts are alone."""
    group: list[Strand] = []
    for strand in strands:
        if drafts[strand.key]:
            if group:
                yield group
            yield [strand]
            group = []
        else:
            group.append(strand)
    if group:
        yield group
