"""Ctrl-C in a conversation, heard whatever the program waits for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

    from llmc.runtime import Handle

AGAIN_S = 0.005  # before each attempt to wake the main thread


class Interrupts:
    """The present meaning of Ctrl-C.

    A signal may come between any two instructions, so it raises only where something waits for it: at the prompt. One
    that comes while nothing waits is kept for the next prompt.

    Attributes:
        at_prompt: whether a line is being typed.
        handle: the answer that is being generated.
        pressed: whether it came while neither was so.
    """

    def __init__(self) -> None:
        self.at_prompt = False
        self.handle: Handle | None = None
        self.pressed = False

    def press(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGINT."""
        if self.at_prompt:
            self.at_prompt = False  # the next one must not break what deals with this one
            raise KeyboardInterrupt
        self.pressed = True
        if self.handle is not None:
            self.handle.cancel()

    @contextmanager
    def prompting(self) -> Iterator[None]:
        """A line is typed inside.

        Raises:
            KeyboardInterrupt: Ctrl-C came, or had come since the last answer or prompt.
        """
        self.at_prompt = True
        try:
            if self.pressed:
                self.pressed = False
                raise KeyboardInterrupt
            yield
        except SystemError as error:  # a second handler ran while input() handed on what the first one had raised
            if not isinstance(error.__cause__, KeyboardInterrupt):
                raise
            raise KeyboardInterrupt from error
        finally:
            self.at_prompt = False

    @contextmanager
    def stopping(self, handle: Handle) -> Iterator[None]:
        """Ctrl-C cancels ``handle``, also if it came while the request was being made."""
        self.handle = handle
        try:
            if self.pressed:
                handle.cancel()
            yield
        finally:
            self.handle = None
            self.pressed = False


@contextmanager
def interrupts(install: bool) -> Iterator[Interrupts]:
    """Take SIGINT over, if asked to, and give it back at the end."""
    keys = Interrupts()
    if not install:
        yield keys
        return
    before = signal.signal(signal.SIGINT, keys.press)
    try:
        with _Waker() if hasattr(signal, "pthread_kill") else nullcontext():  # Windows wakes input() by itself
            yield keys
    finally:
        signal.signal(signal.SIGINT, before)


class _Waker:
    """Makes sure that the main thread runs its handler of SIGINT soon.

    Python notes a signal, and runs its handler between two instructions of the main thread or where a system call was
    interrupted. A signal that comes just before the call interrupts nothing, nor does one that another thread gets:
    then input() would wait on for a key. Python tells of each signal through a pipe, so that a thread can interrupt
    the call with SIGURG until its handler, and so that of SIGINT, has run.
    """

    def __init__(self) -> None:
        self._heard = False
        self._told, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._thread = threading.Thread(target=self._wake, args=(threading.get_ident(),), name="llmc-keys", daemon=True)

    def __enter__(self) -> None:
        self._urgent = signal.signal(signal.SIGURG, self._hear)
        self._before = signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._tell)
        self._thread.join()
        signal.signal(signal.SIGURG, self._urgent)
        os.close(self._told)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True

    def _wake(self, main: int) -> None:
        while numbers := os.read(self._told, 64):
            if signal.SIGINT not in numbers:
                continue
            time.sleep(AGAIN_S)  # the handler has nearly always run by then, and nothing is interrupted
            self._heard = False
            while not self._heard:
                signal.pthread_kill(main, signal.SIGURG)
                time.sleep(AGAIN_S)
