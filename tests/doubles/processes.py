"""Processes that tests start: ``llmc`` as a command that is not done too soon, and what the kernel says of others."""

import sys
from pathlib import Path

# With answers of a thousand tokens and more, a test has a minute to do what it does while text is generated.
_SLOW = """
import sys, time
from llmc.cli.main import main
from llmc.runtime.engine.engine import Engine

step = Engine.step

def slowly(engine):
    time.sleep(0.05)
    step(engine)

Engine.step = slowly
main(sys.argv[1:])
"""


def slow_llmc(*arguments: object) -> list[str]:
    """The command line of ``llmc`` with these arguments, in which a token takes a twentieth of a second."""
    return [sys.executable, "-c", _SLOW, *map(str, arguments)]


def running(pid: str) -> bool:
    """Whether the process runs; one that ended and that nobody waited for, as in a container, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
