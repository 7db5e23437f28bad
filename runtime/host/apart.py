"""Functions called in processes of their own, which may crash, hang or take all memory without harm to the caller."""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any, NamedTuple

from llmc.errors import LlmcError

# It sees the modules that this process sees, and no others: not those of the folder that it was started in.
CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from llmc.runtime.host.apart import answer; "
    "answer(*json.loads(sys.argv[2]))"
)
# A process in an uninterruptible call of a driver cannot be ended; nobody waits longer for it.
GRACE_S = 1.0


class ApartError(Exception):
    """The function gave no result: it refused (``refused``, in llmc's own words), failed, or its process ended."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


def call_apart(function: str, *arguments: Any, seconds: float, memory: int) -> Any:
    """The result of ``function`` (as ``llmc.module:name``) in a fresh interpreter, which takes some tenths of a second.

    Args:
        arguments: what JSON can hold, as is the result.
        seconds: how long it may take, the start included.
        memory: bytes of address space that it may take.

    Raises:
        ApartError: it gave no result.
        OSError: no process can be started.
    """
    found = run_apart({function: command(function, *arguments, memory=memory)}, seconds)[function]
    if "result" in found:
        return found["result"]
    raise ApartError(str(found.get("refused") or found.get("problem")), "refused" in found)


def command(function: str, *arguments: Any, memory: int = 0) -> list[str]:
    """The command that calls a function apart; ``memory`` 0 is without a bound."""
    path = json.dumps([entry for entry in sys.path if entry])
    return [sys.executable, "-c", CODE, path, json.dumps([function, arguments, memory])]


def answer(function: str, arguments: list[Any], memory: int) -> None:
    """Call ``function`` in this process, which ends soon, and write what comes of it as JSON on stdout.

    What libraries print goes to stderr.
    """
    stdout = os.dup(1)
    os.dup2(2, 1)
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads reserve memory, each for itself
    module, _, name = function.partition(":")
    try:
        found = {"result": getattr(importlib.import_module(module), name)(*arguments)}
    except LlmcError as error:
        found = {"refused": str(error)}
    except BaseException as error:  # noqa: BLE001 (a panic of a library, too, is only an answer here)
        found = {"problem": f"{type(error).__name__}: {error!s:.300}"}
    with os.fdopen(stdout, "w", encoding="utf-8") as file:
        file.write(json.dumps(found))


# ------------------------------------------------------------------------------------------------------------ processes


class _Started(NamedTuple):
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]


def run_apart(commands: Mapping[str, Sequence[str]], seconds: float) -> dict[str, dict[str, Any]]:
    """The answer of each command, all run at the same time; one that gives none is described in its place."""
    deadline = time.monotonic() + seconds
    with ExitStack() as files:
        started = {name: _start(command, files) for name, command in commands.items()}
        return {name: _answer(step, deadline, seconds) for name, step in started.items()}


def _start(command: Sequence[str], files: ExitStack) -> _Started:
    # Files and not pipes: a process that cannot be ended would hold a pipe, and whoever reads it.
    out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))  # noqa: SIM115
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
    )
    files.callback(_end, process)  # of one that is still there, where the caller is interrupted
    return _Started(process, out, err)


def _answer(step: _Started, deadline: float, seconds: float) -> dict[str, Any]:
    try:
        code = step.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(step.process)
        return {"state": "hung", "problem": _with_last_words(f"no answer within {seconds:g} s", step.err)}
    names = {each.value: each.name for each in signal.Signals}
    end = f"ended by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"
    step.out.seek(0)
    try:
        found = dict(json.loads(step.out.read()))
    except (TypeError, ValueError):
        return {"state": "crashed", "problem": _with_last_words(end, step.err)}
    # After it had answered, as some libraries do when they are unloaded.
    return found | ({"problem": end} if code else {})


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return
    process.kill()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL  # it goes when the driver lets it; Popen must not complain until then


def _with_last_words(what: str, err: IO[bytes]) -> str:
    """The event, and the last line that the process wrote on stderr."""
    err.seek(0)
    lines = err.read().decode(errors="replace").strip().splitlines()
    return f"{what}; last it said: {lines[-1][:300]}" if lines else what
