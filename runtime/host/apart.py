"""A function called in a process of its own, which may crash, hang or take all memory without harm to the caller."""

import importlib
import json
import os
import resource
import sys
from typing import Any

from llmc.errors import LlmcError

# It sees the modules that this process sees, and no others: not those of the folder that it was started in.
CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from llmc.runtime.host.apart import answer; "
    "answer(*json.loads(sys.argv[2]))"
)


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
    path = json.dumps([entry for entry in sys.path if entry])
    command = [sys.executable, "-c", CODE, path, json.dumps([function, list(arguments), memory])]
    from llmc.runtime.host.probe import run_steps  # wanted once per tokenizer and machine, and slow to import

    found = run_steps({function: command}, seconds)[function]
    if "result" in found:
        return found["result"]
    raise ApartError(str(found.get("refused") or found.get("problem")), "refused" in found)


def answer(function: str, arguments: list[Any], memory: int) -> None:
    """Call ``function`` in this process, which ends soon, and write what comes of it as JSON on stdout."""
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
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
