"""Tools that a request offers, and the model's calls of them."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.errors import UsageError, format_value
from llmc.runtime.tools.source import Reading, Source

# Anthropic's and OpenAI's rule; templates put names between quotes, brackets or spaces.
LONGEST_NAME = 128
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{LONGEST_NAME}}}")
MOST_TOOLS = 512  # compiling them takes some seconds, once, with usual schemas
CHOICES = ("auto", "none", "required")

Spell = Callable[[str], str]
"""Turns a mark into a terminal: a special token if it is one, else its text."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model makes."""

    id: str  # nine letters and digits; some templates accept nothing else
    name: str
    arguments: str  # JSON text; incomplete if the output was cut off by its length

    def to_dict(self) -> dict[str, Any]:
        """The call as an entry of ``tool_calls`` in OpenAI's messages."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call."""

    index: int  # number of the call in its output
    # in the call's first piece; None in later ones
    id: str | None
    name: str | None
    arguments: str  # the next piece of the JSON text


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str  # of letters, digits, `_`, `-` and `.`, LONGEST_NAME at most
    parameters: Mapping[str, Any] | None  # JSON schema of its arguments, an object; None if the request gives none
    strict: bool = False  # True if calls must follow the whole schema
    place: str = ""  # path of the parameters in the request, for errors

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments; a tool without one takes none."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object"} | dict(self.parameters) | {"type": "object"}


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """The tools of a request, in OpenAI's format: ``{"type": "function", "function": {"name", "parameters", ...}}``.
    Raises UsageError: wrong format, a repeated name, or more than :data:`MOST_TOOLS`."""
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple):
        raise UsageError("tools", f"is {format_value(tools)}, expected a list of functions")
    if len(tools) > MOST_TOOLS:
        raise UsageError("tools", f"holds {len(tools)} functions, expected at most {MOST_TOOLS}")
    parsed = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = Counter(tool.name for tool in parsed)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise UsageError("tools", f"holds {twice!r} twice, expected every name once")
    return parsed


def _tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise UsageError(where, f'is {format_value(tool)}, expected {{"type": "function", "function": {{...}}}}')
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = f"expected letters, digits, _, - and ., at most {LONGEST_NAME}"
        raise UsageError(where, f"has the name {format_value(name)}, {expected}")
    parameters = function.get("parameters")
    path = f"{where}.parameters" if function is tool else f"{where}.function.parameters"
    if parameters is not None and not isinstance(parameters, Mapping):
        raise UsageError(path, f"is {format_value(parameters)}, expected a JSON schema, which is a mapping")
    if parameters and parameters.get("type") not in (None, "object"):
        raise UsageError(path, f"has the type {format_value(parameters['type'])}, expected 'object'")
    if name in CHOICES:
        raise UsageError(where, f"is called {name}, a value of tool_choice ({', '.join(CHOICES)})", "rename it")
    return Tool(name, parameters, function.get("strict") is True, path)


def choose_tools(tools: Sequence[Tool], choice: str) -> tuple[Tool, ...]:
    """The tools that ``tool_choice`` allows.
    Raises UsageError: it is neither one of :data:`CHOICES` nor a tool's name, or requires tools and there are none."""
    if not isinstance(choice, str):
        raise UsageError("tool_choice", f"is {format_value(choice)}, expected {', '.join(CHOICES)} or a tool's name")
    if choice == "none" or (choice == "auto" and not tools):
        return ()
    if not tools:
        raise UsageError(
            "tool_choice", f"is {format_value(choice)}, but the request has no tools", "give some, or leave it out"
        )
    if choice in CHOICES:
        return tuple(tools)
    named = tuple(tool for tool in tools if tool.name == choice)
    if not named:
        names = ", ".join([*CHOICES, *(tool.name for tool in tools)])
        raise UsageError("tool_choice", f"is {format_value(choice)}, expected one of {names}")
    return named


class CallFormat(ABC):
    """A model's way of writing calls; in most formats a call begins with one mark, ``begin``."""

    begin: str
    frame: tuple[str, str] = ("", "")  # texts with special tokens before and after an answer without calls

    @property
    def begins(self) -> tuple[str, ...]:
        """Texts that open one call or several."""
        return (self.begin,)

    @property
    def bare_starts(self) -> tuple[str, ...]:
        """Texts that begin a call without an opening mark."""
        return ()

    @property
    @abstractmethod
    def marks(self) -> tuple[str, ...]:
        """All texts that may be special tokens."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        """The rule ``calls``, for the text after the opening mark, and the rules it needs.
        Raises GrammarError: the format cannot follow a tool's schema."""

    def bare_grammar(self) -> str:
        """A regular expression for the beginning of a call without an opening mark; no other answer begins like it."""
        return ""

    def bare_heads(self, names: Iterable[str]) -> list[str]:
        """Beginnings of calls of these tools without an opening mark."""
        return []

    def may_be_bare(self, text: str) -> bool:
        """True if the beginning ``text`` of an answer may still become calls without an opening mark."""
        return False

    @abstractmethod
    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, names with arguments, written as the model's template teaches."""

    @abstractmethod
    def read(self, source: Source, tools: Mapping[str, Tool]) -> Reading[bool]:
        """Read calls, starting at one of ``begins``; False if there is none, and then no event was yielded."""
