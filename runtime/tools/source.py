"""Text that comes in pieces, read as if it were all there: what lacks text waits, and goes on where it was."""

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
    """The next piece of the arguments of the call that began last."""

    text: str


Event = Content | Thought | Called | Arguments
# A reader yields events, and None where it has to wait for more text.
Reading = Generator[Event | None, None, _T]

BLANKS = " \t\r\n"


class Source:
    """Text as far as it came, and how far it was read.

    What a reader decides depends on the text alone, never on its pieces: it waits until one more piece could not
    change the decision.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False  # where the end came too early
        self.keeps = False  # text that was read, too

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    def forget(self) -> None:
        """Let go of what was read, unless somebody may go back before it."""
        if not self.keeps:
            self.text, self.at = self.rest, 0

    def peek(self) -> Reading[str]:
        """The next character; none at the end."""
        while self.at >= len(self.text) and not self.ended:
            yield None
        return self.text[self.at : self.at + 1]

    def take(self, text: str) -> Reading[bool]:
        while not self.ended and len(self.rest) < len(text) and text.startswith(self.rest):
            yield None
        found = self.text.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def skip_blanks(self) -> Reading[None]:
        while (character := (yield from self.peek())) and character in BLANKS:
            self.at += 1

    def until(self, end: str, most: int) -> Reading[str | None]:
        """The text before ``end``, which is read too; None if it does not come within ``most`` characters."""
        start = self.at
        while (found := self.text.find(end, start)) < 0:
            if self.ended or len(self.text) - start > most + len(end):
                return None
            yield None
        if found - start > most:
            return None
        self.at = found + len(end)
        return self.text[start:found]

    def before(self, marks: Sequence[str]) -> Reading[tuple[str, bool]]:
        """Read text that certainly stands before any of ``marks``; True if one of them comes next."""
        while True:
            rest = self.rest
            found = [place for mark in marks if (place := rest.find(mark)) >= 0]
            if found:
                self.at += min(found)
                return rest[: min(found)], True
            held = max((overlap(rest, mark) for mark in marks), default=0)
            if self.ended:
                self.at += len(rest)
                return rest[: len(rest) - (held if self.cut and held > 1 else 0)], False
            if len(rest) > held:
                self.at += len(rest) - held
                return rest[: len(rest) - held], False
            self.forget()
            yield None
