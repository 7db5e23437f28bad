"""Heads that guess another model's next tokens."""

from dataclasses import dataclass
from typing import Annotated

from llmc.bundle.model.ranges import Width

# First linear of a draft head.
HEAD_INPUT = "model.fc"

# Projects a draft head's hidden states to the model's width.
HEAD_OUTPUT = "model.post_projection"

# Scores clusters of tokens, of a head that chooses clusters first.
CENTROIDS = "model.centroids"


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """A head that guesses another model's next tokens from its hidden states."""

    # Layers of the other model behind which the hidden states are read.
    borders: Annotated[tuple[Annotated[int, range(1, 1 << 12)], ...], range(1, 17)]
    width: Width  # of each of these hidden states
    own_width: Width  # of the head's own hidden states, and of the embedding
