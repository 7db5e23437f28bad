"""Call functions in separate processes, which may crash, hang or take all memory without harm to the caller."""

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

# The process sees the same modules as this one, and none from its working folder.
CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from llmc.runtime.host.apart import answer; "
    "answer(*json.loads(sys.argv[2]))"
)
# A process inside an uninterruptible driver call cannot be killed; wait no longer for it than this.
GRACE_S = 1.0


class ApartError(Exception):
    """The function gave no result: it refused (``refused``, with llmc's own message), failed, or its process ended."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


def call_apart(function: str, *arguments: Any, seconds: float, memory: int) -> Any:
    """The result of ``function`` (as ``llmc.module:name``) in a fresh interpreter, which takes some tenths of a second.

    Args:
        arguments: JSON values, like the result.
        seconds: time limit, including the start.
        memory: limit of the address space in bytes.

    Raises:
        ApartError: it gave no result.
        OSError: no process can be started.
    """
    answer_ = run_apart({function: command(function, *arguments, memory=memory)}, seconds)[function]
    if "result" in answer_:
        return answer_["result"]
    raise ApartError(str(answer_.get("refused") or answer_.get("problem")), "refused" in answer_)


def command(function: str, *arguments: Any, memory: int = 0) -> list[str]:
    """The command that calls a function in another process; ``memory`` 0 sets no limit."""
    path = json.dumps([entry for entry in sys.path if entry])
    return [sys.executable, "-c", CODE, path, json.dumps([function, arguments, memory])]


def answer(function: str, arguments: list[Any], memory: int) -> None:
    """Call ``function`` in this short-lived process and write the outcome as JSON to stdout.

    What libraries print goes to stderr.
    """
    stdout = os.dup(1)
    os.dup2(2, 1)
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of its threads reserves memory
    module, _, name = function.partition(":")
    try:
        outcome = {"result": getattr(importlib.import_module(module), name)(*arguments)}
    except LlmcError as error:
        outcome = {"refused": str(error)}
    except BaseException as error:  # noqa: BLE001 (a panic of a library is an outcome, too)
        outcome = {"problem": f"{type(error).__name__}: {error!s:.300}"}
    with os.fdopen(stdout, "w", encoding="utf-8") as file:
        file.write(json.dumps(outcome))


# ------------------------------------------------------------------------------------------------------------ processes


class _Started(NamedTuple):
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]


def run_apart(commands: Mapping[str, Sequence[str]], seconds: float) -> dict[str, dict[str, Any]]:
    """The answer of each command, all run at the same time; a command without one gets a description of its failure."""
    deadline = time.monotonic() + seconds
    with ExitStack() as files:
        started = {name: _start(command, files) for name, command in commands.items()}
        return {name: _answer(step, deadline, seconds) for name, step in started.items()}


def _start(command: Sequence[str], files: ExitStack) -> _Started:
    # Files, not pipes: a process that cannot be killed would hold the pipe and block its reader.
    out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))  # noqa: SIM115
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
    )
    files.callback(_end, process)  # if the caller is interrupted
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
        answer_ = dict(json.loads(step.out.read()))
    except (TypeError, ValueError):
        return {"state": "crashed", "problem": _with_last_words(end, step.err)}
    # Some libraries crash when they are unloaded, after the answer.
    return answer_ | ({"problem": end} if code else {})


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return
    process.kill()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL  # it ends when the driver lets it; keeps Popen from complaining


def _with_last_words(what: str, err: IO[bytes]) -> str:
    """The event, with the last line that the process wrote to stderr."""
    err.seek(0)
    lines = err.read().decode(errors="replace").strip().splitlines()
    return f"{what}; last it said: {lines[-1][:300]}" if lines else what
