"""Questions as a person types them: lines of one question, a paste as one, and those of former talks to go back to."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from llmc.cli.keys import Interrupts
from llmc.cli.reading import read_text
from llmc.publish import replace_file

PROMPT = "> "
KEPT, LONGEST = 500, 10_000  # questions that are kept, and characters of each


def questions(keys: Interrupts) -> Iterator[str]:
    """The questions typed on the terminal until Ctrl-D, or until Ctrl-C comes twice."""
    # stdout holds the answers, and nothing else where it is no terminal.
    output = create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr)
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False  # nothing is drawn that needs the cursor's row, and not every terminal tells it
    session: PromptSession[str] = PromptSession(
        PROMPT,
        history=Past(history_file()),
        key_bindings=_bindings(),
        multiline=True,
        prompt_continuation=" " * len(PROMPT),
        reserve_space_for_menu=0,  # nothing is completed
        output=output,
    )
    warned = False
    while True:
        try:
            keys.refuse_pressed()
            text = session.prompt()
        except EOFError:
            return
        except KeyboardInterrupt:
            if warned:
                return
            warned = True
            click.echo("Ctrl-C again or Ctrl-D leaves", err=True)
        else:
            warned = False
            if wrong := wrong_bytes(text):
                click.echo(f"error: this is no UTF-8: {wrong!r}", err=True)
            else:
                yield text


def _bindings() -> KeyBindings:
    """Enter sends; after a backslash, or with Alt, it begins a line."""
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


def wrong_bytes(text: str) -> bytes:
    """The bytes of a typed text that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start :][:8].encode(errors="surrogateescape")
    return b""


def history_file() -> Path:
    """The file of former questions, as XDG says."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "llmc" / "chat-history"


class Past(History):
    """The last questions in a file, which its owner alone may read; none where it cannot be written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def _lines(self) -> list[str]:
        with suppress(OSError, ValueError):
            return [line for line in read_text(self._path).splitlines() if line.startswith('"')]
        return []

    def load_history_strings(self) -> Iterator[str]:
        """The questions, the last one first."""
        for line in reversed(self._lines()):
            with suppress(ValueError):
                yield json.loads(line)

    def store_string(self, string: str) -> None:
        if len(string) > LONGEST or wrong_bytes(string):
            return
        lines = [*self._lines(), json.dumps(string)][-KEPT:]
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replace_file(self._path, ".chat-history-") as file:
                file.write("".join(f"{line}\n" for line in lines).encode())
