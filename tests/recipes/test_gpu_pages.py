"""What the pages about GPUs list is what the code takes: keys of the engine's table, and recipes by target."""

import re
import typing
from dataclasses import fields
from pathlib import Path

import click
import pytest

from llmc.cli.build import build_command
from llmc.errors import UsageError
from llmc.optimize.recipe import read_recipe, resolve
from llmc.optimize.recipe.engine import EngineRequest
from llmc.optimize.targets import TARGETS
from llmc.optimize.tensorrt.engine import LEAST_WORKSPACE

RECIPES = Path(__file__).parents[2] / "recipes"
WORDS = {str: "text", bool: "true or false", int: "whole number"}
Table = dict[str, list[str]]


def table(text: str, heading: str) -> Table:
    """Cells of the rows of the first table below a heading, by what is quoted in their first cell."""
    section = re.split(r"\n##", text.partition(heading)[2])[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]
    return {name: cells[1:] for cells in rows for name in re.findall(r"`([^`]+)`", cells[0])}


def wrong_types(keys: Table) -> list[str]:
    """Keys of the engine's table that are missing, unknown, or listed with another type."""
    kinds = {name: typing.get_args(hint)[0] for name, hint in typing.get_type_hints(EngineRequest).items()}
    return sorted(
        {
            *(kinds.keys() ^ keys.keys()),
            *(key for key in kinds.keys() & keys.keys() if WORDS[kinds[key]] not in keys[key][0]),
        }
    )


def is_taken(name: str, target: str) -> bool:
    try:
        resolve(read_recipe(RECIPES / f"{name}.toml"), TARGETS[target], 4096, name, calibrated=True)
    except UsageError:
        return False
    return True


def wrong_recipes(listed: Table) -> list[str]:
    """Recipes by target of which the table says something else than the code."""
    said = {(name, "tensorrt"): cells[0] for name, cells in listed.items()}
    said |= {(name, "tensorrt-rtx"): cells[0] for name, cells in listed.items()}
    said |= {(name, "cuda"): cells[1] for name, cells in listed.items()}
    return [
        f"{name} {target}" for (name, target), word in said.items() if word.startswith("yes") != is_taken(name, target)
    ]


@pytest.fixture(scope="module")
def keys() -> Table:
    return table((RECIPES / "gpu.md").read_text(encoding="utf-8"), "### The table `[engine]`")


@pytest.fixture(scope="module")
def recipes() -> Table:
    return table((RECIPES / "README.md").read_text(encoding="utf-8"), "## Recipes for GPUs")


def test_every_key_of_an_engine_is_listed_with_its_type(keys):
    assert wrong_types(keys) == []
    assert f"at least {LEAST_WORKSPACE >> 30} GiB" in keys["workspace"][1]


def test_all_keys_but_the_last_two_are_flags(keys):
    flags = {name for option in build_command.params if isinstance(option, click.Option) for name in option.opts}
    assert [key for key in keys if f"--{key.replace('_', '-')}" not in flags] == ["workspace", "optimization_level"]
    assert [field.name for field in fields(EngineRequest)] == list(keys)


def test_the_table_that_is_shown_is_a_recipe(tmp_path):
    shown = re.findall(r"```toml\n(\[engine\].*?)```", (RECIPES / "gpu.md").read_text(encoding="utf-8"), re.S)
    (tmp_path / "x.toml").write_text(shown[0])
    engine = read_recipe(tmp_path / "x.toml").engine
    assert engine is not None and (engine.workspace, engine.compute_capabilities) == (512 << 20, "8.6,8.9")


def test_recipes_are_listed_with_the_gpus_that_they_suit(recipes):
    assert recipes.keys() == {path.stem for path in RECIPES.glob("*.toml")}
    assert wrong_recipes(recipes) == []
    assert wrong_recipes(recipes | {"int8": ["no", "yes"]}) == ["int8 tensorrt", "int8 tensorrt-rtx"]
