"""Rules that every source file keeps."""

import ast
import io
import tokenize
from pathlib import Path

from llmc import errors

ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "export", "optimize", "runtime", "recipes", "tests")
MODULES = sorted([*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))])
PRODUCT = [path for path in MODULES if path.relative_to(ROOT).parts[0] not in ("recipes", "tests")]


def names(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


def test_nothing_is_left_unimplemented():
    unfinished = [path for path in PRODUCT if "NotImplementedError" in path.read_text(encoding="utf-8")]
    assert names(unfinished) == []


def test_every_module_says_what_it_is():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PRODUCT}
    assert names([path for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)]) == []


QUESTIONS = ("What", "Whether", "Who", "How", "Where", "Which", "Why")


def test_docstrings_name_a_thing_or_tell_what_to_do_and_ask_nothing():
    """A noun phrase or an imperative is understood at one reading; "Whether it is so" is half a sentence."""
    asking = []
    for path in [*PRODUCT, *(path for path in MODULES if path.relative_to(ROOT).parts[0] == "recipes")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "-").split()[0]
                if first.rstrip(",:'s") in QUESTIONS:
                    asking.append(f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}")
    assert asking == []


def code_mentions(path: Path, word: str) -> list[str]:
    """Names and strings of a module that contain ``word``; comments and docstrings are left out."""
    text = path.read_text(encoding="utf-8")
    if word not in text.lower():
        return []
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    mentions = [token for token in tokens if token.type in (tokenize.NAME, tokenize.STRING)]
    return [token.string for token in mentions if word in token.string.lower() and token.start[0] not in docstrings]


def test_telemetry_is_only_ever_switched_off():
    for path in PRODUCT:
        assert set(code_mentions(path, "telemetry")) <= {'"ORT_DISABLE_TELEMETRY"'}, path


def read_sentences(source: str) -> list[int]:
    """Lines that search, compare or take apart the sentence of an error of llmc's, which carries its parts."""
    found = []
    for handler in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler) and node.type):
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if not any(hasattr(errors, ast.unparse(kind)) for kind in kinds):
            continue
        for node in ast.walk(handler):
            read = [node.value] if isinstance(node, ast.Attribute) else []
            read += [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            read += node.args if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") else []
            found += [it.lineno for it in read if ast.unparse(it) == f"str({handler.name})"]
    return sorted(found)


def test_no_code_reads_the_sentence_of_an_error():
    found = {path: read_sentences(path.read_text(encoding="utf-8")) for path in PRODUCT}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_code_that_reads_a_sentence_would_be_found():
    uses = "re.sub('a', '', str(e))", "str(e).partition(' ')", "'a' in str(e)"
    source = "try: pass\nexcept (UsageError, OSError) as e:\n" + "".join(f"    {use}\n" for use in uses)
    assert read_sentences(source) == [3, 4, 5]
    assert read_sentences(source.replace("UsageError", "ValueError")) == []
