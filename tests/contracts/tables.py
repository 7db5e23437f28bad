"""Tables of the pages, made from the code. ``python tests/contracts/tables.py`` writes them into the pages.

A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``. Its texts are comments and metadata of fields,
docstrings and constants, so a page cannot differ from the code.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import tomllib

from llmc import errors
from llmc.bundle import Budget
from llmc.optimize import recipe
from llmc.optimize.recipe.engine import EngineRequest
from llmc.runtime import EngineOptions, Request, SamplingParams, load
from llmc.runtime.api import options
from llmc.runtime.guided import grammars, json_schema, patterns, trial
from llmc.runtime.observe.metrics import EngineMetrics
from llmc.runtime.observe.prometheus import EngineCollector
from llmc.runtime.sampling.params import PARAMETERS
from llmc.runtime.sampling.processors import CUTS, PROCESSORS
from llmc.runtime.server.config import describe_values, settings

ROOT = Path(__file__).parents[2]
PAGES = ("runtime/README.md", "runtime/server/README.md", "optimize/README.md")


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """A table with these columns; a column that is empty in every row is left out."""
    names, body = head.split(" | "), [list(row) for row in rows]
    kept = [column for column in range(len(names)) if any(row[column] for row in body)]
    lines = [[row[column] for column in kept] for row in (names, ["---"] * len(names), *body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(text: str) -> str:
    """Text of a docstring or comment in Markdown: its references and ``code`` as code."""
    text = re.sub(r":\w+:`(?:~?[\w.]+\.)?(\w+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


def comments(kind: type) -> dict[str, str]:
    """Field of a dataclass -> the comment at the end of its line, else the comment above it."""
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    [definition] = ast.parse("\n".join(lines)).body
    stated = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign):
            first, end = node.lineno - 1, lines[node.end_lineno - 1].partition("  # ")[2]
            above = first
            while lines[above - 1].lstrip().startswith("# "):
                above -= 1
            text = end or " ".join(line.strip(" #") for line in lines[above:first])
            stated[node.target.id] = markdown(text)
    return stated


def default_of(field: Any) -> str:
    if field.default_factory is not MISSING:
        return f"`{field.default_factory.__name__}()`"
    default = getattr(field.default, "value", field.default)
    return "" if field.default is MISSING else f"`{default!r}`"


def fields_table(kind: type, head: str, ranges: dict[str, Any] | None = None) -> str:
    texts, values = comments(kind), ranges or {}
    rows = [
        (f"`{it.name}`", values[it.name].short if values else "", default_of(it), texts[it.name]) for it in fields(kind)
    ]
    return table(head, rows)


def key_table(kind: type) -> str:
    return table("key | meaning", [(f"`{name}`", text) for name, text in comments(kind).items()])


def arguments_table(function: Callable[..., Any]) -> str:
    """The arguments of a function, as its docstring describes them."""
    block = (inspect.getdoc(function) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    texts = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", block, re.M)
    parameters = inspect.signature(function).parameters
    defaults = {name: "" if it.default is it.empty else f"`{it.default!r}`" for name, it in parameters.items()}
    rows = [(f"`{name}`", defaults[name], markdown(text).rstrip(".")) for name, text in texts]
    return table("argument | default | meaning", rows)


def parameter_table(section: str) -> str:
    rows = []
    for field in fields(SamplingParams):
        stated = PARAMETERS[field.name]
        if stated.section == section:
            meaning = "; ".join(filter(None, (stated.meaning, stated.range.note))) + stated.more
            values = stated.short or stated.range.short
            rows.append((f"`{field.name}`", values, default_of(field), meaning, stated.source))
    return table("parameter | range | default | meaning | source", rows)


def settings_table() -> str:
    rows = []
    for setting in settings():
        default = "" if setting.default in (None, ()) else str(setting.default)
        shown = default.lower() if setting.kind == "flag" else default
        rows.append((f"`{setting.name}`", shown, describe_values(setting), setting.help))
    return table("key | default | values | meaning", rows)


def metrics_table() -> str:
    rows = []
    for family in EngineCollector(EngineMetrics()).collect():
        [label] = {name for sample in family.samples for name in sample.labels if name != "le"} or {""}
        name = family.name + "_total" * (family.type == "counter")
        rows.append((f"`{name}`", family.type + f", by `{label}`" * bool(label), family.documentation))
    return table("name | kind | meaning", rows)


def errors_table() -> str:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.LlmcError)]
    rows = []
    for kind in kinds:
        name = f"`{kind.__name__}`" + "*" * (kind.__base__ is errors.RequestError)
        rows.append((name, markdown((inspect.getdoc(kind) or "").partition("\n\n")[0])))
    return table("class | raised when", rows)


def limits_table() -> str:
    longest = grammars._LONGEST
    return table(
        "limit of a grammar | at most",
        [
            ("characters of a schema", f"{longest['json_schema']:,}"),
            ("characters of a regular expression", f"{longest['regex']:,}"),
            ("characters of a grammar, or of all choices", f"{longest['grammar']:,}"),
            ("subschemas", f"{json_schema._MOST_SUBSCHEMAS:,}"),
            ("product of nested repetitions, such as `(a{200}){100}`", f"{patterns.MOST_REPETITIONS:,}"),
            ("digits of `multipleOf`, alone or as a common multiple", f"{json_schema.LARGEST_MULTIPLE:,}"),
            ("processor seconds to compile", f"{trial.COMPILE_SECONDS:g}"),
            ("memory to compile", f"{trial._MEMORY_BYTES >> 30} GiB"),
            ("compiled grammars that are kept", f"{grammars._MOST_GRAMMARS}"),
        ],
    )


def rooms_list() -> str:
    """The layers of the runtime from the top down: each imports only what is below it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    [layers] = [it["layers"] for it in contracts if it.get("containers") == ["llmc.runtime"]]
    return ", ".join(f"`{name}`" for layer in layers for name in re.findall(r"\w+", layer)) + "."


TABLES: dict[str, Callable[[], str]] = {
    "load": lambda: arguments_table(load),
    "engine-options": lambda: fields_table(EngineOptions, "option | range | default | meaning", options._RANGES),
    "request": lambda: fields_table(Request, "field |  | default | meaning"),
    **{
        section.lower().replace(",", "").replace(" ", "-"): lambda section=section: parameter_table(section)
        for section in dict.fromkeys(stated.section for stated in PARAMETERS.values())
    },
    "steps": lambda: ", ".join(f"`{name}`" for name in (*PROCESSORS, *CUTS)) + ".",
    "grammar-limits": limits_table,
    "metrics": metrics_table,
    "errors": errors_table,
    "rooms": rooms_list,
    "settings": settings_table,
    "recipe": lambda: key_table(recipe.Request),
    "engine": lambda: key_table(EngineRequest),
    "budget": lambda: key_table(Budget),
}
_BLOCK = re.compile(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", re.S)


def names_in(page: str) -> list[str]:
    return [name for name in _BLOCK.findall(page) if name in TABLES]


def with_tables(page: str) -> str:
    """The page with every table made anew."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- {name} -->\n{TABLES[name]()}\n<!-- /{name} -->" if name in TABLES else found[0]

    return _BLOCK.sub(block, page)


if __name__ == "__main__":
    for page in (ROOT / name for name in PAGES):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
