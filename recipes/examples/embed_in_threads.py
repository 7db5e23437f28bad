"""A service with worker threads: all of them share one model, and their requests share its batches.

python recipes/examples/embed_in_threads.py BUNDLE
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from llmc.errors import RequestError
from llmc.runtime import load

PROMPTS = ["def read_file(path):\n", "class Stack:\n", "import os\n", "for i in range("]


def main(bundle: str) -> list[str]:
    """Complete the prompts in parallel, like the handlers of a service."""
    with load(bundle) as model:

        def handle(prompt: str) -> str:
            try:
                return model.generate(prompt, max_tokens=16, temperature=0, deadline_s=60).text
            except RequestError as error:  # only this request failed
                return f"({error})"

        with ThreadPoolExecutor(4) as workers:
            answers = list(workers.map(handle, PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(repr(prompt), "->", repr(answer))
    return answers


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} BUNDLE")
    main(sys.argv[1])
