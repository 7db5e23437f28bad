"""The plan of a chat request: how to parse its answer, and which sampling parameters it needs."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from llmc.errors import GrammarError, UsageError
from llmc.runtime.guided.grammars import compile_bytes
from llmc.runtime.guided.json_schema import without_rules, without_unenforceable
from llmc.runtime.sampling.params import GUIDES
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.tools.calls import CallFormat, Tool, choose_tools
from llmc.runtime.tools.formats import FORMATS, format_named, format_of
from llmc.runtime.tools.forms import Form, read_form
from llmc.runtime.tools.grammar import NAME, answer_grammar, bare_grammar, literal, spell_run
from llmc.runtime.tools.json_calls import JsonCalls
from llmc.runtime.tools.parser import ChatParser
from llmc.runtime.tools.thinking import Thinking, ThinkingMarks, check_budget, marks_of, opens_reasoning
from llmc.runtime.tools.unmarked import UnmarkedCalls

_LONGEST_KEPT = 8 * 1024  # characters of a tool's schema whose check is cached


@dataclass(frozen=True)
class ChatPlan:
    """The way an answer is read and constrained.

    Args:
        calls: the format of calls; None reads none.
        tools: the tools that may be called.
        required: True if the answer must be calls only.
        parallel: True if several calls are allowed.
        marks: the marks around reasoning; None reads none.
        thinking: True if the prompt ends inside the reasoning.
        budget: most tokens of reasoning; None does not bound them.
        goes_on: True if the prompt ends inside the answer.
    """

    calls: CallFormat | None
    tools: tuple[Tool, ...]
    required: bool
    parallel: bool
    marks: ThinkingMarks | None
    thinking: bool
    budget: int | None = None
    goes_on: bool = False

    def parser(self, new_id: Callable[[int], str], *, shaped: bool = False, whole: bool = False) -> ChatParser:
        """The parser of an answer.

        Args:
            shaped: True if an answer without calls is guided and may look like a call without marks.
            whole: True if the answer may end inside a call for other reasons than its end or length.
        """
        tools = {tool.name: tool for tool in self.tools}
        unmarked = UnmarkedCalls(tools, self.parallel) if tools and not (self.goes_on or shaped) else None
        return ChatParser(
            self._written, tools, self.marks, self.thinking, new_id, shaped=shaped, unmarked=unmarked, whole=whole
        )

    @property
    def _written(self) -> CallFormat | None:
        """The call format of the output; the model may use it even if no tool can be called."""
        form = self.marks.form if self.marks else ""
        return self.calls or (FORMATS[form] if form else None)

    def loosen_plans(
        self, error: GrammarError, given: Mapping[str, Any], *, allowed: bool
    ) -> Iterator[tuple["ChatPlan", list[str]]]:
        """Plans in which calls follow less of the tools' schemas, with the paths of the parts left out: first only the
        tools whose schema cannot be enforced, then all.

        Args:
            error: the error of this plan's grammar.
            given: the parameters of the request.
            allowed: True if schemas may be loosened, for tools that are neither strict nor required.

        Raises:
            GrammarError: the answer's guide or a tool's schema cannot be enforced, or all together are too complex.
        """
        if self.calls is None:
            raise error
        form = self._form(self.calls, given)
        if form is not None:
            form.check()
        may_loosen = allowed and not self.required
        yield self._replace_tools(_loosen_tool(self.calls, tool, may_loosen) for tool in self.tools)
        if may_loosen:
            yield self._replace_tools(_drop_rules(tool) for tool in self.tools)
        raise GrammarError("tools", f"need a grammar of calls that {error.problem}", error.advice) from error

    def _replace_tools(self, loosened: Iterable[tuple[Tool, list[str]]]) -> tuple["ChatPlan", list[str]]:
        tools, places = zip(*loosened, strict=True)
        return replace(self, tools=tools), [place for paths in places for place in paths]

    def make_sampling(self, tokenizer: Tokenizer, given: Mapping[str, Any]) -> dict[str, Any]:
        """The request's sampling parameters: ``given``, and those that the plan adds.
        Raises UsageError: they contradict one another."""
        arguments = dict(given)
        if self.calls is not None:
            if given.get("detokenize") is False:
                raise UsageError(
                    "detokenize", "is False, but calls are read from text", "leave it out, or leave out the tools"
                )
            form = self._form(self.calls, given)
            arguments = {name: value for name, value in given.items() if name not in GUIDES}
            arguments["grammar"] = self._grammar(self.calls, tokenizer, form)
        shown = {token for mark in self._texts() for token in special_in(mark, tokenizer)}
        arguments["shown_tokens"] = tuple(sorted(shown))
        guided = any(arguments.get(name) is not None for name in GUIDES)
        if self.marks is not None and (guided or self.budget is not None):
            # The grammar of calls includes the marks before an answer; otherwise reasoning ends with them.
            end = self.marks.end if self.calls else self.marks.end + self.marks.answer
            arguments["thinking"] = Thinking(replace(self.marks, end=end), self.thinking, self.budget)
        return arguments

    def _form(self, calls: CallFormat, given: Mapping[str, Any]) -> Form | None:
        """The guide of an answer without calls; None if it is free or calls are required.
        Raises UsageError: such an answer may begin like a call, or its grammar cannot be part of another one."""
        form = None if self.required else read_form(given)
        if form is None:
            return None
        heads = [*calls.begins, *calls.bare_heads(tool.name for tool in self.tools)]
        if form.may_begin(heads):
            raise UsageError(
                form.name,
                "is given beside tools, and an answer that follows it may begin like a call",
                "leave one of them out, or set tool_choice='none'",
            )
        return form

    def _grammar(self, calls: CallFormat, tokenizer: Tokenizer, form: Form | None) -> str:

        def spell(mark: str) -> str:
            token = tokenizer.token_to_id(mark) if mark else None
            return literal(mark) if token is None or not tokenizer.is_silent(token) else f"<[{token}]>"

        other = "" if form is None else form.rules()
        if form is not None and form.name == "json_schema" and isinstance(calls, JsonCalls) and calls.bare:
            rules = calls.beside_json(self.tools)
        else:
            rules = calls.grammar(self.tools, spell, self.parallel)
        special = [spell(mark) for mark in calls.begins if spell(mark).startswith("<[")]
        if calls.bare_starts:
            return bare_grammar(rules, special, start=calls.bare_grammar(), required=self.required, other=other)
        return answer_grammar(
            rules,
            special[:1] or [literal(calls.begins[0])],
            begin=calls.begins[0],
            special=bool(special),
            required=self.required,
            frame=tuple(spell_run(text, spell) if special_in(text, tokenizer) else "" for text in calls.frame),
            other=other,
        )

    def _texts(self) -> tuple[str, ...]:
        marks = () if self.marks is None else (self.marks.begin, self.marks.end)
        return (*marks, *(() if self._written is None else self._written.marks))


def _loosen_tool(calls: CallFormat, tool: Tool, allowed: bool) -> tuple[Tool, list[str]]:
    """A tool with the enforceable part of its schema, and the paths of the rest.
    Raises GrammarError: the whole schema is required but not enforceable, or it is not a schema."""
    refused = _check_call(calls, tool)
    if refused is None:
        return tool, []
    if allowed and not tool.strict and tool.parameters:
        for loosen in (without_unenforceable, without_rules, _without_odd_names):
            with suppress(GrammarError):
                schema, places = loosen(tool.parameters)
                looser = replace(tool, parameters=schema)
                if _check_call(calls, looser) is None:
                    return looser, [f"{tool.place}.{place}".rstrip(".") for place in places]
    raise GrammarError(tool.place, *refused)


def _without_odd_names(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """:func:`without_rules`, also without parameters whose names a format without quotes cannot write."""
    shape, places = without_rules(schema)
    kept: dict[str, Any] = {name: {} for name in shape["properties"] if NAME.fullmatch(name)}
    return {**shape, "properties": kept, "required": [name for name in shape["required"] if name in kept]}, places


def _check_call(calls: CallFormat, tool: Tool) -> tuple[str, str] | None:
    """The reason a call of the tool cannot be enforced, and the advice; None if it can."""
    text = json.dumps(tool.parameters)
    return (_refuse_call if len(text) <= _LONGEST_KEPT else _refuse_call.__wrapped__)(calls, tool.name, text)


@lru_cache(1024)  # an agent sends the same tools with every turn
def _refuse_call(calls: CallFormat, name: str, parameters: str) -> tuple[str, str] | None:
    try:
        compile_bytes(
            "grammar", f"start: calls\n{calls.grammar((Tool(name, json.loads(parameters)),), literal, False)}"
        )
    except GrammarError as error:
        return error.problem, error.advice
    return None


def _drop_rules(tool: Tool) -> tuple[Tool, list[str]]:
    """A tool with only the names of its parameters, and the path of its schema; a strict tool unchanged."""
    if tool.strict or not tool.parameters:
        return tool, []
    return replace(tool, parameters=without_rules(tool.parameters)[0]), [tool.place]


def special_in(mark: str, tokenizer: Tokenizer) -> list[int]:
    """The special tokens in a mark; most marks have one or none."""
    tokens = [token for token in tokenizer.encode(mark, add_special_tokens=False) if tokenizer.is_silent(token)]
    return [token for token in tokens if tokenizer.decode([token], skip_special_tokens=False) in mark]


def plan_chat(
    template: str,
    prompt: str,
    tools: Sequence[Tool],
    tool_choice: str,
    *,
    parallel: bool,
    tool_format: str | None,
    reasoning_budget: int | None,
    goes_on: bool = False,
) -> ChatPlan:
    """Plan the chat request.

    Args:
        template: source of the chat template.
        prompt: the text that the template wrote.
        tools, tool_choice, parallel, tool_format, reasoning_budget: as in :meth:`llmc.runtime.Generator.stream_chat`.
        goes_on: True if the prompt ends inside an answer, which then has neither reasoning nor calls before it.

    Raises:
        UsageError: an argument is out of its range, or needs something that the template does not teach.
    """
    callable_tools = choose_tools(tools, tool_choice)
    calls = _calls(template, tool_format) if callable_tools else None
    marks = marks_of(template)
    check_budget(reasoning_budget)
    if reasoning_budget is not None and marks is None:
        raise UsageError("reasoning_budget", "is given, but the model's chat template has no reasoning", "leave it out")
    if marks is not None and prompt.rstrip().endswith(marks.end):  # the template has already ended the reasoning
        marks = None
    required = tool_choice not in ("auto", "none")
    if goes_on:
        if required or reasoning_budget is not None:
            parameter = "tool_choice" if required else "reasoning_budget"
            raise UsageError(
                parameter,
                "asks for text before the answer, which has already begun (continue_final_message)",
                "leave one of them out",
            )
        marks = None
    thinking = opens_reasoning(prompt, marks)
    return ChatPlan(calls, callable_tools, required, parallel, marks, thinking, reasoning_budget, goes_on)


def _calls(template: str, name: str | None) -> CallFormat:
    name = format_of(template) if name is None else name
    if name is None:
        raise UsageError(
            "tools",
            "cannot be called: the model's chat template teaches no known format of calls",
            f"name one with tool_format ({', '.join(FORMATS)}), or set tool_choice='none'",
        )
    return format_named(name)
