"""Steps of the check of GPU targets, each in a process of its own: how they end, and that they do."""

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

# Seconds until a process that was interrupted must be gone.
PATIENCE_S = 120
SAID = 'import sys; open(sys.argv[1], "w").write(\'{"result": {"problems": %s}}\')'

Part = Callable[[str], ModuleType]


def outcome(part: Part, code: str, limit: float = PATIENCE_S) -> Any:
    found = part("process").run([sys.executable, "-c", code], limit, Path("cache"))
    return SimpleNamespace(**found)


def gone(pid: str) -> bool:
    until = time.monotonic() + PATIENCE_S
    while running(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not running(pid)


@pytest.mark.parametrize(
    ("code", "state", "message"),
    [
        ("import os; os.kill(os.getpid(), 11)", "crashed", "ended by SIGSEGV; its last line: no message"),
        ("import sys; print('x', file=sys.stderr); sys.exit(1)", "failed", "x"),
        ("import sys; print('no torch', file=sys.stderr); sys.exit(3)", "not run", "no torch"),
        ("print('{\"result\": {}}')", "failed", "it wrote no result"),
        ("import sys; open(sys.argv[1], 'wb').write(b'\\xff')", "failed", "it wrote no result"),
        ("import sys; open(sys.argv[1], 'w').write('[1]')", "failed", "it wrote no result"),
        (SAID % '["a", "b"]', "failed", "a; b"),
        (SAID % "[]", "done", ""),
    ],
    ids=["crash", "error", "missing", "no-file", "rubbish", "no-object", "problems", "no-problems"],
)
def test_an_end_is_put_into_words(part, code, state, message):
    done = outcome(part, code)
    assert (done.state, done.message) == (state, message)
    assert (done.result is not None) == code.startswith(SAID[:45]) and done.seconds > 0


def test_all_that_a_library_says_is_kept_verbatim(part):
    done = outcome(part, "import sys; print('WARNING: a\\tb'); print('to the other', file=sys.stderr)")
    assert sorted(done.output.splitlines()) == ["WARNING: a\tb", "to the other"]


def test_a_step_that_hangs_is_ended_with_what_it_started(part, tmp_path, monkeypatch):
    hangs, limit = tmp_path / "hangs", 600
    start = "import pathlib, subprocess, sys; p = subprocess.Popen(['sleep', '600']); "
    noted = f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(p.pid)); print('waiting', file=sys.stderr); "
    # Its time is up as soon as it hangs, however long it took to get there.
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + limit * hangs.exists(), sleep=time.sleep)
    monkeypatch.setattr(part("process"), "time", clock)
    done = outcome(part, f"{start}{noted}sys.stderr.flush(); pathlib.Path({str(hangs)!r}).touch(); p.wait()", limit)
    assert (done.state, done.message) == ("timed out", "no end after 600 s; its last line: waiting")
    assert gone((tmp_path / "pid").read_text())


def test_what_a_step_leaves_running_is_ended_when_it_is_over(part, tmp_path):
    start = "import pathlib, subprocess, sys; p = subprocess.Popen(['sleep', '600']); "
    assert outcome(part, f"{start}pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(p.pid))").exit == 0
    assert gone((tmp_path / "pid").read_text())


def test_a_step_that_cannot_be_ended_is_not_waited_for(part, monkeypatch):
    def wait(child: Any, timeout: float) -> None:
        raise subprocess.TimeoutExpired("x", timeout)

    monkeypatch.setattr(os, "killpg", lambda group, number: None)  # as in an uninterruptible call of a driver
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child, monkeypatch.context() as m:
        m.setattr(subprocess.Popen, "wait", wait)
        part("process")._end(child)
        m.undo()
        child.kill()


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


@pytest.mark.parametrize(
    ("error", "status"),
    [(MissingExtraError("no torch"), 3), (GpuError("context lost"), 1), (ValueError("a bug"), None)],
)
def test_what_is_not_installed_is_told_from_what_fails(part, monkeypatch, tmp_path, error, status):
    steps = part("steps")

    def fail(options: Any) -> None:
        raise error

    monkeypatch.setattr(part("machine"), "machine", fail)
    monkeypatch.setattr(steps.logging, "basicConfig", lambda **options: None)
    if status is None:
        with pytest.raises(ValueError, match="a bug"):  # which keeps its traceback
            steps.work("machine", tmp_path / "x", tmp_path)
    else:
        assert steps.work("machine", tmp_path / "x", tmp_path) == status


# -------------------------------------------------------------------------------------------------------------- clocks


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program called nvidia-smi."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_clocks_and_throttling_are_watched_for_as_long_as_a_step_runs(part, tmp_path, monkeypatch):
    lines = ["1980, 2619, 40, 300.5, 1000, 0x0000000000000000", "990, 2619, 50, [N/A], 3000, 0x0000000000000004"]
    smi(tmp_path, monkeypatch, f"echo '{lines[0]}'; echo '{lines[1]}'; touch {tmp_path}/said; exec sleep 600")
    with part("steps").watched() as found:
        assert found == {}
        while not (tmp_path / "said").exists():
            time.sleep(0.01)
    assert found == {
        "missing": None,
        "samples": 2,
        "throttling": ["0x0000000000000000", "0x0000000000000004"],
        "clocks.sm": [990, 1485, 1980],
        "clocks.mem": [2619, 2619, 2619],
        "temperature.gpu": [40, 45, 50],
        "power.draw": [300.5, 300.5, 300.5],
        "memory.used": [1000, 2000, 3000],
    }


def test_a_machine_without_clocks_to_watch_says_so(part, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with part("steps").watched() as found:
        pass
    assert found == {"missing": "nvidia-smi: No such file or directory"}
    smi(tmp_path, monkeypatch, f"echo no devices; /usr/bin/touch {tmp_path}/said")
    with part("steps").watched() as found:
        while not (tmp_path / "said").exists():
            time.sleep(0.01)
    assert found["missing"].startswith("nvidia-smi said 'no devices")


def test_the_reading_ends_with_a_step_that_fails(part, tmp_path, monkeypatch):
    smi(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    with pytest.raises(ValueError, match="x"), part("steps").watched():
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            time.sleep(0.01)
        raise ValueError("x")
    assert gone((tmp_path / "pid").read_text().strip())
