"""A conversation's request: what the template teaches and what the client asks for, as a parser and as parameters."""

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

_LONGEST_KEPT = 8 * 1024  # characters of a tool's schema, of which it is remembered whether it can be enforced


@dataclass(frozen=True)
class ChatPlan:
    """The ways in which an answer is read and bound.

    Args:
        calls: the format of calls; None reads none.
        tools: those that may be called.
        required: the answer is calls and nothing else.
        parallel: it may be several.
        marks: what encloses reasoning; None reads none.
        thinking: the prompt ends inside the reasoning.
        budget: tokens of reasoning; None does not bound them.
        goes_on: the prompt ends amid the answer.
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
        """The reader of an answer.

        Args:
            shaped: an answer without calls has a form, which may look like a call without marks.
            whole: something else than its end or length may end the answer amid a call.
        """
        tools = {tool.name: tool for tool in self.tools}
        unmarked = UnmarkedCalls(tools, self.parallel) if tools and not (self.goes_on or shaped) else None
        return ChatParser(
            self._written, tools, self.marks, self.thinking, new_id, shaped=shaped, unmarked=unmarked, whole=whole
        )

    @property
    def _written(self) -> CallFormat | None:
        """The format of the output, which may be one of calls where none can be called."""
        form = self.marks.form if self.marks else ""
        return self.calls or (FORMATS[form] if form else None)

    def loosen_plans(
        self, error: GrammarError, given: Mapping[str, Any], *, allowed: bool
    ) -> Iterator[tuple["ChatPlan", list[str]]]:
        """Plans in which calls hold to less of the tools' schemas, with the places of what each leaves out: first of
        the tools whose schema cannot be enforced, then of all.

        Args:
            error: what is wrong with the grammar of this plan.
            given: the parameters of the request.
            allowed: schemas may be loosened, of tools that are not strict and that the model need not call.

        Raises:
            GrammarError: the form or a tool's schema cannot be enforced, or all together are too much.
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
        return replace(self, tools=tools), [place for several in places for place in several]

    def make_sampling(self, tokenizer: Tokenizer, given: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of the request: those ``given``, and what the plan adds to them.
        Raises UsageError: they contradict one another."""
        arguments = dict(given)
        if self.calls is not None:
            if given.get("detokenize") is False:
                raise UsageError("detokenize", "is False, but calls are read from text", "leave it out, or the tools")
            form = self._form(self.calls, given)
            arguments = {name: value for name, value in given.items() if name not in GUIDES}
            arguments["grammar"] = self._grammar(self.calls, tokenizer, form)
        shown = {token for mark in self._texts() for token in special_in(mark, tokenizer)}
        arguments["shown_tokens"] = tuple(sorted(shown))
        guided = any(arguments.get(name) is not None for name in GUIDES)
        if self.marks is not None and (guided or self.budget is not None):
            # The grammar of calls has what stands before an answer; else reasoning ends with it.
            end = self.marks.end if self.calls else self.marks.end + self.marks.answer
            arguments["thinking"] = Thinking(replace(self.marks, end=end), self.thinking, self.budget)
        return arguments

    def _form(self, calls: CallFormat, given: Mapping[str, Any]) -> Form | None:
        """The form of an answer without calls; None for any text, and where there is no such answer.
        Raises UsageError: an answer in that form may begin like a call, or its grammar is no part of another one."""
        form = None if self.required else read_form(given)
        if form is None:
            return None
        heads = [*calls.begins, *calls.bare_heads(tool.name for tool in self.tools)]
        if form.may_begin(heads):
            raise UsageError(
                form.name,
                "is given beside tools, and an answer in that form may begin like a call",
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
    """A tool with as much of its schema as can be enforced, and the places of the rest.
    Raises GrammarError: all of it has to be enforced and cannot, or it is no schema."""
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
    """:func:`without_rules`, and without parameters whose names formats without quotes cannot write."""
    found, places = without_rules(schema)
    kept: dict[str, Any] = {name: {} for name in found["properties"] if NAME.fullmatch(name)}
    return {**found, "properties": kept, "required": [name for name in found["required"] if name in kept]}, places


def _check_call(calls: CallFormat, tool: Tool) -> tuple[str, str] | None:
    """The reason why a call of the tool cannot be enforced, and what to do; None if it can."""
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
    """A tool with the names of its parameters alone, and the place of its schema; a strict one as it is."""
    if tool.strict or not tool.parameters:
        return tool, []
    return replace(tool, parameters=without_rules(tool.parameters)[0]), [tool.place]


def special_in(mark: str, tokenizer: Tokenizer) -> list[int]:
    """The special tokens that a mark is made of; most marks are one or none."""
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
    """The plan of a conversation.

    Args:
        template: source of the chat template.
        prompt: what it wrote.
        tools, tool_choice, parallel, tool_format, reasoning_budget: as in :meth:`llmc.runtime.Generator.stream_chat`.
        goes_on: the prompt ends amid an answer, which has neither reasoning nor calls before it.

    Raises:
        UsageError: an argument is out of its range, or asks for what the template does not teach.
    """
    callable_tools = choose_tools(tools, tool_choice)
    calls = _calls(template, tool_format) if callable_tools else None
    marks = marks_of(template)
    check_budget(reasoning_budget)
    if reasoning_budget is not None and marks is None:
        raise UsageError(
            "reasoning_budget", "is given, but the model's chat template knows no reasoning", "leave it out"
        )
    if marks is not None and prompt.rstrip().endswith(marks.end):  # the template has left the reasoning out
        marks = None
    required = tool_choice not in ("auto", "none")
    if goes_on:
        if required or reasoning_budget is not None:
            asked = "tool_choice" if required else "reasoning_budget"
            raise UsageError(
                asked,
                "asks for something before the answer, which has begun (continue_final_message)",
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
            "cannot be called: the model's chat template teaches no format of calls that is known",
            f"name one with tool_format ({', '.join(FORMATS)}), or set tool_choice='none'",
        )
    return format_named(name)
