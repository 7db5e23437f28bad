"""Ctrl-C in a conversation: it stops an answer; at the prompt it is an ordinary key."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmc.cli.typed_ahead import TypedAhead

if TYPE_CHECKING:
    from types import FrameType

    from llmc.runtime import Handle


class Interrupts:
    """Handles Ctrl-C outside the prompt: it never raises in the middle of an operation."""

    def __init__(self) -> None:
        self.handle: Handle | None = None
        self.pressed = False
        self.ahead = TypedAhead()

    def press(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        if self.handle is not None:
            self.handle.cancel()

    def refuse_pressed(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed since the last answer or prompt."""
        if self.pressed:
            self.pressed = False
            raise KeyboardInterrupt

    @contextmanager
    def raise_on_interrupt(self) -> Iterator[None]:
        """Let Ctrl-C raise KeyboardInterrupt during the block, as outside a conversation."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def cancel_on_interrupt(self, handle: Handle) -> Iterator[None]:
        """Let Ctrl-C cancel ``handle``, also if it was pressed while the request was being made."""
        self.handle = handle
        try:
            if self.pressed:
                handle.cancel()
            with self.ahead.hold():
                yield
        finally:
            self.handle = None
            self.pressed = False


@contextmanager
def interrupts(install: bool) -> Iterator[Interrupts]:
    """Handle SIGINT during the block if ``install``, and restore the old handler at the end."""
    keys = Interrupts()
    if not install:
        yield keys
        return
    before = signal.signal(signal.SIGINT, keys.press)
    try:
        yield keys
    finally:
        signal.signal(signal.SIGINT, before)
