"""The environment of chat templates: jinja's immutable sandbox with the functions that transformers provides.

Templates are programs by the checkpoint's author. The sandbox keeps them away from Python's internals;
:mod:`llmc.runtime.text.chat_template` bounds their input, and :mod:`llmc.runtime.text.trial` tries them before their
first use.
"""

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmc.runtime.text.control_tokens import STANDS

# Characters; templates in use have up to about 30,000, and each takes up to 0.1 ms to compile.
LONGEST_SOURCE = 100_000
_ESCAPED = re.compile(f"[^\x00-\x7f{STANDS}]+")  # characters to escape in ASCII JSON


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates. ``mark`` is applied to the texts in their source."""

    def __init__(self, mark: Callable[[str], str] = str) -> None:
        self._mark = mark
        extensions = [_GenerationTag, jinja2.ext.loopcontrols]
        # Not optimized: constants of any size would be computed while the template is compiled.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        }
        self.filters["tojson"] = to_json

    def from_string(self, source: Any, *args: Any, **named: Any) -> jinja2.Template:
        """Compile a template; TemplateError if it is not valid or longer than :data:`LONGEST_SOURCE`."""
        if len(source) > LONGEST_SOURCE:
            raise jinja2.TemplateError(f"it has {len(source):,} characters, at most {LONGEST_SOURCE:,} are expected")
        return super().from_string(source, *args, **named)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for data in tree.find_all(jinja2.nodes.TemplateData):
            data.data = self._mark(data.data)
        for constant in tree.find_all(jinja2.nodes.Const):
            constant.value = self._mark(constant.value) if isinstance(constant.value, str) else constant.value
        return tree


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes (unlike jinja's filter) and with the characters that stand for control tokens kept."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (the type jinja declares)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
