"""What takes seconds to make, made once for all processes that run tests."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that ``make`` fills, in the first process that asks for it; nobody may change what is in there.

    It lies in ``LLMC_TESTS_SHARED`` if that is set: bundles of another machine, which recipes/arm_check.py built.
    """
    own = factory.getbasetemp()
    base = (own.parent if own.name.startswith("popen-gw") else own) / "shared"  # xdist's, of one process
    folder = Path(os.environ.get("LLMC_TESTS_SHARED", base)) / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder
