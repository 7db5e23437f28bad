"""Replay the golden prompts of a finished bundle in a fresh process: a bundle that its own machine would refuse is not
published."""

import json
import logging
import subprocess
import sys
from pathlib import Path

from llmc import errors
from llmc.errors import BuildError, BundleError, ResourceError

log = logging.getLogger(__name__)

# The process has this one's module path, without the folder that it starts in, and imports what a user's process
# imports. Its last line is JSON: the name of an error's class, or nothing, and a message.
CODE = """
import json, sys
path, folder, emulate = map(json.loads, sys.argv[1:])
sys.path[:] = path
from llmc.errors import LlmcError
from llmc.runtime import LoadedBundle, load
from llmc.runtime.selftest import replay
try:
    with load(folder, kind=LoadedBundle, self_test=False, emulate=emulate) as model:
        answer = "", f"logits differ by {replay(model, long=not emulate).largest_difference:.2g}"
except LlmcError as error:
    answer = type(error).__name__, error.problem
print(json.dumps(answer))
"""
KILLED = -9


def replay_apart(folder: Path, *, emulate: bool = False) -> None:
    """Load a bundle in a fresh process and replay its golden prompts there; with ``emulate``, short ones on the CPU."""
    kind, message = _answer(folder, emulate)
    log.debug("%s: %s", folder, message)
    if kind == BundleError.__name__:
        raise BuildError(
            f"a process that loads the finished bundle refuses it ({message}); nothing was published: build it again, "
            "with --int8 or --fp32 if it stays so"
        )
    if kind:
        raise getattr(errors, kind)(message)


def _answer(folder: Path, emulate: bool) -> tuple[str, str]:
    command = [sys.executable, "-c", CODE, *map(json.dumps, (sys.path, str(folder), emulate))]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode == KILLED:
        raise ResourceError(
            "the process that loads the finished bundle was killed, as happens when memory runs out; nothing was "
            "published: free memory, or build with a smaller --max-context"
        )
    try:
        kind, message = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip() or "without a word").splitlines()[-1][:300]
        raise BuildError(
            f"the process that loads the finished bundle ended with {done.returncode} ({last}); nothing was published: "
            "build it again, with --int8 or --fp32 if it stays so"
        ) from None
    return kind, message
