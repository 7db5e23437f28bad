"""Write llama.cpp's tokens of texts: a JSON list of texts on standard input, one of lists of ids on standard output.

    python llamacpp_tokens.py MODEL < texts.json

Needs llama-cpp-python. Special tokens are read as such, and no token is added before or after.
"""

import json
import sys

from llama_cpp import Llama


def main() -> None:
    """Tokenize all texts."""
    model = Llama(sys.argv[1], vocab_only=True, verbose=False)
    texts = json.load(sys.stdin)
    print(json.dumps([model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]))


if __name__ == "__main__":
    main()
