"""Heads that guess another model's next tokens."""

from dataclasses import dataclass
from typing import Annotated

from llmc.bundle.model.ranges import Width

# The linear of a draft head that its rows go through.
HEAD_INPUT = "model.fc"

# Of one whose hidden states are not as wide as the model's, that which makes them so.
HEAD_OUTPUT = "model.post_projection"

# Of one that first chooses clusters of tokens.
CENTROIDS = "model.centroids"


@dataclass(frozen=True)
class DraftHead:
    """A head that guesses another model's next tokens from its hidden states.

    Attributes:
        borders: of the hidden states that it reads of each token: those after so many layers.
        width: of each of them.
        own_width: of its own hidden states, and of the embedding.
    """

    borders: Annotated[tuple[Annotated[int, range(1, 1 << 12)], ...], range(1, 17)]
    width: Width
    own_width: Width
