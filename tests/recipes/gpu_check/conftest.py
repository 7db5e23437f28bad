"""The parts of ``recipes/gpu_check.py`` as modules."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of the script's folder."""
    monkeypatch.syspath_prepend(str(RECIPES))
    return lambda name: importlib.import_module(f"gpu_check.{name}")
