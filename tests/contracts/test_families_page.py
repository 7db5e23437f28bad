"""The page of families is what the code has: every family, and what each target refuses."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from doubles.geometries import uniform
from doubles.refusals import about

from llmc.bundle import Geometry
from llmc.bundle.model.encoder import Encoder
from llmc.bundle.model.kinds import refuse
from llmc.errors import BuildError, CheckpointError, UsageError
from llmc.export.families import FAMILIES, read_config
from llmc.export.families.missing import MISSING
from llmc.export.keys import Keys
from llmc.optimize.lower.onnxruntime.attention import check_head_sizes
from llmc.optimize.recipe import Request
from llmc.optimize.targets import TARGETS

RUN, BUILT, REFUSED = "●", "○", "no"
# Families with layers that are lowered for CPUs alone.
ON_CPUS = {
    "apertus",
    "qwen3_5",
    "qwen3_5_text",
    "lfm2",
    "falcon_h1",
    "deepseek_v2",
    "deepseek_v3",
    "nemotron_h",
    "qwen3_moe",
    "qwen3_5_moe",
    "olmoe",
    "mixtral",
    "granitemoe",
    "lfm2_moe",
    "gpt_oss",
    "gemma4",
    "llada",
    "bert",
}


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "export" / "FAMILIES.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows(page: str) -> list[list[str]]:
    """Cells of the table of families, its head first and without the line below it."""
    lines = re.search(r"^\| family \|.*?(?=\n\n)", page, re.M | re.S)
    assert lines, "export/FAMILIES.md has no table that begins with | family |"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()]
    return [cells[0], *cells[2:]]


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_family_is_in_the_table_once(rows):
    assert sorted(name for row in rows[1:] for name in names(row[0])) == sorted(FAMILIES)


def test_the_page_says_what_each_refused_type_would_take(page):
    table = re.search(r"(?<=\| it would take \| types \|\n\|---\|---\|\n).*?(?=\n\n)", page, re.S)
    assert table
    cells = [line.strip("| ").split(" | ") for line in table[0].splitlines()]
    assert [(name, needed) for needed, types in cells for name in names(types)] == list(MISSING.items())


def test_types_are_those_of_transformers_or_named_as_others(page):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert FAMILIES.keys().isdisjoint(MISSING)
    known, listed = CONFIG_MAPPING_NAMES.keys(), [*FAMILIES, *MISSING]
    assert len(listed) > 100
    others = re.search(r"[^.]*(?= are not in transformers)", page.split("## Refused families", 1)[1])
    assert others
    assert {name for name in listed if name not in known} == {"llada", "Dream", *names(others[0])}


@pytest.mark.parametrize("name", MISSING)
def test_a_refused_type_is_told_what_it_would_take(name):
    with pytest.raises(CheckpointError, match=f"model_type='{name}' is unsupported; .*{re.escape(MISSING[name])}"):
        read_config(Keys({"model_type": name}, "config.json"))


def test_the_columns_are_the_targets_and_tell_what_has_run(rows):
    columns = [names(head) for head in rows[0][2:]]
    assert sorted(name for column in columns for name in column) == sorted(TARGETS)
    for row in rows[1:]:
        for cell, targets in zip(row[2:], columns, strict=True):
            built = names(row[0]) and ON_CPUS.isdisjoint(names(row[0]))
            assert cell == (RUN if not TARGETS[targets[0]].has_gpu else BUILT if built else REFUSED)


@pytest.mark.parametrize("target", TARGETS)
def test_models_that_embed_are_refused_where_the_table_says_no(rows, target):
    [row] = [row for row in rows[1:] if not names(row[0])]
    [cell] = [cell for head, cell in zip(rows[0], row, strict=True) if target in names(head)]
    with pytest.raises(UsageError, check=about("target")) if cell == REFUSED else nullcontext():
        encoder = replace(heads_of(8), encoder=Encoder(result="scores", pooling="last", width=1))
        refuse(encoder, *Request().features(TARGETS[target]))


def test_the_precisions_are_those_of_the_targets(page):
    text = " ".join(page.split()).split("Precisions: ", 1)[1].split(". ", 1)[0]
    listed = {name: set(re.findall(r"\w+\d+", part)) for part in text.split("; ") for name in names(part)}
    assert listed == {name: set(target.precisions) for name, target in TARGETS.items()}


def heads_of(size: int) -> Geometry:
    return uniform("llama", 1, 64, 64, 1, 1, size, 64, 64, False, (0,))


def test_the_sizes_of_heads_on_the_page_are_those_that_are_refused(page):
    words = " ".join(page.split())
    assert "Heads of 8, 16, 24 ... values" in words and "(OpenLLaMA 3B has 100)" in words
    for size in (8, 16, 24):
        check_head_sizes(heads_of(size))
    with pytest.raises(BuildError, match="head_dim of 100"):
        check_head_sizes(heads_of(100))
