"""Input of the command line: files that end, and stdin up to a bound."""

import errno
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from llmc.errors import UsageError

MAX_FILE_BYTES = 64_000_000
# Text has some 4 bytes per token, and no vocabulary has many tokens of more than 64. Tokenizing takes over a hundred
# times the memory of the text, so that what can never fit is refused before.
BYTES_PER_TOKEN = 64
MIN_STDIN_BYTES = 1_000_000


def read_text(path: Path) -> str:
    """The UTF-8 text of a regular file: a pipe may have nobody at its other end, and a device no end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)  # files of the kernel say that they have 0 bytes
    if len(data) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_FILE_BYTES // 10**6} MB", str(path))
    return data.decode("utf-8")


def at_terminal() -> bool:
    """True if a person types on stdin; nobody does where it is closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def stdin_limit(max_context: int) -> int:
    """Bytes that a prompt on stdin may have, for a bundle with that many positions; from 1 MB."""
    return max(MIN_STDIN_BYTES, BYTES_PER_TOKEN * max_context)


def read_stdin(limit: int) -> str:
    if sys.stdin is None:
        return ""
    return _text(sys.stdin.buffer.read(limit + 1), limit, "the prompt")


def stdin_lines(limit: int) -> Iterator[str]:
    """The lines of stdin without their ends, none where it is closed."""
    while sys.stdin is not None and (line := sys.stdin.buffer.readline(limit + 1)):
        yield _text(line, limit, "a line").rstrip("\r\n")


def _text(data: bytes, limit: int, what: str) -> str:
    if len(data) > limit:
        raise UsageError(
            f"{what} on stdin has more than {limit:,} bytes, which is more than this bundle's context can hold; "
            "give less, also where --on-overflow leaves some of it out"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at position {error.start}"
        raise UsageError(f"{what} on stdin is not valid UTF-8 ({found}); convert it, for example with iconv") from error
