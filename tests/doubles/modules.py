"""Modules by their files: folders of tests, recipes and examples are no packages."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parents[1]


@cache
def load_file(path: Path) -> ModuleType:
    """The module that a file is; each is loaded once."""
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_checkpoints() -> ModuleType:
    """The random checkpoints of the export's tests."""
    return load_file(TESTS / "export" / "conftest.py")
