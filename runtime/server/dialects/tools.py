"""Tools of OpenAI's responses, as the functions that the model is offered, and calls of them as items."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, Tag

from llmc.runtime.server.dialects.openai_chat import (
    TOOL_NAME,
    Function,
    Ignore,
    TextFormat,
    check_choice,
    drop_others,
    refuse_allowed,
    refuse_forced,
)
from llmc.runtime.server.http.bodies import Body, Other, kind_among
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.tools.calls import LONGEST_NAME

Name = Annotated[str, Field(pattern=TOOL_NAME)]
# Members that say nothing to the model; all tools are shown, deferred ones too.
UNSAID = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})


class FunctionTool(Function):
    """A function that the model may call."""

    IGNORED = UNSAID
    type: Literal["function"]
    parameters: dict[str, JsonValue] | None = None


class GrammarFormat(Body):
    """The grammar of a custom tool's input: a regular expression is enforced, Lark is told to the model."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(Body):
    """A tool whose input is text."""

    IGNORED = UNSAID
    model_config = ConfigDict(extra="ignore")
    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat | None, Field(discriminator="type")] = None


InNamespace = Annotated[
    Annotated[FunctionTool, Tag(":function")] | Annotated[CustomTool, Tag(":custom")] | Annotated[Other, Tag(":other")],
    kind_among("function", "custom"),
]


class Namespace(Body):
    """Tools under a common name."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: list[InNamespace]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag(":function")]
    | Annotated[CustomTool, Tag(":custom")]
    | Annotated[Namespace, Tag(":namespace")]
    | Annotated[Other, Tag(":other")],
    kind_among("function", "custom", "namespace"),
]


Given = FunctionTool | CustomTool | Namespace | Other


class NamedTool(Body):
    """The tool that must be called, or one that may be; ``name`` may also be the one that the model writes."""

    type: Literal["function", "custom", "namespace"]
    name: str
    namespace: str | None = None


NamedOrOther = Annotated[
    Annotated[NamedTool, Tag(":function")]
    | Annotated[NamedTool, Tag(":custom")]
    | Annotated[NamedTool, Tag(":namespace")]
    | Annotated[Other, Tag(":other")],
    kind_among("function", "custom", "namespace"),
]


class AllowedTools(Body):
    """The tools that may be called, of which one must be where the mode is ``required``; others are not shown."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedOrOther], Field(min_length=1)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(":word")]
    | Annotated[NamedTool, Tag(":function")]
    | Annotated[NamedTool, Tag(":custom")]
    | Annotated[AllowedTools, Tag(":allowed_tools")]
    | Annotated[Other, Tag(":other")],
    kind_among("function", "custom", "allowed_tools"),
]


@dataclass(frozen=True)
class Offered:
    """A tool that the model is offered as a function."""

    tool: FunctionTool | CustomTool
    place: str
    namespace: Namespace | None = None
    leads: bool = False
    """It is the first one of its namespace, and tells what that is for."""

    @property
    def name(self) -> str:
        """The name that the model writes."""
        return write_name(self.tool.name, self.namespace.name if self.namespace else None)

    def name_places(self, offered: str) -> dict[str, str]:
        """The client's names of places in the function that the model is ``offered``."""
        if not self.is_custom:
            return {offered: self.place, f"{offered}.function": self.place}
        schema, form = f"{offered}.function.parameters", f"{self.place}.format"
        return {offered: self.place, schema: form, f"{schema}.properties.input.pattern": f"{form}.definition"}

    @property
    def is_custom(self) -> bool:
        return isinstance(self.tool, CustomTool)

    def plain(self, forced: bool, ignore: Ignore) -> dict[str, Any]:
        """The function. ``forced``: a call must come. Raises ApiError: its input must fit a grammar in Lark."""
        function: dict[str, Any]
        if isinstance(self.tool, CustomTool):
            function = {"name": self.name, **_function_of(self.tool, forced, ignore)}
        else:
            function = {**self.tool.plain()["function"], "name": self.name}
        about = [self.namespace.description if self.namespace and self.leads else None, function.get("description")]
        if told := "\n".join(filter(None, about)):
            function["description"] = told
        return {"type": "function", "function": function}


def write_name(name: str, namespace: str | None) -> str:
    """The name that the model writes for a tool: with its namespace, for several may have tools of one name."""
    written = name if namespace is None else f"{namespace}__{name}"
    if len(written) <= LONGEST_NAME:
        return written
    return f"{written[: LONGEST_NAME - 9]}_{hashlib.sha256(written.encode()).hexdigest()[:8]}"


def _function_of(tool: CustomTool, forced: bool, ignore: Ignore) -> dict[str, Any]:
    """A function with the custom tool's input as its only argument."""
    text: dict[str, Any] = {"type": "string"}
    about = tool.description
    if isinstance(tool.format, GrammarFormat) and tool.format.syntax == "regex":
        text["pattern"] = f"^(?:{tool.format.definition})$"
    elif isinstance(tool.format, GrammarFormat):
        if forced:
            said = f"the input of the tool {tool.name!r} must fit a grammar in Lark, which cannot be enforced in a call"
            raise ApiError(400, f"{said}; leave its format out, or let tool_choice be 'auto'", param="tools")
        ignore(f"tools.{tool.name}.format")
        about = "\n".join(filter(None, [about, "Its input fits this grammar:", tool.format.definition]))
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return {"description": about or "", "parameters": schema}


class Toolbox:
    """The tools of a request that the service can offer; others are left out, and named as ignored.

    Args:
        lists: lists of tools by their places in the request.
        choice: of the request; it may allow some of the tools, or force one.
        ignore: takes the names of those that are left out.

    Attributes:
        kept: tools of the request that are offered, as it gives them.
        offered: those that may be called, by the names that the model writes.
        choice: an argument of :meth:`llmc.runtime.Model.stream_chat`.

    Raises:
        ApiError: the choice forces a call of a tool that is not there, or that cannot be offered.
    """

    def __init__(self, lists: Mapping[str, Sequence[Given]], choice: Any, ignore: Ignore) -> None:
        self._ignore = ignore
        self.kept = [tool for tools in lists.values() for tool in tools if not isinstance(tool, Other)]
        found = [each for where, tools in lists.items() for each in self._flatten(where, tools)]
        if isinstance(choice, Other):
            raise refuse_forced(choice)
        if isinstance(choice, AllowedTools):
            found = self._pick_allowed(found, choice.tools)
            choice = choice.mode
        self.offered: dict[str, Offered] = {}
        for each in found:
            if self.offered.setdefault(each.name, each).tool != each.tool:
                raise ApiError(400, f"tools holds {each.name!r} twice, expected every name once", param="tools")
        self.choice = check_choice(self._write_choice(choice), found)

    def _flatten(self, where: str, tools: Sequence[Given]) -> Iterator[Offered]:
        known: dict[str, FunctionTool | CustomTool | Namespace] = drop_others(self._ignore, "tools", tools, where)
        for place, tool in known.items():
            if isinstance(tool, Namespace):
                inside: dict[str, FunctionTool | CustomTool] = drop_others(
                    self._ignore, f"tools.{tool.name}", tool.tools, f"{place}.tools"
                )
                for number, (own, each) in enumerate(inside.items()):
                    yield Offered(each, own, tool, leads=number == 0)
            else:
                yield Offered(tool, place)

    def _pick_allowed(self, offered: Sequence[Offered], allowed: Sequence[NamedTool | Other]) -> list[Offered]:
        names: set[str] = set()
        for each in drop_others(self._ignore, "tool_choice.tools", allowed).values():
            if not (found := _find_named(offered, each)):
                raise refuse_allowed("tool_choice.tools", each.name)
            names.update(one.name for one in found)
        return [each for each in offered if each.name in names]

    def _write_choice(self, choice: str | NamedTool | None) -> str:
        if not isinstance(choice, NamedTool):
            return choice or "auto"
        found = _find_named(list(self.offered.values()), choice)
        if len(found) > 1:
            said = f"tool_choice is {choice.name[:64]!r}, which is in several namespaces; give one of the names"
            raise ApiError(400, f"{said} {', '.join(each.name for each in found)}", param="tool_choice")
        return found[0].name if found else choice.name

    def plain(self) -> list[dict[str, Any]] | None:
        """The functions that the model is offered. Raises ApiError: a call of one must fit what cannot be enforced."""
        forced = self.choice not in ("auto", "none")
        return [
            each.plain(forced and self.choice in ("required", name), self._ignore)
            for name, each in self.offered.items()
        ] or None

    @property
    def names(self) -> dict[str, str]:
        """The client's names of places in the functions that the model is offered."""
        places = [each.name_places(f"tools[{at}]") for at, each in enumerate(self.offered.values())]
        return {ours: own for named in places for ours, own in named.items()}

    def begin_call(self, name: str) -> dict[str, Any]:
        """Members of the item of a call that tell its tool."""
        each = self.offered.get(name)
        if each is None:
            return {"type": "function_call", "name": name}
        kind = "custom_tool_call" if each.is_custom else "function_call"
        own = {"namespace": each.namespace.name} if each.namespace else {}
        return {"type": kind, "name": each.tool.name, **own}


def _find_named(offered: Sequence[Offered], named: NamedTool) -> list[Offered]:
    """The tools that a choice names: by the name that the model writes, else by the client's."""
    if named.type == "namespace":
        return [each for each in offered if each.namespace and each.namespace.name == named.name]
    written = [each for each in offered if each.name == write_name(named.name, named.namespace)]
    inside = [each for each in offered if named.namespace is None and each.tool.name == named.name]
    return written or inside


def read_input(arguments: str) -> str:
    """The input of a custom tool from the arguments that the model wrote, of which the end may be missing."""
    for end in ("", '"}', '\\"}'):
        try:
            found = json.loads(arguments + end)
        except ValueError:
            continue
        return str(found.get("input", "")) if isinstance(found, dict) else ""
    return ""
