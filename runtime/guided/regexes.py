"""The bounds of regular expressions: their length, and their repetitions multiplied out."""

import re

from llmc.errors import GrammarError

LONGEST_REGEX = 16 * 1024
"""Characters of a regular expression at most; longer ones cost minutes before a limit of the library stops them."""
MOST_REPETITIONS = LONGEST_REGEX
"""Nested repetitions multiply to no more: ``a{20000}`` costs as much as its characters written out would."""
# A class that nobody closes reaches to the end: looked for again from every bracket, it would cost a square.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\{([0-9]*)(,?)([0-9]*)\}|.", re.DOTALL)


def check_regex(regex: str, name: str) -> None:
    """Refuse a regular expression that is too long, or repeats too much.

    Raises:
        GrammarError: beginning with ``name``.
    """
    if len(regex) > LONGEST_REGEX:
        raise GrammarError(f"{name} has {len(regex)} characters, expected at most {LONGEST_REGEX}")
    found = repetitions(regex)
    if found > MOST_REPETITIONS:
        raise GrammarError(f"{name} repeats something {found} times, expected at most {MOST_REPETITIONS}")


def repetitions(regex: str) -> int:
    """The largest product of nested counts, such as 6 of ``(a{2}b){0,3}``; of ``{m,}`` it is m that counts."""
    groups = [1]  # of each group that is open: the largest in it so far
    last, most = 1, 1
    for piece in _PIECE.finditer(regex):
        text = piece[0]
        if text == "(":
            groups.append(1)
        elif text == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif text[0] == "{" and len(text) > 1:
            last *= max(1, _number(piece[1]), _number(piece[3]))
            groups[-1] = max(groups[-1], last)
        else:
            last = 1
        most = max(most, last)
    return most


def _number(digits: str) -> int:
    return int(digits[:20] or "0")  # more digits are far above every bound, and slow to read
