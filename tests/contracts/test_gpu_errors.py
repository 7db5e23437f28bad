"""The list of errors in recipes/gpu.md quotes messages that the code has."""

import re
from pathlib import Path

import pytest

ELLIPSIS = "…"


def listed(page: str) -> list[str]:
    """The quoted messages: the spans of code in the first column of the table of errors."""
    table = page.partition("## Errors")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [span for row in rows for span in re.findall(r"`([^`]+)`", row)]


def messages(root: Path) -> str:
    """All sources, with strings that continue on the next line joined."""
    paths = sorted(path for room in ("runtime", "optimize") for path in (root / room).rglob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*paths, root / "errors.py"])
    return re.sub(r"['\"]\s*\n\s*f?['\"]", "", text)


def unknown(quotes: list[str], sources: str) -> list[str]:
    """Quotes of which a piece is in no message."""
    return [quote for quote in quotes if any(piece.strip() not in sources for piece in quote.split(ELLIPSIS))]


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "recipes" / "gpu.md").read_text(encoding="utf-8")


def test_every_listed_error_is_one_that_the_code_raises(page, root):
    quotes = listed(page)
    assert len(quotes) > 20
    assert unknown(quotes, messages(root)) == []


def test_an_error_that_the_code_does_not_have_would_be_seen():
    page = (
        "## Errors, and what to do\n| message | do |\n|---|---|\n| `is … installed` | x |\n| `is gone` | x |\n\n## On\n"
    )
    assert unknown(listed(page), 'raise E("it is "\n    f"{x} installed")') == ["is gone"]
