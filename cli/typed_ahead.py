"""Keep input typed or pasted during an answer for the next prompt, where it waits for Enter."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

# A paste comes in pieces; a pause this long ends it.
PAUSE_S = 0.05
BRACKETS = ("\x1b[200~", "\x1b[201~")  # a terminal sends these around a paste


class TypedAhead:
    """Reads the terminal's input while an answer is written."""

    def __init__(self) -> None:
        self._data = b""

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Read input in a thread during the block, without echo and line editing.

        A thread is needed: a terminal buffers only 4,096 bytes, and passes no Ctrl-C after them.
        """
        ended = Event()
        reader = Thread(target=self._read, args=(ended,), daemon=True)
        with _quiet():
            reader.start()
            try:
                yield
            finally:
                ended.set()
                reader.join()

    def take(self) -> str:
        """All input read since the last call, also before the first prompt."""
        with _quiet():
            self._drain()
        text, self._data = self._data.decode(errors="replace").replace("\r", "\n"), b""
        for mark in BRACKETS:
            text = text.replace(mark, "")
        return "".join(character for character in text if character.isprintable() or character in "\n\t").rstrip("\n")

    def _read(self, ended: Event) -> None:
        while not ended.wait(PAUSE_S):
            self._drain()

    def _drain(self) -> None:
        wait_s = 0.0
        while _is_terminal() and select.select([sys.stdin], [], [], wait_s)[0]:
            if not (piece := os.read(sys.stdin.fileno(), 65536)):
                break
            self._data += piece
            wait_s = PAUSE_S


def _is_terminal() -> bool:
    """True if stdin is a terminal whose input can be read ahead."""
    try:
        import termios
    except ImportError:  # on Windows
        return False
    try:
        termios.tcgetattr(sys.stdin.fileno())
    except (OSError, ValueError, termios.error):
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off echo and line editing; Ctrl-C stays a signal."""
    if not _is_terminal():
        yield
        return
    import termios

    file = sys.stdin.fileno()
    before, quiet = termios.tcgetattr(file), termios.tcgetattr(file)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(file, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSANOW, before)
