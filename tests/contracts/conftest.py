"""The repository as the contracts see it."""

import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from doubles.shared import shared

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


@pytest.fixture(scope="session")
def wheel(root, tmp_path_factory, top_level, rooms) -> zipfile.ZipFile:
    """The wheel, built from a copy so that no build folder appears in the tree."""

    def make(out: Path) -> None:
        copy = out / "source"
        copy.mkdir()
        for path in top_level:
            if path.is_file():
                shutil.copy(path, copy)
        for room in [*rooms, root / "recipes"]:
            shutil.copytree(room, copy / room.name, ignore=shutil.ignore_patterns("__pycache__", "tiny", "benchmarks"))
        build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
        subprocess.run([sys.executable, "-c", build, str(out)], cwd=copy, check=True, capture_output=True)

    return zipfile.ZipFile(next(shared(tmp_path_factory, "wheel", make).glob("*.whl")))
