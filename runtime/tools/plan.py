"""A conversation's request: what the template teaches and what the client asks for, as a parser and as parameters."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmc.errors import UsageError
from llmc.runtime.guided.json_schema import schema_text, without_rules, without_unenforceable
from llmc.runtime.sampling.params import GUIDES
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.tools.calls import CallFormat, Tool, choose_tools
from llmc.runtime.tools.formats import FORMATS, format_named, format_of
from llmc.runtime.tools.grammar import answer_grammar, bare_grammar, literal, spell_run, value_of
from llmc.runtime.tools.parser import ChatParser
from llmc.runtime.tools.thinking import Thinking, ThinkingMarks, check_budget, marks_of, opens_reasoning
from llmc.runtime.tools.unmarked import UnmarkedCalls


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
        return ChatParser(self._written, tools, self.marks, self.thinking, new_id, unmarked=unmarked, whole=whole)

    @property
    def _written(self) -> CallFormat | None:
        """The format of the output, which may be one of calls where none can be called."""
        form = self.marks.form if self.marks else ""
        return self.calls or (FORMATS[form] if form else None)

    def loosen_plans(self) -> Iterator[tuple["ChatPlan", Iterable[str]]]:
        """Plans in which calls hold to less of the tools' schemas, ever less, and what each leaves out; none where the
        answer has to be a call. Strict tools keep theirs."""
        if self.required or all(tool.strict or not tool.parameters for tool in self.tools):
            return
        for loosen in (without_unenforceable, without_rules):
            left_out: dict[str, None] = {}
            tools = []
            for tool in self.tools:
                if not tool.strict and tool.parameters:
                    schema, names = loosen(tool.parameters)
                    tool = replace(tool, parameters=schema)
                    left_out |= {f"tools.{name}": None for name in names}
                tools.append(tool)
            yield replace(self, tools=tuple(tools)), left_out

    def make_sampling(self, tokenizer: Tokenizer, given: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of the request: those ``given``, and what the plan adds to them.
        Raises UsageError: they contradict one another."""
        arguments = dict(given)
        if self.calls is not None:
            if given.get("detokenize") is False:
                raise UsageError("detokenize is False, but calls are read from text; leave it out, or the tools")
            form = self._form(given)
            arguments["grammar"] = self._grammar(self.calls, tokenizer, form)
        shown = {token for mark in self._texts() for token in special_in(mark, tokenizer)}
        arguments["shown_tokens"] = tuple(sorted(shown))
        guided = any(arguments.get(name) is not None for name in GUIDES)
        if self.marks is not None and (guided or self.budget is not None):
            # The grammar of calls has what stands before an answer; else reasoning ends with it.
            end = self.marks.end if self.calls else self.marks.end + self.marks.answer
            arguments["thinking"] = Thinking(replace(self.marks, end=end), self.thinking, self.budget)
        return arguments

    def _form(self, given: Mapping[str, Any]) -> Any:
        """The schema of an answer without calls; None for any text.
        Raises UsageError: the request asks for a form that does not go with calls."""
        name = next((name for name in GUIDES if given.get(name) is not None), None)
        if name is None:
            return None
        if self.required:
            raise UsageError(f"{name} is the form of an answer, but tool_choice wants calls; leave one of them out")
        if name != "json_schema" or (self.calls is not None and self.calls.bare_starts):
            raise UsageError(
                f"{name} and tools cannot be combined here: the two would not be told apart; leave one of them out, or "
                "set tool_choice='none'"
            )
        return given[name]

    def _grammar(self, calls: CallFormat, tokenizer: Tokenizer, form: Any) -> str:

        def spell(mark: str) -> str:
            token = tokenizer.token_to_id(mark) if mark else None
            return literal(mark) if token is None or not tokenizer.is_silent(token) else f"<[{token}]>"

        rules = calls.grammar(self.tools, spell, self.parallel)
        special = [spell(mark) for mark in calls.begins if spell(mark).startswith("<[")]
        if calls.bare_starts:
            return bare_grammar(rules, special, start=calls.bare_grammar(), required=self.required)
        return answer_grammar(
            rules,
            special[:1] or [literal(calls.begins[0])],
            begin=calls.begins[0],
            special=bool(special),
            required=self.required,
            frame=tuple(spell_run(text, spell) if special_in(text, tokenizer) else "" for text in calls.frame),
            other="" if form is None else value_of(json.loads(schema_text(form, "json_schema"))),
        )

    def _texts(self) -> tuple[str, ...]:
        marks = () if self.marks is None else (self.marks.begin, self.marks.end)
        return (*marks, *(() if self._written is None else self._written.marks))


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
        tools, tool_choice, parallel, tool_format, reasoning_budget: as in :meth:`llmc.runtime.model.Model.stream_chat`.
        goes_on: the prompt ends amid an answer, which has neither reasoning nor calls before it.

    Raises:
        UsageError: an argument is out of its range, or asks for what the template does not teach.
    """
    callable_tools = choose_tools(tools, tool_choice)
    calls = _calls(template, tool_format) if callable_tools else None
    marks = marks_of(template)
    check_budget(reasoning_budget)
    if reasoning_budget is not None and marks is None:
        raise UsageError("reasoning_budget is given, but the model's chat template knows no reasoning; leave it out")
    if marks is not None and prompt.rstrip().endswith(marks.end):  # the template has left the reasoning out
        marks = None
    required = tool_choice not in ("auto", "none")
    if goes_on:
        if required or reasoning_budget is not None:
            asked = "tool_choice wants a call" if required else "reasoning_budget is given"
            raise UsageError(
                f"{asked}, but the answer has begun (continue_final_message), and that would come before it; "
                "leave one out"
            )
        marks = None
    thinking = opens_reasoning(prompt, marks)
    return ChatPlan(calls, callable_tools, required, parallel, marks, thinking, reasoning_budget, goes_on)


def _calls(template: str, name: str | None) -> CallFormat:
    name = format_of(template) if name is None else name
    if name is None:
        raise UsageError(
            "tools cannot be called: the model's chat template teaches no format of calls that is known; name one with "
            f"tool_format ({', '.join(FORMATS)}), or set tool_choice='none'"
        )
    return format_named(name)
