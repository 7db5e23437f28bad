"""A model that says what a test wants."""

from collections.abc import Callable

import numpy as np

from llmc.runtime import Model


def speak(model: Model, text: str) -> list[Callable[[tuple[int, ...], np.ndarray], np.ndarray]]:
    """A logits processor that makes the model say a text and end, as far as a grammar lets it."""
    tokens = [*model.tokenizer.encode(text, add_special_tokens=False), model.manifest.generation.eos_token_ids[0]]
    start: list[int] = []

    def process(so_far: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        start[:] = start or [len(so_far)]
        logits[tokens[min(len(so_far) - start[0], len(tokens) - 1)]] = 1000
        return logits

    return [process]
