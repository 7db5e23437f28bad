"""What the threat model promises is held by tests that exist."""

import ast
import re
from pathlib import Path

NAMED = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)*)`")


def missing(page: str, root: Path) -> list[str]:
    """Tests that the page names and nobody wrote."""
    return [f"{file}{name}" for file, name in NAMED.findall(page) if not exists(root / file, name)]


def exists(file: Path, name: str) -> bool:
    if not file.is_file():
        return False
    scope: ast.AST = ast.parse(file.read_text())
    for part in name.split("::")[1:]:
        inner = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == part]
        if not inner:
            return False
        scope = inner[0]
    return True


def test_every_test_that_it_names_exists(root: Path):
    page = (root / "SECURITY.md").read_text()
    assert len(NAMED.findall(page)) > 40
    assert missing(page, root) == []


def test_a_test_that_nobody_wrote_is_noticed(root: Path):
    named = ["tests/contracts/test_threat_model.py::exists::nothing", "tests/contracts/test_nothing.py"]
    assert missing(" ".join(f"`{name}`" for name in named), root) == named
