"""Every row of the threat model has tests that prove it, by the row's name as a mark."""

import ast
import re
from collections.abc import Iterator

ROW = re.compile(r"^\| `([a-z0-9-]+)` \|", re.MULTILINE)


def marks(node: ast.AST) -> set[str]:
    """Names in the ``@pytest.mark.threat("row", ...)`` of a test, of a class of tests, or of what these contain."""
    names: set[str] = set()
    for inner in collected(node):
        for mark in inner.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.threat":
                names.update(ast.literal_eval(argument) for argument in mark.args)
    return names


def collected(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Tests and classes of tests, as pytest names them."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ClassDef) and inner.name.startswith("Test"):
            yield inner
            yield from collected(inner)
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test_"):
            yield inner


def test_every_row_has_a_test_and_every_mark_a_row(root):
    rows = ROW.findall((root / "SECURITY.md").read_text())
    sources = [file.read_text() for file in (root / "tests").rglob("test_*.py")]
    used = set().union(*(marks(ast.parse(source)) for source in sources if "mark.threat" in source))
    assert len(rows) == len(set(rows)) > 70
    assert set(rows) == used


def test_only_marks_on_tests_count():
    source = """
@pytest.mark.threat("helper")
def helper(): ...

@pytest.mark.threat("one", "two")
def test_function(): ...

class TestGroup:
    @pytest.mark.threat("method")
    async def test_method(self): ...
"""
    assert marks(ast.parse(source)) == {"one", "two", "method"}
