"""Read stdin, up to a limit."""

import sys
from collections.abc import Iterator

from llmc.errors import UsageError

# Text has about 4 bytes per token, and few tokens have more than 64. Tokenizing takes over a hundred times the text's
# memory, so text that cannot fit is refused first.
BYTES_PER_TOKEN = 64
MIN_STDIN_BYTES = 1_000_000


def at_terminal() -> bool:
    """True if stdin is a terminal; False if it is closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def stdin_limit(max_context: int) -> int:
    """Most bytes of a prompt on stdin, for a bundle with that many positions; at least 1 MB."""
    return max(MIN_STDIN_BYTES, BYTES_PER_TOKEN * max_context)


def read_stdin(limit: int) -> str:
    if sys.stdin is None:
        return ""
    return _text(sys.stdin.buffer.read(limit + 1), limit, "a prompt")


def stdin_lines(limit: int) -> Iterator[str]:
    """The lines of stdin without line ends; empty if it is closed."""
    while sys.stdin is not None and (line := sys.stdin.buffer.readline(limit + 1)):
        yield _text(line, limit, "a line").rstrip("\r\n")


def _text(data: bytes, limit: int, what: str) -> str:
    if len(data) > limit:
        raise UsageError(
            "stdin",
            f"has {what} of more than {limit:,} bytes, which cannot fit into the context of this bundle",
            "give less; --on-overflow does not help",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{data[error.start]:02x} at position {error.start}"
        raise UsageError(
            "stdin", f"is not valid UTF-8 ({byte} of {what})", "convert it, for example with iconv"
        ) from error
