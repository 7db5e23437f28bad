"""Guided answers beside tool calls: their part of the grammar."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.errors import UsageError
from llmc.runtime.guided.gbnf import is_gbnf, to_lark
from llmc.runtime.guided.grammars import choice_terminal, compile_bytes, read_source
from llmc.runtime.sampling.params import GUIDES, SamplingParams
from llmc.runtime.tools.grammar import value_of

_LARK_RULE = re.compile(r"^\s*[?!]?([A-Za-z_]\w*)[^\n:]*:", re.MULTILINE)
# Rule names that the call formats use, and directives that would apply to the whole grammar.
_TAKEN = re.compile(r"calls?|(call|value|item|first|more)_\w+|other|head|plain|quoted|rest|text|anything|first|[A-Z]+")
_DIRECTIVE = re.compile(r"^\s*%(?!json\b)", re.MULTILINE)


@dataclass(frozen=True)
class Form:
    """The grammar of an answer without calls: ``text`` is the value of the request's parameter ``name``."""

    name: str
    text: str

    def check(self) -> None:
        """Compile it on its own. Raises GrammarError: it cannot be enforced."""
        compile_bytes(self.name, self.text)

    def may_begin(self, heads: Iterable[str]) -> bool:
        """True if an answer may begin with one of these texts, as far as a lexer can distinguish them."""
        if self.name == "json_schema":
            heads = [head if head.startswith("{") else head[0] for head in heads if head[0] in "{["]
        elif self.name == "grammar":
            heads = [head[0] for head in heads]
        else:
            heads = [each for head in heads for each in (head, "".join(head.split()))]
        start = compile_bytes(self.name, self.text).start() if heads else None
        return any(
            start.deep_copy().try_consume_tokens([*head.encode()]) == len(head.encode()) for head in heads if start
        )

    def rules(self) -> str:
        """The rule ``other`` and the rules it needs. Raises UsageError: they cannot be part of another grammar."""
        if self.name == "json_schema":
            return f"other: {value_of(json.loads(self.text))}"
        if self.name == "choice":
            return f"other: OTHER\nOTHER: {choice_terminal(self.text)}"
        if self.name == "regex":
            return f"other: /(?:{_LINE_OR_SLASH.sub(lambda match: _ESCAPES.get(match[0], match[0]), self.text)})/"
        if is_gbnf(self.text):
            return to_lark(self.text).replace("start:", "other:", 1)
        names = _LARK_RULE.findall(self.text)
        if (
            _DIRECTIVE.search(self.text)
            or len(re.findall(r"\bstart\b", self.text)) > 1
            or any(map(_TAKEN.fullmatch, names))
        ):
            raise UsageError(
                "grammar",
                "has directives, a rule that refers to start, or a rule with a name that the grammar of calls uses; "
                "tools cannot be combined with it",
                "leave one of them out, or set tool_choice='none'",
            )
        return re.sub(r"\bstart\b", "other", self.text)


_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
_LINE_OR_SLASH = re.compile(r"\\.|[/\n\r]", re.DOTALL)


def read_form(given: Mapping[str, Any]) -> Form | None:
    """The guide of an answer that a request's arguments ask for; None if there is none."""
    source = read_source(SamplingParams(**{name: given[name] for name in GUIDES if given.get(name) is not None}))
    return None if source is None else Form(*source[:2])
