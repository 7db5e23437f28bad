"""Steps of the check of GPU targets, each in a process of its own: how they end, and that they do."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from doubles.processes import running

from llmc.errors import GpuError, MissingExtraError

RECIPES = Path(__file__).parents[3] / "recipes"
# Seconds until a process that was interrupted must be gone.
PATIENCE_S = 120

Part = Callable[[str], ModuleType]


def outcome(part: Part, code: str, limit: float = PATIENCE_S) -> Any:
    return part("process").run([sys.executable, "-c", code], limit)


def test_a_result_is_the_object_at_the_end_of_what_was_printed(part):
    done = outcome(part, "print('a library says { nothing'); print('{\\n \"x\": [1]\\n}')")
    assert (done.state, done.message, done.exit, done.result) == ("done", "", 0, {"x": [1]})
    assert done.seconds > 0


@pytest.mark.parametrize(
    ("code", "state", "message"),
    [
        ("import os; os.kill(os.getpid(), 11)", "crashed", "ended by SIGSEGV; its last line: no message"),
        ("import sys; print('x', file=sys.stderr); sys.exit(1)", "failed", "x"),
        ("import sys; print('no torch', file=sys.stderr); sys.exit(3)", "not run", "no torch"),
        ("print('hello')", "failed", "it printed no JSON object"),
        ('print(\'{"problems": ["a", "b"]}\')', "failed", "a; b"),
        ("print('{\"problems\": []}')", "done", ""),
    ],
    ids=["crash", "error", "missing", "no-result", "problems", "no-problems"],
)
def test_an_end_is_put_into_words(part, code, state, message):
    done = outcome(part, code)
    assert (done.state, done.message) == (state, message)


def test_a_step_that_hangs_is_ended_with_what_it_started(part, tmp_path, monkeypatch):
    hangs, limit = tmp_path / "hangs", 600
    start = "import pathlib, subprocess, sys; p = subprocess.Popen(['sleep', '600']); "
    noted = f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(p.pid)); print('waiting', file=sys.stderr); "
    # Its time is up as soon as it hangs, however long it took to get there.
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + limit * hangs.exists(), sleep=time.sleep)
    monkeypatch.setattr(part("process"), "time", clock)
    done = outcome(part, f"{start}{noted}sys.stderr.flush(); pathlib.Path({str(hangs)!r}).touch(); p.wait()", limit)
    assert (done.state, done.message) == ("timed out", "no end after 600 s; its last line: waiting")
    until = time.monotonic() + PATIENCE_S
    while running((tmp_path / "pid").read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not running((tmp_path / "pid").read_text())


def test_a_signal_while_a_step_is_started_or_ended_leaves_no_process(part, monkeypatch, terminated):
    start, kill, pids = subprocess.Popen.__init__, os.killpg, []

    def started(child: Any, *arguments: Any, **options: Any) -> None:
        start(child, *arguments, **options)
        pids.append(child.pid)
        signal.raise_signal(signal.SIGTERM)

    def killed(group: int, number: int) -> None:
        signal.raise_signal(signal.SIGINT)
        kill(group, number)

    monkeypatch.setattr(subprocess.Popen, "__init__", started)
    monkeypatch.setattr(os, "killpg", killed)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        outcome(part, "import time; time.sleep(600)")
    assert signal.getsignal(signal.SIGTERM) is terminated
    assert not running(str(*pids))


@pytest.fixture
def terminated() -> Iterator[Any]:
    """The handler of SIGTERM, as the script sets it."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    yield signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


def test_peaks_of_memory_are_those_of_the_step_alone(part, tmp_path, monkeypatch):
    ballast = bytearray(200_000_000)  # of the process that starts it
    taken, seen = tmp_path / "taken", tmp_path / "seen"
    look = part("process")._memory

    def looked(pid: int) -> dict[str, int]:
        was_taken, found = taken.exists(), look(pid)
        if was_taken:
            seen.touch()
        return found

    monkeypatch.setattr(part("process"), "_memory", looked)
    code = f"import pathlib, time; x = bytearray(100_000_000); pathlib.Path({str(taken)!r}).touch()\n"
    code += f"while not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.01)\nprint('{{}}')"
    done = outcome(part, code)
    assert 100_000_000 < done.anonymous_bytes <= done.resident_bytes < len(ballast)


def test_a_worker_prints_its_result_alone_and_no_number_that_json_lacks():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from gpu_check import work; from types import SimpleNamespace\n"
        "def f(x): print('chatter', flush=True); return {'x': [x, float('nan')], 'y': {'z': float('inf')}}\n"
        "work.WORKERS['p'] = 'p:f'; sys.modules['p'] = SimpleNamespace(f=f); sys.exit(work.work('p', '{\"x\": 1}'))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(RECIPES)], capture_output=True, text=True)
    assert json.loads(done.stdout) == {"x": [1, None], "y": {"z": None}}
    assert done.stderr == "chatter\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [(MissingExtraError("no torch"), 3), (GpuError("context lost"), 1), (ValueError("a bug"), None)],
)
def test_what_is_not_installed_is_told_from_what_fails(part, monkeypatch, error, status):
    work = part("work")

    def fail() -> None:
        raise error

    monkeypatch.setattr(work.os, "dup2", lambda a, b: None)
    monkeypatch.setattr(work.importlib, "import_module", lambda name: SimpleNamespace(machine=fail))
    if status is None:
        with pytest.raises(ValueError, match="a bug"):  # which keeps its traceback
            work.work("machine", "{}")
    else:
        assert work.work("machine", "{}") == status
