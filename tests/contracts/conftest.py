"""The repository as the contracts see it."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def top_level() -> list[Path]:
    """What a reader sees at the top: neither hidden files nor what git ignores."""
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines() if line]
    shown = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    return sorted(path for path in shown if not any(fnmatch(path.name, pattern) for pattern in ignored))


@pytest.fixture(scope="session")
def rooms(top_level: list[Path]) -> list[Path]:
    """The folders that are part of the package."""
    return [path for path in top_level if path.is_dir() and path.name not in ("recipes", "tests")]
