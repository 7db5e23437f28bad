"""Diffusion language models."""

from dataclasses import dataclass
from typing import Annotated

# Most masks in a block of a diffusion model; each has logits.
MOST_MASKS = 128


@dataclass(frozen=True)
class Diffusion:
    """A model that replaces masks by tokens, several at a time; every token sees all others."""

    mask_token_id: Annotated[int, range(1 << 24)]
    shift: Annotated[int, range(2)]  # the logits for a token stand so many positions before it
