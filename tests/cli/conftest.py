"""Running the command line inside the test, as a user would see it."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input

from llmc.cli.main import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


class Stdin(io.TextIOWrapper):
    """What a user pipes into the command, or types on a terminal."""

    def __init__(self, content: bytes, terminal: bool) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def llmc(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run ``llmc`` with arguments, and bytes on stdin; stdout is no terminal, stdin is one if asked for."""

    def run(*arguments: object, stdin: bytes = b"", terminal: bool = False) -> Ran:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin, terminal))
        with create_pipe_input() as keys, create_app_session(input=keys):
            keys.send_bytes(stdin + b"\x04" if terminal else b"")  # a pipe holds 64 KiB
            with pytest.raises(SystemExit) as stopped:
                main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Ran(int(stopped.value.code or 0), out, err)

    return run


@pytest.fixture
def exploding_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer makes thousands of millions of characters of a snowman."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "in" / "exploding")
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    doubled = {"type": "Replace", "pattern": {"Regex": "\u2603"}, "content": "\u2603" * 100_000}
    content["normalizer"] = {"type": "Sequence", "normalizers": [doubled] * 3}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
