"""``llmc chat`` on a real pseudo-terminal: what a paste and the keys Ctrl-C and Ctrl-D do."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from doubles.processes import slow_llmc

LIMIT_S = 120.0  # for what takes well under a second on a machine without other work

PROMPT = "\x1b[?2004h"  # bracketed paste, which is asked for with every prompt

# What a command begins with so that Ctrl-C reaches it as from a keyboard. In a process of its own: between fork and
# exec of one with threads, nothing of Python may run.
CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """``llmc chat`` on a real pseudo-terminal."""

    def __init__(self, *arguments: object) -> None:
        self.ours, theirs = pty.openpty()
        self.make_arguments, self.read, self.ended = "", 0, False
        command = [sys.executable, "-c", CONTROLLED, *slow_llmc("chat", *arguments)]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def shows(self, text: str) -> bool:
        """Read for a moment; whether ``text`` came after what was waited for before."""
        if not self.ended and select.select([self.ours], [], [], 0.1)[0]:
            try:
                self.make_arguments += os.read(self.ours, 65536).decode(errors="replace")
            except OSError:  # the program was the last that had it open
                self.ended = True
        return text in self.make_arguments[self.read :]

    def wait_for(self, text: str) -> None:
        """Read until ``text`` came."""
        until = time.monotonic() + LIMIT_S
        while not self.shows(text):
            on = not self.ended and time.monotonic() < until
            assert on, f"{text!r} did not come; the terminal shows {self.make_arguments!r}"
        self.read = self.make_arguments.index(text, self.read) + len(text)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self.ours)


@pytest.fixture
def terminal(tiny_bundle: Path) -> Iterator[Terminal]:
    endless = ("--ignore-eos", "--temperature", 0, "--max-tokens", 1900, "--no-self-test")
    with Terminal(tiny_bundle, *endless) as opened:
        opened.wait_for(PROMPT)
        yield opened


def test_ctrl_c_stops_the_answer_and_what_was_pasted_meanwhile_waits_whole_in_the_next_prompt(terminal: Terminal):
    terminal.type("Hello\r")
    terminal.wait_for("\x1b[?2004l")
    terminal.wait_for("\n")
    terminal.wait_for("\n")  # some of the answer
    terminal.type("/set\nfirst line\n/exit\n" + 200 * "a long line of a paste\n" + "its end\n")
    time.sleep(0.5)
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for("its end")
    assert "all parameters" not in terminal.make_arguments
    terminal.type("\x03")  # clears the prompt
    terminal.wait_for("Ctrl-C again")
    terminal.wait_for(PROMPT)
    terminal.type("/exit\r")
    assert terminal.process.wait(LIMIT_S) == 0


def test_ctrl_c_clears_the_line_and_leaves_when_it_comes_twice_without_a_line_between(terminal: Terminal):
    terminal.type("/exit")
    terminal.wait_for("/exit")
    terminal.type("\x03")
    terminal.wait_for("leaves")
    terminal.wait_for(PROMPT)
    terminal.type("/help\r")
    terminal.wait_for("this list")
    terminal.wait_for(PROMPT)
    terminal.type("\x03")
    terminal.wait_for("Ctrl-C again or Ctrl-D leaves")
    terminal.wait_for(PROMPT)
    terminal.type("\x03")
    assert terminal.process.wait(LIMIT_S) == 0
