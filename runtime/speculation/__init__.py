"""Speculation: guess the next tokens cheaply, have the model check them in one call, lose nothing.

:func:`verify` is why nothing is lost; a :class:`Drafter` guesses; :class:`DraftLength` decides how much guessing pays;
:class:`Speculator` joins them for one sequence.
"""

from collections.abc import Callable, Iterator, Sequence

from llmc.runtime.speculation.control import LENGTHS, DraftLength, Ledger
from llmc.runtime.speculation.drafters import Drafter, PromptLookup
from llmc.runtime.speculation.model_drafter import ModelDrafter, check_same_tokenizer
from llmc.runtime.speculation.speculator import Speculator

__all__ = [
    "LENGTHS",
    "DraftLength",
    "Drafter",
    "Ledger",
    "ModelDrafter",
    "PromptLookup",
    "Speculator",
    "check_same_tokenizer",
    "verify",
]


def verify(drafts: Sequence[int], draw: Callable[[int], int]) -> Iterator[int]:
    """The tokens to commit when ``drafts`` were fed and the model has logits before, between and after them.

    ``draw(i)`` draws the model's token from the logits at the ``i``-th of the fed positions (0: what the first draft
    has to agree with; ``len(drafts)``: the token after the last). Draws go on while they agree with the drafts; the
    first that does not is committed and is the last; after the last draft one more is drawn. So 1 ... ``len(drafts)``
    + 1 tokens come, all but the last equal to the drafts, and ``draw`` is called once for each, in order and only when
    it is asked for: whoever stops early, at an end-of-sequence token, has drawn nothing beyond it.

    This is speculative sampling (Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al.,
    https://arxiv.org/abs/2302.01318) with a proposal q that puts all its mass on the draft d. There d is accepted with
    probability min(1, p(d) / q(d)) = p(d), and otherwise a token is drawn from the residual max(0, p - q), normalised,
    which is p without d. Here one token t is drawn from p. It equals d with probability p(d); and given that it does
    not, it is distributed as p without d. The two agree in distribution, which is p: P(t = d) = p(d), and for x other
    than d P(t = x) = (1 - p(d)) * p(x) / (1 - p(d)) = p(x). Whatever the drafts are, even chosen against us, as long as
    they do not know the draw itself.

    More than that: the draws see the logits that they would see without drafts, and randomness is a function of (seed,
    position), so the tokens are the same ones, not only as probable. (As far as the logits are the same bits; that is
    the session's part.)
    """
    for i, draft in enumerate(drafts):
        token = draw(i)
        yield token
        if token != draft:
            return
    yield draw(len(drafts))
