"""One step in a process of its own: with a time limit, its peak of host memory, and its end in words."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

DONE, FAILED, CRASHED, TIMED_OUT, NOT_RUN = "done", "failed", "crashed", "timed out", "not run"
# The exit status of a step that has nothing to run here, for something is not installed.
NOT_HERE = 3
POLL_S = 0.02
# What asks us to end, as the handlers in main.py and of Python take it.
ENDING = (signal.SIGTERM, signal.SIGINT)
# Characters that are kept of what a step wrote to its standard error.
OUTPUT = 4000
# No telemetry, no network, and threads that wait without taking cores from others.
ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        state: done, failed, crashed, timed out or not run.
        message: why, in one line; empty where it is done.
        exit: its exit status, negative for a signal; None where it was not started or did not end.
        seconds: wall-clock time.
        resident_bytes, anonymous_bytes: peaks of its resident memory, with the pages of mapped files and without them,
            looked at 50 times a second; None where the system does not tell.
        output: the end of what it wrote to its standard error.
        result: the JSON object that it printed.
    """

    state: str
    message: str = ""
    exit: int | None = None
    seconds: float = 0.0
    resident_bytes: int | None = None
    anonymous_bytes: int | None = None
    output: str = ""
    result: dict[str, Any] | None = None


def run(command: Sequence[str], limit_s: float) -> Outcome:
    """Run ``command`` for at most ``limit_s`` seconds; it and what it started are ended then, and when we are."""
    start = time.perf_counter()
    child = None
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            with _signals_wait():
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=os.environ | ENVIRONMENT,
                    start_new_session=True,
                )
            status, resident, anonymous = _wait(child, start + limit_s)
        finally:
            if child is not None:
                with _signals_wait():
                    _end(child)
        return _outcome(status, _text(out), _text(err), time.perf_counter() - start, resident, anonymous, limit_s)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals that end us come when the block is over: a process that nobody holds yet would outlive us."""
    came: list[int] = []
    held = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def _wait(child: "subprocess.Popen[bytes]", until: float) -> tuple[int | None, int | None, int | None]:
    """Exit status (None: not yet at ``until``), peaks of resident and of anonymous memory.

    The peak that ``wait4`` tells would begin with what we had when the process was made.
    """
    resident, anonymous = 0, 0
    while child.poll() is None and time.perf_counter() < until:
        found = _memory(child.pid)
        resident, anonymous = max(resident, found.get("VmHWM", 0)), max(anonymous, found.get("RssAnon", 0))
        time.sleep(POLL_S)
    return child.returncode, resident or None, anonymous or None


def _memory(pid: int) -> dict[str, int]:
    """Bytes by the kernel's names, empty where it does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines if line.endswith("kB"))
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in pairs}


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the process and its group, as far as it is still there."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _outcome(
    status: int | None,
    out: str,
    err: str,
    seconds: float,
    resident: int | None,
    anonymous: int | None,
    limit_s: float,
) -> Outcome:
    result = _json(out) if status == 0 else None
    state, message = _verdict(status, err, result, limit_s)
    return Outcome(state, message, status, round(seconds, 3), resident, anonymous, err[-OUTPUT:], result)


def _verdict(status: int | None, err: str, result: dict[str, Any] | None, limit_s: float) -> tuple[str, str]:
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "no message")
    if status is None:
        return TIMED_OUT, f"no end after {limit_s:.0f} s; its last line: {last}"
    if status < 0:
        return CRASHED, f"ended by {signal.Signals(-status).name}; its last line: {last}"
    if status == NOT_HERE:
        return NOT_RUN, last
    if status:
        return FAILED, last
    if result is None:
        return FAILED, "it printed no JSON object"
    problems = result.get("problems") or []
    return (FAILED, "; ".join(problems)) if problems else (DONE, "")


def _json(text: str) -> dict[str, Any] | None:
    """The JSON object at the end of ``text``: a library may have printed something before."""
    starts = [0, *(i + 1 for i, character in enumerate(text) if character == "\n")]
    for start in (i for i in starts if text[i : i + 1] == "{"):
        with contextlib.suppress(ValueError):
            found = json.loads(text[start:])
            return found if isinstance(found, dict) else None
    return None
