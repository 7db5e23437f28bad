"""Read questions on a terminal: several lines per question, pastes as one question, and a history."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from llmc.cli.keys import Interrupts

PROMPT = "> "
WARNING_S = 5.0  # a second Ctrl-C within this time leaves; a later one warns again


def questions(keys: Interrupts) -> Iterator[str]:
    """The questions typed on the terminal, until Ctrl-D or two presses of Ctrl-C."""
    # stdout is only for the answers, unless it is a terminal.
    output = create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr)
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False  # the cursor's row is not needed, and not every terminal reports it
    session: PromptSession[str] = PromptSession(
        PROMPT,
        history=former_questions(),
        key_bindings=_bindings(),
        multiline=True,
        prompt_continuation=" " * len(PROMPT),
        reserve_space_for_menu=0,  # nothing is completed
        output=output,
    )
    warned_s = -WARNING_S
    while True:
        try:
            keys.refuse_pressed()
            text = session.prompt(default=keys.ahead.take())
        except EOFError:
            return
        except KeyboardInterrupt:
            if time.monotonic() - warned_s < WARNING_S:
                return
            warned_s = time.monotonic()
            click.echo("Ctrl-C again or Ctrl-D leaves", err=True)
        else:
            warned_s = -WARNING_S
            if any("\ud800" <= character <= "\udfff" for character in text):
                click.echo("error: this is no UTF-8", err=True)
            else:
                yield text


def _bindings() -> KeyBindings:
    """Enter sends; after a backslash, or with Alt, it starts a new line."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class _Questions(FileHistory):
    """Questions in a file; if it cannot be written, the conversation goes on without it."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def state_folder() -> Path:
    """The folder for data kept between conversations, by the XDG rules."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "llmc"


def former_questions() -> History:
    """The history of questions, in a file by the XDG rules; only this conversation's if it cannot be written."""
    path = state_folder() / "chat-history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))  # only its owner may read it
    except OSError:
        return InMemoryHistory()
    return _Questions(path)
