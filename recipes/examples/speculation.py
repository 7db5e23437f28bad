"""Draft tokens from earlier text, verify several in one call, get the same output faster.

python recipes/examples/speculation.py BUNDLE
"""

import sys

from llmc.runtime import GenerationResult, load

PROMPT = "import os\n" * 4


def main(bundle: str) -> GenerationResult:
    """The same tokens with and without drafts; `strict` guarantees it bit for bit."""
    with load(bundle, determinism="strict") as model:
        plain = model.generate(PROMPT, max_tokens=64, temperature=0)
    with load(bundle, determinism="strict", draft="lookup") as model:
        drafted = model.generate(PROMPT, max_tokens=64, temperature=0)
    assert drafted.token_ids == plain.token_ids
    print(f"{drafted.metrics.accepted} of {drafted.metrics.drafted} guesses were right")
    return drafted


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} BUNDLE")
    main(sys.argv[1])
