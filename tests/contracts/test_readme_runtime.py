"""What runtime/README.md lists is what the code has: parameters, options, steps, metrics, errors."""

import ast
import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from llmc import errors
from llmc.runtime import Determinism, EngineOptions, Request, SamplingParams, loading
from llmc.runtime.api.options import DECODE_STEPS_PER_CHUNK
from llmc.runtime.engine import input_processor
from llmc.runtime.engine.scheduler import ARRIVALS_PER_PRIORITY
from llmc.runtime.guided import grammars, json_schema, patterns, trial
from llmc.runtime.kv.prefix_cache import BLOCK
from llmc.runtime.observe.metrics import EngineMetrics
from llmc.runtime.observe.prometheus import EngineCollector
from llmc.runtime.runner.model_runner import CHUNK_WITH_ALL_LOGITS, PREFILL_GRAPH_FROM
from llmc.runtime.sampling.params import MOST_COMPARED, PARAMETERS
from llmc.runtime.sampling.processors import CUTS, PROCESSORS
from llmc.runtime.speculation import control
from llmc.runtime.speculation.control import LENGTHS
from llmc.runtime.speculation.speculator import LOOK_SHARE

TABLE = re.compile(r"^\|(?P<head>[^\n]+)\|\n\|[-:| ]+\|\n(?P<rows>(?:\|[^\n]*\|\n)+)", re.M)
MB = 1_000_000
# What the page says in words, and the constants of the code that the numbers are.
IN_WORDS = [
    f"a step of priority is worth {ARRIVALS_PER_PRIORITY} arrivals",
    f"Blocks of {BLOCK} tokens",
    f"`sink` keeps the first {input_processor.SINK_TOKENS} tokens",
    f"in chunks of {CHUNK_WITH_ALL_LOGITS} tokens, without the prefix cache",
    f"at most {loading.PENDING_BYTES // MB} MB waiting",
    f"at most {loading.PREFIX_BYTES // MB} MB |",
    f"({', '.join(map(str, LENGTHS[:-1]))} or {LENGTHS[-1]})",
    f"than {control.MARGIN - 1:.0%}".replace("%", " %"),
    f"may lose {control.STAKE} tokens' worth of time, {control.ALLOWANCE:.1%}".replace("%", " %") + " of that of each",
    f"of an engine together {control.SHARED_STAKE:g} and",
    f"takes no more than {LOOK_SHARE:.1%}".replace("%", " %") + " of the time",
    f"more than {grammars._LONGEST['json_schema']:,} characters of schema",
    f"{grammars._LONGEST['regex']:,} of regular expression",
    f"{grammars._LONGEST['grammar']:,} of grammar or choices",
    f"more than {json_schema._MOST_SUBSCHEMAS:,} subschemas",
    f"multiply to more than {patterns.MOST_REPETITIONS:,}",
    f"whose digits are above {json_schema.LARGEST_MULTIPLE:,}",
    f"more than {trial.COMPILE_SECONDS:g} seconds to compile, or {trial._MEMORY_BYTES // 1024**3} GiB",
    f"The last {grammars._MOST_GRAMMARS} grammars",
    f"with {DECODE_STEPS_PER_CHUNK} decode steps",
    f"it needs `n` of 2 to {MOST_COMPARED}",
    f"in blocks of {BLOCK} tokens",
    f"from {PREFILL_GRAPH_FROM['int8']} rows (int8) or {PREFILL_GRAPH_FROM['int4']} (int4) on",
]


@pytest.fixture(scope="session")
def readme(root: Path) -> str:
    return (root / "runtime" / "README.md").read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows_of(text: str, first_column: str) -> list[dict[str, str]]:
    """The rows of every table whose first column has that name, by column."""
    rows = []
    for table in TABLE.finditer(text):
        head = cells(table["head"])
        if head[0] == first_column:
            rows += [dict(zip(head, cells(line), strict=True)) for line in table["rows"].splitlines()]
    return rows


def defaults_in(text: str, first_column: str) -> dict[str, Any]:
    """Name -> default of the rows of such tables; a row without a default has none.

    Names and defaults are code; a default that is no literal stays text.
    """
    found: dict[str, Any] = {}
    for row in rows_of(text, first_column):
        if first_column == "parameter" and "default" not in row:
            continue  # the languages of guided decoding
        name = row[first_column].strip("`")
        assert name not in found, f"{name} is listed twice"
        found[name] = literal(row["default"].strip("`")) if row["default"] else MISSING
    return found


def literal(code: str) -> Any:
    try:
        return ast.literal_eval(code)
    except ValueError:
        return code


def defaults_of(kind: Any) -> dict[str, Any]:
    return {
        field.name: f"{field.default_factory.__name__}()" if field.default_factory is not MISSING else field.default
        for field in fields(kind)
    }


@pytest.mark.parametrize(
    ("column", "kind"), [("parameter", SamplingParams), ("option", EngineOptions), ("field", Request)]
)
def test_tables_list_every_field_with_its_default(readme: str, column: str, kind: type):
    listed, real = defaults_in(readme, column), defaults_of(kind)
    assert listed == real
    assert {name: type(value) for name, value in listed.items() if isinstance(value, bool)} == {
        name: type(value) for name, value in real.items() if isinstance(value, bool)
    }


def parameter_tables() -> dict[str, str]:
    """The tables of parameters by their heading, from what SamplingParams states."""
    rows: dict[str, list[list[str]]] = {}
    for field in fields(SamplingParams):
        stated = PARAMETERS[field.name]
        meaning = "; ".join(filter(None, (stated.meaning, stated.range.note))) + stated.more
        cells = [f"`{field.name}`", stated.short or stated.range.short, f"`{field.default!r}`", meaning, stated.source]
        rows.setdefault(stated.section, []).append(cells)
    return {section: table(listed) for section, listed in rows.items()}


def table(rows: list[list[str]]) -> str:
    width = 5 if any(row[4] for row in rows) else 4
    lines = [["parameter", "range", "default", "meaning", "source"], ["---"] * 5, *rows]
    text = ["| " + " | ".join(line[:width]) + " |" for line in lines]
    return re.sub(r"(?<=\|) +(?=\|)", " ", "\n".join(text)).replace("| --- ", "|---").replace("--- |", "---|") + "\n"


@pytest.mark.parametrize("section", parameter_tables())
def test_tables_of_parameters_are_those_that_the_fields_state(readme: str, section: str):
    assert f"### {section}\n\n{parameter_tables()[section]}\n" in readme


def test_a_wrong_default_or_a_missing_row_would_be_seen(readme: str):
    wrong = readme.replace("| `top_k` | from 0 | `0` |", "| `top_k` | from 0 | `50` |")
    assert wrong != readme and defaults_in(wrong, "parameter") != defaults_of(SamplingParams)
    missing = re.sub(r"^\| `min_p` .*\n", "", readme, flags=re.M)
    assert missing != readme and defaults_in(missing, "parameter") != defaults_of(SamplingParams)


def test_the_steps_are_listed_in_their_order(readme: str):
    assert tuple(re.findall(r"^\d+\. `(\w+)`", readme, re.M)) == (*PROCESSORS, *CUTS)


def test_every_metric_is_listed_with_its_kind(readme: str):
    metrics = EngineMetrics()
    real = {
        family.name + "_total" * (family.type == "counter"): family.type
        for family in EngineCollector(metrics).collect()
    }
    listed = {row["Prometheus name"].strip("`"): row["kind"] for row in rows_of(readme, "Prometheus name")}
    assert {name: kind.partition(",")[0] for name, kind in listed.items()} == real


def test_every_field_of_a_snapshot_named_exists(readme: str):
    snapshot = EngineMetrics().snapshot()
    for row in rows_of(readme, "Prometheus name"):
        value: object = snapshot
        for name in row["field of the snapshot"].strip("`").split("."):
            value = getattr(value, name)


@pytest.mark.parametrize("phrase", IN_WORDS)
def test_numbers_in_words_are_those_of_the_code(readme: str, phrase: str):
    assert phrase in " ".join(readme.split())


def test_every_level_of_determinism_has_a_row(readme: str):
    section = readme.partition("## Determinism")[2]
    assert re.findall(r"^\| `(\w+)`", section.partition("\n## ")[0], re.M) == [level.value for level in Determinism]


def test_every_error_of_a_request_has_a_row(readme: str):
    raised = {row["class"].strip("`") for row in rows_of(readme, "when")}
    family = {
        name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.RequestError)
    }
    assert family <= raised
    assert all(issubclass(getattr(errors, name), errors.LlmcError) for name in raised)


def map_of(root: Path) -> dict[str, str]:
    """File of the runtime -> the first paragraph of its docstring; of the packages only the outermost counts."""
    files = [path for path in (root / "runtime").rglob("*.py") if path.name != "__init__.py"]
    files.append(root / "runtime" / "__init__.py")
    return {
        path.relative_to(root / "runtime").as_posix(): " ".join(
            (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0].split()
        )
        for path in files
    }


def test_the_map_lists_every_file_in_its_own_words(root: Path, readme: str):
    listed = {row["file"].strip("`"): row["what it is"] for row in rows_of(readme, "file")}
    assert listed == map_of(root)


def test_the_map_names_the_rooms_in_the_order_of_the_import_contract(root: Path, readme: str):
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.search(r'containers = \["llmc.runtime"\]\nlayers = \[(.*?)\n\]', project, re.S)
    text = readme.partition("below it in this list: ")[2].partition(".\n\n")[0]
    assert layers and re.findall(r"\w+", text.replace(".py", "").replace(" and ", " ")) == re.findall(r"\w+", layers[1])


def test_the_life_of_a_request_has_eight_steps_that_name_files(root: Path, readme: str):
    steps = re.findall(r"^\d\. (.+(?:\n   .+)*)", readme.partition("The life of a request")[2], re.M)[:8]
    assert len(steps) == 8
    named = {name for step in steps for name in re.findall(r"`([\w/]+\.py)`", step)}
    assert named and [name for name in named if not (root / "runtime" / name).is_file()] == []
