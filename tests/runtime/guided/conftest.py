"""Vocabularies of each kind, with the texts of their tokens read from the files by other means than the library's."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from llmc.runtime.guided.grammars import Grammars
from llmc.runtime.guided.guide import GrammarGuide
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[3] / "recipes/tiny/checkpoint"
PADDING = 13  # ids that the model has and the tokenizer has not; no multiple of 8
MOST_TOKENS = 600


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer
    spellings: list[bytes | None]  # None: no text
    eos: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.spellings) + PADDING

    def grammars(self, eos: tuple[int, ...] | None = None) -> Grammars:
        return Grammars(self.tokenizer, self.size, self.eos if eos is None else eos)

    @cached_property
    def shared(self) -> Grammars:
        """For tests that need none of their own; reading a vocabulary takes a moment."""
        return self.grammars()

    def ask(self, grammars: Grammars | None = None, **form: Any) -> GrammarGuide | None:
        compiled = (grammars or self.shared).compile_grammar(SamplingParams(**form))
        return None if compiled is None else GrammarGuide(compiled)

    def start(self, grammars: Grammars | None = None, **form: Any) -> GrammarGuide:
        guide = self.ask(grammars, **form)
        assert guide is not None
        return guide

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.spellings[token] or b"?" for token in tokens).decode()

    def spell(self, text: bytes) -> list[int]:
        """Tokens of ``text``, the longest first: seldom those of the tokenizer."""
        tokens = []
        while text:
            tokens.append(self.longest(text, range(len(self.spellings))))
            text = text[len(self.spellings[tokens[-1]] or b"") :]
        return tokens

    def longest(self, text: bytes, tokens: Iterable[int]) -> int:
        """Of the tokens with which ``text`` begins, the longest; -1 if there is none."""
        fits = [token for token in tokens if self.spellings[token] and text.startswith(self.spellings[token] or b"?")]
        return max(fits, key=lambda token: len(self.spellings[token] or b""), default=-1)

    def allowed(self, guide: GrammarGuide) -> set[int]:
        return set(np.flatnonzero(np.isfinite(guide.mask(np.zeros(self.size, np.float32)))).tolist())

    def agrees(self, guide: GrammarGuide, expected: set[int]) -> bool:
        """Whether the mask allows what is expected, or, if all of that begins alike, just the forced token among it."""
        found = self.allowed(guide)
        forced = [] if guide.finished else guide._matcher.compute_ff_tokens()
        if not forced:
            return found == expected
        beginnings = {(self.spellings[token] or b"")[:1] for token in expected}
        return found == {forced[0]} and found <= expected and len(beginnings) == 1

    @cached_property
    def tokens_of(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for token, spelling in enumerate(self.spellings):
            if spelling and token not in self.eos:
                found.setdefault(spelling, []).append(token)
        return found

    def reads(self, guide: GrammarGuide, text: str) -> bool:
        """Whether the grammar allows ``text`` and then the end, taking the longest token allowed at every step."""
        rest = text.encode()
        longest = max(map(len, self.tokens_of))
        while rest:
            bits = guide.compute_allowed()
            fits = (token for end in range(longest, 0, -1) for token in self.tokens_of.get(rest[:end], ()))
            token = next((token for token in fits if bits[token // 8] >> token % 8 & 1), None)
            if token is None:
                return False
            guide.accept(token)
            rest = rest[len(self.spellings[token] or b"") :]
        return self.allowed(guide) >= set(self.eos)

    def walk(self, guide: GrammarGuide, seed: int, most: int = MOST_TOKENS) -> list[int]:
        """Tokens of the largest random logits under the mask, up to the end of the sequence."""
        random = np.random.default_rng(seed)
        tokens: list[int] = []
        while not guide.finished and len(tokens) < most:
            token = int(guide.mask(random.normal(0, 3, self.size).astype(np.float32)).argmax())
            guide.accept(token)
            if token not in self.eos:
                tokens.append(token)
        return tokens

    def outputs(self, walks: int = 12, **form: Any) -> Iterator[str]:
        for seed in range(walks):
            guide = self.start(**form)
            tokens = self.walk(guide, seed)
            assert guide.finished
            text = self.text(tokens)
            # The decoder of Llama 2 drops one space at the start.
            assert self.tokenizer.decode(tokens) in (text, text.removeprefix(" "))
            yield text


def byte_level_spellings(folder: Path) -> list[bytes | None]:
    """The table of GPT-2 (https://github.com/openai/gpt-2/blob/master/src/encoder.py), written anew."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return spellings(folder, lambda token: bytes(table[character] for character in token))


def metaspace_spellings(folder: Path) -> list[bytes | None]:
    def spell(token: str) -> bytes:
        byte = re.fullmatch("<0x(..)>", token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

    return spellings(folder, spell)


def spellings(folder: Path, spell: Callable[[str], bytes]) -> list[bytes | None]:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: None if token["special"] else token["content"].encode() for token in content["added_tokens"]}
    ordinary = {
        token_id: spell(token) for token, token_id in content["model"]["vocab"].items() if token_id not in added
    }
    found = {**ordinary, **added}
    return [found[token_id] for token_id in range(len(found))]


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Vocabulary:
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    return Vocabulary(tokenizer, byte_level_spellings(byte_level_folder), (0, 1))


@pytest.fixture(scope="session")
def fused(byte_level_folder: Path) -> Vocabulary:
    """The same with the decoder that transformers makes of a GGUF file."""
    backend = Backend.from_file(str(byte_level_folder / "tokenizer.json"))
    parts = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " "), decoders.ByteLevel()]
    backend.decoder = decoders.Sequence(parts)
    return Vocabulary(Tokenizer(backend, {}), byte_level_spellings(byte_level_folder), (0, 1))


@pytest.fixture(scope="session")
def metaspace(metaspace_folder: Path) -> Vocabulary:
    return Vocabulary(Tokenizer.from_folder(metaspace_folder), metaspace_spellings(metaspace_folder), (2,))


@pytest.fixture(scope="session")
def tiny() -> Vocabulary:
    return Vocabulary(Tokenizer.from_folder(TINY), byte_level_spellings(TINY), (0, 2))


@pytest.fixture(scope="session")
def words() -> Vocabulary:
    """Whole words only, so that some texts have no tokens, or have none from here on."""
    words: list[bytes | None] = [None, b"ab", b"a", b"bc", b"x"]
    ids = {(word or b"<end>").decode(): index for index, word in enumerate(words)}
    backend = Backend(models.WordLevel(ids, unk_token="<end>"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Vocabulary(Tokenizer(backend, {}), words, (0,))


@pytest.fixture(params=["byte_level", "fused", "metaspace", "tiny"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    found: Vocabulary = request.getfixturevalue(request.param)
    return found
