"""Several answers to one prompt: beams, samples that share a prefill, and the sample that agrees most with the others.

python recipes/examples/beams.py BUNDLE
"""

import sys

from llmc.runtime import GenerationResult, load

PROMPT = "def area(width, height):\n    return "


def main(bundle: str) -> dict[str, GenerationResult]:
    """The same prompt in three ways; ranked `outputs` are best first."""
    with load(bundle) as model:
        results = {
            "beams": model.generate(PROMPT, max_tokens=12, num_beams=4, num_return_sequences=2),
            "best of 6": model.generate(PROMPT, max_tokens=12, temperature=0.8, seed=1, n=2, best_of=6),
            "consensus": model.generate(PROMPT, max_tokens=12, temperature=0.8, seed=1, n=6, consensus="chrf"),
        }
    for name, result in results.items():
        for output in result.outputs:
            print(f"{name}: {output.score:.3f} {output.text!r}")
    return results


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} BUNDLE")
    main(sys.argv[1])
