"""The README's tree is the repository's."""

import re
from pathlib import Path

import pytest


@pytest.fixture
def tree_in_readme(root: Path) -> dict[str, str]:
    """Name -> description of each line of the fenced block that starts with ``llmc/``; folders end in a slash.

    Only the first level counts: lines indented deeper describe what is inside.
    """
    block = re.search(r"^```\w*\nllmc/[^\n]*\n(.*?)^```", (root / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert block, "README.md has no fenced block that starts with llmc/"
    lines = [line for line in block[1].splitlines() if line.strip()]
    indents = [re.match(r"[\s│├└─|`-]*", line).end() for line in lines]
    first_level = [line[indent:] for line, indent in zip(lines, indents, strict=True) if indent == min(indents)]
    parts = [line.partition("#") for line in first_level]
    return {name.strip(): description.strip() for name, _, description in parts}


def test_tree_in_readme_equals_the_repository(tree_in_readme, top_level):
    assert set(tree_in_readme) == {path.name + "/" * path.is_dir() for path in top_level}


def test_tree_in_readme_describes_every_folder(tree_in_readme):
    assert [name for name, text in tree_in_readme.items() if name.endswith("/") and not text] == []
