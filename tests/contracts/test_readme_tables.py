"""The tables of the pages are what the code states, and each stands on one page."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from contracts.tables import PAGES, TABLES, comments, default_of, names_in, with_tables

from llmc.bundle import Budget
from llmc.optimize import recipe
from llmc.optimize.recipe.engine import EngineRequest
from llmc.runtime import Determinism, EngineOptions, Request
from llmc.runtime.sampling.params import PARAMETERS


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest, root: Path) -> str:
    return (root / request.param).read_text(encoding="utf-8")


def test_tables_of_the_pages_are_up_to_date(page):
    assert with_tables(page) == page, "run python tests/contracts/tables.py"


def test_every_table_is_on_one_page(root):
    shown = [name for page in PAGES for name in names_in((root / page).read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(TABLES)


@pytest.mark.parametrize("kind", [EngineOptions, Request, recipe.Request, EngineRequest, Budget])
def test_every_field_is_documented_on_its_line(kind):
    assert [name for name, text in comments(kind).items() if not text] == []


def test_a_changed_text_would_be_seen(root, monkeypatch):
    page = (root / "runtime" / "README.md").read_text(encoding="utf-8")
    monkeypatch.setitem(PARAMETERS, "top_k", replace(PARAMETERS["top_k"], meaning="keep as many tokens"))
    assert with_tables(page) != page


@dataclass
class Documented:
    length: int = 1  # in :class:`~llmc.tokens.Token` or ``bytes``
    # the first line,
    # and the second
    width: Determinism = Determinism.FAST


def test_a_field_is_documented_at_the_end_of_its_line_or_above_it():
    assert comments(Documented) == {"length": "in `Token` or `bytes`", "width": "the first line, and the second"}
    assert [default_of(field) for field in Documented.__dataclass_fields__.values()] == ["`1`", "`'fast'`"]


def test_every_level_of_determinism_has_a_row(root):
    page = (root / "runtime" / "README.md").read_text(encoding="utf-8")
    section = page.partition("## Determinism")[2].partition("\n## ")[0]
    assert [level.value for level in Determinism if f"\n| `{level.value}`" not in section] == []
