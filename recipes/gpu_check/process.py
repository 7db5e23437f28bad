"""One step in a process of its own: with a time limit, and its end in words."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_check.steps import NOT_HERE

DONE, FAILED, CRASHED, TIMED_OUT, NOT_RUN = "done", "failed", "crashed", "timed out", "not run"
POLL_S = 0.02
GRACE_S = 10.0  # a process in an uninterruptible call of a driver cannot be ended; nobody waits longer for it
ENDING = (signal.SIGTERM, signal.SIGINT)  # what asks us to end
OUTPUT = 100_000  # characters that are kept of what a step and its libraries said
# No telemetry, no network, and threads that wait without taking cores from others.
ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}


def run(command: Sequence[str], limit_s: float, cache: Path) -> dict[str, Any]:
    """Run ``command`` with a file for its result for at most ``limit_s`` seconds; then it and all that it started end.

    Returns ``state``, ``message`` (why, in one line), ``exit`` (negative for a signal, None if it did not end),
    ``seconds``, ``output`` (the end of all that it said), and what it wrote into the file: at least ``result``.
    """
    start, child = time.perf_counter(), None
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder, tempfile.TemporaryFile() as said:
        file = Path(folder) / "result.json"
        environment = {**os.environ, **ENVIRONMENT, "LLMC_CACHE": str(cache)}
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
        try:
            with _signals_wait():
                child = subprocess.Popen([*command, str(file)], env=environment, start_new_session=True, **files)
            while not _is_over(child.pid) and time.perf_counter() < start + limit_s:
                time.sleep(POLL_S)
            in_time = _is_over(child.pid)
        finally:
            if child is not None:
                with _signals_wait():
                    _end(child)
        said.seek(0)
        output = said.read().decode("utf-8", "replace")
        content = _content(file)
    status, seconds = child.returncode if in_time else None, round(time.perf_counter() - start, 3)
    state, message = _verdict(status, output, content, limit_s)
    known = {"state": state, "message": message, "exit": status, "seconds": seconds, "output": output[-OUTPUT:]}
    return {"result": None, **(content if content and status == 0 else {}), **known}


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


def _is_over(pid: int) -> bool:
    """True once a child has ended; it stays a zombie, so its number and that of its group remain its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End what is left of the process and its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)


def _content(file: Path) -> dict[str, Any] | None:
    """The step's result, if that is what :func:`gpu_check.steps.work` writes; None for NaN and infinities."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(file.read_bytes(), parse_constant=lambda name: None)
        return found if isinstance(found, dict) and isinstance(found.get("result"), dict) else None
    return None


def _verdict(status: int | None, said: str, content: dict[str, Any] | None, limit_s: float) -> tuple[str, str]:
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no message")
    if status is None:
        return TIMED_OUT, f"no end after {limit_s:.0f} s; its last line: {last}"
    if status < 0:
        return CRASHED, f"ended by {signal.Signals(-status).name}; its last line: {last}"
    if status:
        return (NOT_RUN if status == NOT_HERE else FAILED), last
    if content is None:
        return FAILED, "it wrote no result"
    problems = content["result"].get("problems") or []
    return (FAILED, "; ".join(map(str, problems))) if problems else (DONE, "")
