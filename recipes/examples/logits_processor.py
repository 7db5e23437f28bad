"""Your own rule for tokens: a function of the tokens so far and their logits.

python recipes/examples/logits_processor.py BUNDLE
"""

import sys
from collections.abc import Sequence

import numpy as np

from llmc.runtime import load
from llmc.runtime.sampling.logits import Logits


def main(bundle: str) -> str:
    """Complete a prompt without a single digit, and stop after the first line."""
    with load(bundle) as model:
        vocabulary = range(model.manifest.geometry.vocab_size)
        digits = [token for token in vocabulary if any(c.isdigit() for c in model.tokenizer.decode([token]))]

        def without_digits(tokens: Sequence[int], logits: Logits) -> Logits:
            logits[digits] = -np.inf
            return logits

        def first_line(new_tokens: Sequence[int], text: str) -> bool:
            return "\n" in text

        text = model.generate(
            "x = [",
            max_tokens=48,
            temperature=0.8,
            seed=1,
            logits_processors=[without_digits],
            stopping_criteria=[first_line],
        ).text
    print(text)
    return text


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} BUNDLE")
    main(sys.argv[1])
