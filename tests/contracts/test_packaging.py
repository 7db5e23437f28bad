"""The list of packages equals the tree, and the wheel holds all of it."""

import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.optimize.calibrate.text import DEFAULT_TEXT
from llmc.optimize.recipe import find_recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Part of every base install, and nothing else is: what the runtime on a device needs, and the command line.
BASE = {"numpy", "tokenizers", "jinja2", "click", "rich", "prompt_toolkit", "tomli"}


@pytest.fixture(scope="session")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def declared(project: dict[str, Any]) -> list[str]:
    return list(project["tool"]["setuptools"]["packages"])


def test_declared_packages_equal_the_tree(root, rooms, declared):
    folders = [init.parent.relative_to(root) for room in rooms for init in room.rglob("__init__.py")]
    assert sorted(declared) == sorted(["llmc", *(".".join(("llmc", *folder.parts)) for folder in folders)])


def test_every_folder_with_modules_is_a_package(rooms):
    folders = {module.parent for room in rooms for module in room.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.fixture(scope="session")
def recipes(root: Path) -> list[Path]:
    """The recipe files; of their folder nothing else is part of the package."""
    found = sorted((root / "recipes").glob("*.toml"))
    assert found
    return found


def read_info(wheel: zipfile.ZipFile, name: str) -> str:
    path = next(entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_wheel_holds_every_file_of_every_room_and_nothing_else(root, rooms, recipes, wheel):
    inside = (path for room in rooms for path in room.rglob("*") if "__pycache__" not in path.parts)
    files = [*root.glob("*.py"), *recipes, *(path for path in inside if path.is_file())]
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {f"llmc/{path.relative_to(root).as_posix()}" for path in files}


def test_wheel_carries_the_default_calibration_text(wheel):
    packed = f"llmc/{DEFAULT_TEXT.relative_to(Path(llmc.__file__).parent).as_posix()}"
    assert wheel.read(packed) == DEFAULT_TEXT.read_bytes()


def test_wheel_carries_every_recipe_where_the_command_line_looks_for_it(recipes, wheel):
    assert [find_recipe(path.stem) for path in recipes] == recipes
    assert [path.name for path in recipes if wheel.read(f"llmc/recipes/{path.name}") != path.read_bytes()] == []


def test_wheel_carries_the_licence_and_the_command(wheel):
    assert "Apache License" in read_info(wheel, "licenses/LICENSE")
    assert "llmc = llmc.cli.main:main" in read_info(wheel, "entry_points.txt")


def test_base_install_is_what_a_device_needs(wheel):
    required = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", read_info(wheel, "METADATA"), re.M)
    assert {name.lower() for name, rest in required if "extra ==" not in rest} == BASE


def test_engines_exclude_each_other_so_no_extra_brings_both(project):
    extras = project["project"]["optional-dependencies"]
    engines = {name: {re.match(r"[\w-]+", line)[0] for line in lines} for name, lines in extras.items()}
    assert [name for name, found in engines.items() if {"onnxruntime", "onnxruntime-gpu"} <= found] == []


def test_version_is_the_same_everywhere(project):
    assert llmc.__version__ == project["project"]["version"]
