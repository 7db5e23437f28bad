"""Stdin, up to a bound."""

import sys
from collections.abc import Iterator

from llmc.errors import UsageError

# Text has some 4 bytes per token, and no vocabulary has many tokens of more than 64. Tokenizing takes over a hundred
# times the memory of the text, so that what can never fit is refused before.
BYTES_PER_TOKEN = 64
MIN_STDIN_BYTES = 1_000_000


def at_terminal() -> bool:
    """True if a person types on stdin; nobody does where it is closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def stdin_limit(max_context: int) -> int:
    """Bytes that a prompt on stdin may have, for a bundle with that many positions; from 1 MB."""
    return max(MIN_STDIN_BYTES, BYTES_PER_TOKEN * max_context)


def read_stdin(limit: int) -> str:
    if sys.stdin is None:
        return ""
    return _text(sys.stdin.buffer.read(limit + 1), limit, "a prompt")


def stdin_lines(limit: int) -> Iterator[str]:
    """The lines of stdin without their ends, none where it is closed."""
    while sys.stdin is not None and (line := sys.stdin.buffer.readline(limit + 1)):
        yield _text(line, limit, "a line").rstrip("\r\n")


def _text(data: bytes, limit: int, what: str) -> str:
    if len(data) > limit:
        raise UsageError(
            "stdin",
            f"has {what} of more than {limit:,} bytes, which is more than the context of this bundle holds",
            "give less; --on-overflow does not help",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at position {error.start}"
        raise UsageError(
            "stdin", f"is not valid UTF-8 ({found} of {what})", "convert it, for example with iconv"
        ) from error
