"""Prompts for a server whose tokenizer is not at hand: from a file, or words by seed in so many tokens."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmc.errors import UsageError

Prompt = str | list[Any]  # a text, or the messages of a chat
Draw = Callable[[int], Prompt]  # by the number of the request

# Short and frequent, so nearly every vocabulary has each as one token.
_FREQUENT = """
the of and to in is you that it was for on are as with they at be this have from or one had by but not all were
we when your can said there use an each which do how their if will up other about out many then them these so
some would make like into time has look two more go see number no way could people my than first water been call
who its now find long down day did get come made may part over new sound take only little work know place year
live me back give most very after thing our just name good sentence man think say great where help through much
before line right too mean old any same tell boy follow came want show also around form three small set put end
does another well large must big even such because turn here why ask went men read need land different home us
move try kind hand picture again change off play spell air away animal house point page letter mother answer
"""
WORDS = _FREQUENT.split()


@dataclass(frozen=True)
class Length:
    """A number of tokens, or the range from which each request draws one evenly, both ends included."""

    low: int
    high: int

    def draw(self, *seed: int) -> int:
        """The number for this seed."""
        return int(np.random.default_rng(seed).integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def read_length(text: str, name: str) -> Length:
    """Read ``128``, or ``128-512``.

    Raises:
        UsageError: it is neither, or below 1; ``name`` is the parameter's.
    """
    low, _, high = text.partition("-")
    try:
        found = Length(int(low), int(high or low))
    except ValueError as error:
        raise UsageError(f"{name} is {text!r}, expected tokens, as 128, or a range of them, as 128-512") from error
    if not 1 <= found.low <= found.high:
        raise UsageError(f"{name} is {text!r}, expected at least 1, and the smaller number first")
    return found


@dataclass(frozen=True)
class WordCount:
    """Tokens that a server counts for a prompt of some words: so many for each, and what the chat template adds."""

    per_word: float = 1.0
    template: float = 0.0

    def words(self, tokens: int) -> int:
        """Words whose prompt comes closest to ``tokens``, at least 1."""
        return max(1, round((tokens - self.template) / self.per_word))


def word_count(few: tuple[int, int], many: tuple[int, int]) -> WordCount:
    """Tell from two prompts, each with its words and the tokens that the server counted."""
    per_word = (many[1] - few[1]) / (many[0] - few[0])
    return WordCount(per_word, few[1] - per_word * few[0]) if per_word > 0 else WordCount()


def drawn_words(count: int, *seed: int) -> list[str]:
    """``count`` words."""
    return [WORDS[index] for index in np.random.default_rng(seed).integers(0, len(WORDS), count)]


def drawn(length: Length, shared: float, seed: int, count: WordCount) -> Draw:
    """Prompts of words, no two alike but for the first ``shared`` of each (0 to 1), which begin one text."""
    common = drawn_words(round(shared * count.words(length.high)), seed, 2)

    def prompt(number: int) -> str:
        words = count.words(length.draw(seed, 3, number))
        first = common[: round(shared * words)]
        return " ".join([*first, *drawn_words(words - len(first), seed, 1, number)])

    return prompt


def from_file(path: Path) -> Draw:
    """The prompts of a file in turn: of ``.jsonl`` a message list, an object that holds one, or a text in each line.

    In an object the list is ``messages``, and a text ``prompt``. Any other file has a text in each line. Empty lines
    are left out.

    Raises:
        UsageError: the file cannot be read, or has no prompt, or a line holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}; expected UTF-8 text with a prompt in each line") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    parse = _parsed if path.suffix == ".jsonl" else lambda line, place: line
    prompts = [parse(line, f"{path}:{number}") for number, line in numbered]
    if not prompts:
        raise UsageError(f"{path} has no prompt; expected one in each line")
    return lambda number: prompts[number % len(prompts)]


def _parsed(line: str, place: str) -> Prompt:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: it is no JSON: {error}") from error
    if isinstance(found, Mapping):
        found = found.get("messages", found.get("prompt"))
    if isinstance(found, str) or (isinstance(found, list) and all(isinstance(each, Mapping) for each in found)):
        return found
    raise UsageError(f'{place}: expected a list of messages, or an object with "messages" or "prompt"')
