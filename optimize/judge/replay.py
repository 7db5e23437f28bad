"""The golden prompts of a finished bundle, replayed in a process of its own: what was recorded must hold where nothing
is left of the process that recorded it, or the machine that built a bundle would be the first to refuse it."""

import json
import logging
import subprocess
import sys
from pathlib import Path

from llmc import errors
from llmc.errors import BuildError, BundleError, LlmcError, ResourceError
from llmc.runtime import load
from llmc.runtime.selftest import replay

log = logging.getLogger(__name__)

# The process sees the modules that this one sees, and no others: not those of the folder that it was started in.
CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from llmc.optimize.judge.replay import answer; print(answer(*json.loads(sys.argv[2])))"
)
KILLED = -9


def replay_apart(folder: Path, *, emulate: bool = False) -> None:
    """Load the bundle in ``folder`` in a process of its own and replay its golden prompts there.

    Raises:
        BuildError: it computes something else than was recorded, or the process ended.
        ResourceError: memory does not suffice.
        GpuError, MissingExtraError: the device or its library failed.
    """
    command = [sys.executable, "-c", CODE, json.dumps(sys.path), json.dumps([str(folder), emulate])]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode == KILLED:
        raise ResourceError(
            "the process that loads the finished bundle was killed, as happens when memory runs out; nothing was "
            "published: free memory, or build with a smaller --max-context"
        )
    try:
        kind, message = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip() or "it said nothing").splitlines()[-1][:300]
        raise BuildError(
            f"the process that loads the finished bundle ended with {done.returncode} ({last}); nothing was published: "
            "run it again, and with --int8 if it stays so"
        ) from None
    log.debug("%s: %s", folder, message)
    if kind == BundleError.__name__:
        raise BuildError(
            f"a process that loads the finished bundle refuses it ({message}); nothing was published: run it again, and "
            "with --int8 or --fp32 if it stays so"
        )
    if kind:
        raise getattr(errors, kind)(message)


def answer(folder: str, emulate: bool) -> str:
    """What :func:`replay_apart` asks its process: JSON, the name of an error's class (empty: none) and a message."""
    try:
        with load(folder, self_test=False, emulate=emulate) as model:
            report = replay(model)
    except LlmcError as error:
        return json.dumps([type(error).__name__, str(error).removeprefix(f"{folder}: ")])
    return json.dumps(["", f"logits differ by {report.largest_difference:.2g}"])
