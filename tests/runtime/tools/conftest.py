"""A parser of any format, and a vocabulary in which marks may be special tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from doubles.hearing import Heard, merged

from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.tools.calls import read_tools
from llmc.runtime.tools.formats import FORMATS
from llmc.runtime.tools.gemma_calls import GemmaCalls
from llmc.runtime.tools.plan import ChatPlan
from llmc.runtime.tools.thinking import MARKS, ThinkingMarks

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["celsius", "kelvin"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Says ::= rain", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="session")
def tools() -> list[dict[str, Any]]:
    return TOOLS


@pytest.fixture(scope="session")
def unwritable() -> dict[str, str]:
    """Texts that a format cannot write, for it has no quotes."""
    quotes = {form: each.quote for form, each in FORMATS.items() if isinstance(each, GemmaCalls)}
    return {"qwen3_coder": "</parameter>", "seed_oss": "</parameter>", **quotes}


@pytest.fixture(scope="session")
def hear() -> Callable[..., Heard]:
    """Reads an output, whole or in pieces."""

    def read(
        pieces: str | Sequence[str],
        form: str | None = "hermes",
        thinking: bool = False,
        cut: bool = False,
        marks: ThinkingMarks = MARKS[0],
        tools: Sequence[Any] = TOOLS,
        parallel: bool = True,
        **options: Any,
    ) -> Heard:
        plan = ChatPlan(FORMATS.get(form or ""), read_tools(tools), False, parallel, marks, thinking)
        parser = plan.parser(str, **options)
        pieces = [pieces] if isinstance(pieces, str) else pieces
        return merged([*map(parser.push, pieces), parser.finish(cut)])

    return read


@pytest.fixture(scope="session")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_checkpoint)
