"""Diffusion language models."""

from dataclasses import dataclass
from typing import Annotated

# Masks of a diffusion model's block: each of them has logits.
MOST_MASKS = 128


@dataclass(frozen=True)
class Diffusion:
    """A model that puts tokens into the places of masks, several at a time, each seeing all others.

    Attributes:
        mask_token_id: of what stands where a token is still to come.
        shift: how many positions before a token its logits are.
    """

    mask_token_id: Annotated[int, range(1 << 24)]
    shift: Annotated[int, range(2)]
