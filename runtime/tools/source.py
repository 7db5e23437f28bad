"""Text that comes in pieces, read as if it were complete: a reader that needs more text waits, then goes on."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmc.runtime.text.detokenizer import overlap

_T = TypeVar("_T")


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True)
class Called:
    """A call began."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of the latest call's arguments."""

    text: str


Event = Content | Thought | Called | Arguments
# A reader yields events, and None to wait for more text.
Reading = Generator[Event | None, None, _T]

BLANKS = " \t\r\n"


class Source:
    """The text that has come so far, and how far it has been read.

    A reader's decisions depend only on the text, never on its pieces: it waits until more text could not change the
    decision.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False  # True if the output was cut off
        self.keeps = False  # True to keep text that has been read

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    def forget(self) -> None:
        """Drop the text that has been read, unless a reader may go back."""
        if not self.keeps:
            self.text, self.at = self.rest, 0

    def peek(self) -> Reading[str]:
        """The next character; empty at the end."""
        while self.at >= len(self.text) and not self.ended:
            yield None
        return self.text[self.at : self.at + 1]

    def take(self, text: str) -> Reading[bool]:
        while not self.ended and len(self.rest) < len(text) and text.startswith(self.rest):
            yield None
        starts = self.text.startswith(text, self.at)
        self.at += len(text) * starts
        return starts

    def skip_blanks(self) -> Reading[None]:
        while (character := (yield from self.peek())) and character in BLANKS:
            self.at += 1

    def until(self, end: str, most: int) -> Reading[str | None]:
        """Read the text before ``end``, and ``end``; None if it does not come within ``most`` characters."""
        start = self.at
        while (position := self.text.find(end, start)) < 0:
            if self.ended or len(self.text) - start > most + len(end):
                return None
            yield None
        if position - start > most:
            return None
        self.at = position + len(end)
        return self.text[start:position]

    def before(self, marks: Sequence[str]) -> Reading[tuple[str, bool]]:
        """Read text that certainly comes before any of ``marks``; True if one of them is next."""
        while True:
            rest = self.rest
            positions = [place for mark in marks if (place := rest.find(mark)) >= 0]
            if positions:
                self.at += min(positions)
                return rest[: min(positions)], True
            kept = max((overlap(rest, mark) for mark in marks), default=0)
            if self.ended:
                self.at += len(rest)
                return rest[: len(rest) - (kept if self.cut and kept > 1 else 0)], False
            if len(rest) > kept:
                self.at += len(rest) - kept
                return rest[: len(rest) - kept], False
            self.forget()
            yield None
