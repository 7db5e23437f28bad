"""SIGTERM ends the commands that write as Ctrl-C does, with a status of its own, and nothing stays."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.cli.stopping import TERMINATED, cleanly_stopped
from llmc.errors import BuildError


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    """SIGTERM ends processes, whatever the parent of this one has asked for."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_what_the_block_was_doing_is_ended_as_by_ctrl_c():
    seen: list[BaseException] = []
    with pytest.raises(SystemExit) as stopped, cleanly_stopped():
        try:
            terminate()
        except BaseException as error:
            seen.append(error)
            raise
    assert [type(error) for error in seen] == [KeyboardInterrupt]
    assert stopped.value.code == TERMINATED == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "ending", "code"), [(signal.SIGTERM, SystemExit, TERMINATED), (signal.SIGINT, KeyboardInterrupt, None)]
)
def test_an_error_that_a_library_made_of_it_ends_the_same(number: int, ending: type[BaseException], code: int | None):
    with pytest.raises(ending) as stopped, cleanly_stopped():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise BuildError("the engine's builder was stopped") from None
    assert getattr(stopped.value, "code", None) == code


def test_an_interrupt_that_was_swallowed_is_told_in_the_end():
    with pytest.raises(SystemExit) as stopped, cleanly_stopped(), contextlib.suppress(KeyboardInterrupt):
        terminate()
    assert stopped.value.code == TERMINATED


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_whoever_handles_the_signal_already_goes_on_doing_so(handler: Any):
    signal.signal(signal.SIGTERM, handler)
    with cleanly_stopped():
        terminate()
    assert signal.getsignal(signal.SIGTERM) is handler


# -------------------------------------------------------------------------------------------------------- the commands


COMMAND = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_DFL)
from llmc.cli.main import main
from llmc.export import writer

def build_graph(*_):
    print("exporting", flush=True)
    sys.stdin.read()

writer.build_graph = build_graph
main(sys.argv[1:])
"""


def begun(*arguments: object) -> "subprocess.Popen[str]":
    """A real command that has begun to write, and goes on when its stdin ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", COMMAND, *map(str, arguments)], **pipes)  # type: ignore[call-overload]
    assert process.stdout.readline() == "exporting\n", process.communicate()
    return process  # type: ignore[no-any-return]


@pytest.mark.parametrize("verb", ["export", "build"])
def test_a_command_that_is_terminated_leaves_nothing(
    llmc: Callable[..., Any], verb: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llmc.export.writer.build_graph", lambda *_: terminate())
    ran = llmc(verb, tiny_checkpoint, "-o", tmp_path / "out")
    assert (ran.code, ran.err) == (TERMINATED, "terminated\n")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_command_left_goes_with_the_next_one_but_not_while_it_lives(
    llmc: Callable[..., Any], tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise BuildError("this one ends soon")

    monkeypatch.setattr("llmc.export.writer.build_graph", fail)
    near, arguments = tmp_path / "new", ("build", tiny_checkpoint, "-o", tmp_path / "new" / "out")
    with begun(*arguments) as process:
        left = list(near.iterdir())
        assert len(left) == 1
        assert llmc(*arguments).code == 1
        assert list(near.iterdir()) == left
        process.kill()
        process.communicate()
    assert list(near.iterdir()) == left
    assert llmc(*arguments).code == 1
    assert list(near.iterdir()) == []
