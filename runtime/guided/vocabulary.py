"""The tokens that a model can write, for the grammar library and its masks."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError, require
from llmc.runtime.host.machine import return_freed_memory
from llmc.runtime.text.control_tokens import any_of
from llmc.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Bits = npt.NDArray[np.uint8]
_REASON_LENGTH = 300


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a model can write.

    Args:
        tokens: the library's view of the tokenizer, which may have more or fewer ids than the model.
        size: length of the model's logits, V.
        eos_token_ids: the model's, if the tokenizer has them; at least one.
        eos: the same as bits (token i is bit i % 8 of byte i // 8).
        writable: all other ids that have a token, as bits.
    """

    tokens: "LLTokenizer"
    size: int
    eos_token_ids: tuple[int, ...]
    eos: Bits
    writable: Bits

    @classmethod
    def load(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> "Vocabulary":
        library = require("llguidance", "guided")
        backend = tokenizer._backend
        ids = np.fromiter(backend.get_vocab(with_added_tokens=True).values(), np.int64)
        exists = np.zeros(max(vocab_size, int(ids.max(initial=-1)) + 1), np.bool_)
        exists[ids] = True
        known = tuple(token for token in eos_token_ids if 0 <= token < vocab_size and exists[token])
        if not known:
            raise RequestError(
                f"none of the model's end-of-sequence tokens {list(eos_token_ids)} is in its tokenizer; a guided "
                "output needs one to end with"
            )
        tokens = library.LLTokenizer(_Spellings(tokenizer, exists.size, known), eos_token=list(known))
        return_freed_memory()
        eos = np.zeros(vocab_size, np.bool_)
        eos[list(known)] = True
        writable = exists[:vocab_size] & ~eos
        return cls(tokens, vocab_size, known, *(np.packbits(flags, bitorder="little") for flags in (eos, writable)))

    @classmethod
    @cache
    def of_bytes(cls) -> "Vocabulary":
        """A vocabulary with one token per byte, and one that ends."""
        tokens = require("llguidance", "guided").LLTokenizer("byte")
        eos = np.arange(tokens.vocab_size) == tokens.eos_token
        bits = (np.packbits(flags, bitorder="little") for flags in (eos, ~eos))
        return cls(tokens, tokens.vocab_size, (tokens.eos_token,), *bits)


class _Spellings:
    """A tokenizer with the interface that the library reads, and the runtime's spellings."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [tokenizer.spell(token_id) for token_id in range(size)]
        self.special_token_ids = [token_id for token_id in range(size) if tokenizer.is_silent(token_id)]
        self._encode = tokenizer.encode
        controls = {self.tokens[token_id] for token_id in (*self.special_token_ids, *eos_token_ids)} - {b""}
        self._controls = re.compile(f"(?={any_of(text.decode(errors='ignore') for text in controls)})")
        # If the tokenizer adds a space before a text, encode the text after a character that merges with nothing.
        begun = b"".join(self.tokens[token_id] for token_id in tokenizer.encode("a", add_special_tokens=False))
        self._before = "" if begun == b"a" else "\x02"

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text; special tokens in it are encoded as ordinary text."""
        cuts = [0, *(match.start() + 1 for match in self._controls.finditer(text)), len(text)]
        return [token for start, end in pairwise(cuts) for token in self._tokens(text[start:end])]

    def _tokens(self, text: str) -> list[int]:
        before = self._encode(self._before, add_special_tokens=False)
        return self._encode(self._before + text, add_special_tokens=False)[len(before) :]


def shorten_reason(text: str) -> str:
    """The reason in a library's error message, without the state and the source that follow."""
    text = re.split(r"<state>|<non-verbose/>|⟦|\n *[0-9]+ \|", text)[0]
    text = " ".join(text.split())
    return text if len(text) <= _REASON_LENGTH else text[:_REASON_LENGTH] + "..."
