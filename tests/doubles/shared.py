"""What takes seconds to make, made once for all processes that run tests."""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that ``make`` fills, in the first process that asks for it; nobody may change what is in there."""
    own = factory.getbasetemp()
    folder = (own.parent if own.name.startswith("popen-gw") else own) / "shared" / name  # xdist's, of one process
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder
