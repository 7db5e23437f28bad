"""Anthropic's messages: blocks of text, thoughts and tools in and out, and a count of their tokens."""

import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Header, Request, Response
from pydantic import BeforeValidator, Field, JsonValue, Tag, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from llmc.errors import ContextError, RequestError
from llmc.runtime import Model
from llmc.runtime.api.chat import ChatHandle, ChatResult, Message, MessageDelta, ToolCall
from llmc.runtime.server.dialects.openai_chat import (
    Function,
    add_variables,
    check_choice,
    count_thoughts,
    drop_others,
    effort_budget,
    refuse_forced,
)
from llmc.runtime.server.http.bodies import Asked, Body, Lenient, Logged, Other, Sampled, ToolFormat, ignore, kind_among
from llmc.runtime.server.http.call import Called
from llmc.runtime.server.http.errors import ANTHROPIC_ERRORS, ApiError, rename_place
from llmc.runtime.server.http.images import decode_base64, make_content
from llmc.runtime.server.http.streams import EventStream, event, guard_pieces
from llmc.runtime.server.http.validation import take_body
from llmc.runtime.server.models.service import Served, new_id, plain_id
from llmc.runtime.server.turn import Turn
from llmc.runtime.text.chat_template import ChatTemplate

# This dialect's names of llmc's parameters.
NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "json_schema": "output_config.format.schema",
    "reasoning": "thinking",
    "reasoning_budget": "thinking.budget_tokens",
}
PING = event({"type": "ping"}, "ping")
NO_ENDING = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details", "container"))  # of what goes on
FAILED = "Error: "  # before the result of a tool that failed, for templates have no other place to say so


async def check_version(
    anthropic_version: Annotated[Literal["2023-06-01", "2026-10-21"], Header(description="version of the API")],
) -> None:
    """The header that the API requires. Versions before these stream in another way, and are refused; the later one has
    no sampling parameters, which are extensions there."""


router = APIRouter(tags=["Anthropic"], dependencies=[Depends(check_version)], responses=ANTHROPIC_ERRORS)


# ------------------------------------------------------------------------------------------------------------ request


# Prefixes are cached without marks of what may be, and leave when memory needs their place.
CACHED = frozenset({"cache_control"})
# Types of the blocks of Anthropic's own tools, and of blocks that only its servers can read.
FOREIGN = re.compile(
    r"\w+_tool_result|(server|mcp)_tool_use|mcp_tool_listing|tool_(addition|removal)|browser_state"
    r"|container_upload|fallback|redacted_thinking|connector_text"
)
FILES = ("base64", "url", "file")  # sources of documents that the service cannot read
BILLING = "x-anthropic-billing-header:"  # begins a block of Claude Code's that the model is not to read
EFFORT = "output_config.effort"
# The words of chat templates for it.
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def _leave_out_foreign(blocks: Any, info: ValidationInfo) -> Any:
    """Leave out and name the blocks that are for Anthropic's servers."""
    if not isinstance(blocks, list):
        return blocks
    kept = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        source = block.get("source") if kind == "document" else None
        is_file = isinstance(source, Mapping) and source.get("type") in FILES
        if is_file or (isinstance(kind, str) and FOREIGN.fullmatch(kind)):
            ignore(info, f"messages.content.{kind}")
        else:
            kept.append(block)
    return kept


def _refuse_none(blocks: Any) -> Any:
    """Refuse an empty list, before blocks are left out."""
    if blocks == []:
        raise PydanticCustomError("too_short", "too short", {"min_length": 1, "actual_length": 0})
    return blocks


KnownBlocks = BeforeValidator(_leave_out_foreign)
SomeBlocks = BeforeValidator(_refuse_none)


class TextBlock(Body):
    IGNORED = CACHED | {"citations"}
    type: Literal["text"]
    text: str

    def pieces(self) -> Iterator[str | bytes]:
        """The texts and images that the model reads."""
        yield self.text


class ImageData(Body):
    """An image itself; addresses and files are refused, for nothing is fetched."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/webp"]
    data: str


class ImageBlock(Body):
    """An image, for models that see."""

    IGNORED = CACHED | {"transformations"}
    type: Literal["image"]
    source: ImageData

    def pieces(self) -> Iterator[str | bytes]:
        yield decode_base64(self.source.data, "messages.content.source.data")


class PlainSource(Body):
    type: Literal["text"]
    media_type: Literal["text/plain"] | None = None
    data: str

    def pieces(self) -> Iterator[str | bytes]:
        yield self.data


class BlockSource(Body):
    type: Literal["content"]
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]]

    def pieces(self) -> Iterator[str | bytes]:
        return pieces_of(self.content)


class DocumentBlock(Body):
    """A document whose text is in the request; PDFs and files are left out."""

    IGNORED = CACHED | {"citations"}
    type: Literal["document"]
    title: str | None = None
    context: str | None = None
    source: Annotated[PlainSource | BlockSource, Field(discriminator="type")]

    def pieces(self) -> Iterator[str | bytes]:
        yield from filter(None, (self.title, self.context))
        yield from self.source.pieces()


class SearchResultBlock(Body):
    IGNORED = CACHED | {"citations"}
    type: Literal["search_result"]
    title: str
    source: str
    content: list[TextBlock]

    def pieces(self) -> Iterator[str | bytes]:
        yield from (self.title, self.source, *(block.text for block in self.content))


class ToolReferenceBlock(Body):
    """A tool that a search of the client's found; all tools are shown to the model from the start."""

    IGNORED = CACHED
    type: Literal["tool_reference"]
    tool_name: str

    def pieces(self) -> Iterator[str | bytes]:
        yield self.tool_name


class ThinkingBlock(Body):
    """Thoughts of an earlier answer. Nobody checks the signature, which this server leaves empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class CompactionBlock(Body):
    """The summary that stands for earlier messages."""

    IGNORED = CACHED | {"encrypted_content", "signature", "tool_changes"}
    type: Literal["compaction"]
    content: str = ""


class ToolUseBlock(Body):
    IGNORED = CACHED | {"toolset_name"}
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]
    caller: dict[str, JsonValue] | None = None

    def plain(self) -> dict[str, Any]:
        return ToolCall(plain_id(self.id), self.name, json.dumps(self.input, ensure_ascii=False)).to_dict()


Shown = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock
ResultBlock = Annotated[Shown | ToolReferenceBlock, Field(discriminator="type")]


class ToolResultBlock(Body):
    IGNORED = CACHED | {"toolset_name"}
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultBlock], KnownBlocks] | None = None
    is_error: bool | None = None

    def plain(self) -> dict[str, Any]:
        content = make_content(pieces_of(self.content or ""), "\n")
        if self.is_error:
            content = FAILED + content if isinstance(content, str) else [{"type": "text", "text": FAILED}, *content]
        return {"role": "tool", "tool_call_id": plain_id(self.tool_use_id), "content": content}


B = TypeVar("B", bound=Body)
UserBlock = Annotated[Shown | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | CompactionBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(Body):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], KnownBlocks, SomeBlocks]

    def plain(self) -> Iterator[dict[str, Any]]:
        for block in blocks_in(self.content):
            if isinstance(block, ToolResultBlock):
                yield block.plain()
            else:
                yield from ({"role": "user", "content": piece} for piece in block.pieces())


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], KnownBlocks]

    def plain(self) -> Iterator[dict[str, Any]]:
        blocks = blocks_in(self.content)
        if not blocks:
            return
        texts = [block.text for block in blocks if isinstance(block, TextBlock)]
        texts = [block.content for block in blocks if isinstance(block, CompactionBlock)] + texts
        found: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if thoughts := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
            found["reasoning_content"] = thoughts
        if calls := [block.plain() for block in blocks if isinstance(block, ToolUseBlock)]:
            found["tool_calls"] = calls
        yield found


class SystemMessage(Body):
    """A system message, also in the middle of a conversation; ``clear_at`` says how long the model sees it."""

    IGNORED = frozenset({"output_config"})
    role: Literal["system"]
    content: str | Annotated[list[TextBlock], KnownBlocks, SomeBlocks] = ""
    clear_at: Literal["next_user_message", "never"] | None = None

    def plain(self) -> Iterator[dict[str, Any]]:
        if text := text_of(self.content):
            yield {"role": "system", "content": text}


AnyMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(Function):
    """A tool of the client. All are shown to the model at once, also those that it is to find first."""

    IGNORED = CACHED | {"allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"}
    type: Literal["custom"] | None = None
    parameters: Annotated[dict[str, JsonValue], Field(alias="input_schema")]


# Other types are tools of Anthropic's own, which its servers run or its models are trained on.
AnyTool = Annotated[Annotated[Tool, Tag(":custom")] | Annotated[Other, Tag(":other")], kind_among("custom")]


class AutoChoice(Body):
    """The model decides whether it calls a tool (auto), must call one (any), or calls none."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


Display = Annotated[
    Literal["summarized", "omitted", "updates"] | None,
    Field(description="omitted leaves thoughts empty; else they are given whole, not summed up"),
]


class ThinkingOn(Body):
    """Thoughts, of so many tokens at most."""

    IGNORED = frozenset({"block_binding"})
    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=0)]
    display: Display = None


class ThinkingOther(Body):
    """Thoughts as the model likes, or none."""

    IGNORED = frozenset({"block_binding"})
    type: Literal["adaptive", "between_tools", "disabled"]
    display: Display = None


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]


class OutputConfig(Body):
    IGNORED = frozenset({"task_budget"})
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(Lenient):
    user_id: Logged = None


class Prompted(Asked):
    """The members that make the prompt."""

    IGNORED = (
        CACHED
        | {"anthropic_beta", "anthropic_version", "betas", "billing_policy", "container", "context_management"}
        | {"diagnostics", "fallback_credit_token", "fallbacks", "inference_geo", "mcp_servers", "service_tier", "speed"}
        | {"user_profile_id", "workspace_id"}
    )
    model: str
    messages: Annotated[list[AnyMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Annotated[AutoChoice | NamedChoice | None, Field(discriminator="type")] = None
    thinking: Annotated[ThinkingOn | ThinkingOther | None, Field(discriminator="type")] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[JsonFormat | None, Field(description="older place of output_config.format")] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_thread(cls, given: Any) -> Any:
        """Raises ApiError: a thread is asked for."""
        if isinstance(given, Mapping) and given.get("thread") is not None:
            reason = "thread asks the server to keep the conversation, which it does not; send all messages"
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            raise ApiError(400, reason, param="thread", details=details)
        return given

    @cached_property
    def tools_offered(self) -> dict[str, Tool]:
        """The tools that the model is offered, by their places."""
        return drop_others(self.ignore, "tools", self.tools or ())

    @property
    def is_prefilled(self) -> bool:
        """True if the last message is the assistant's, of which the answer is the rest."""
        return isinstance(self.messages[-1], AssistantMessage)

    def plain(self, *, late_system: bool = True) -> list[dict[str, Any]]:
        """The conversation as chat templates read it; messages of a role that follow each other are one turn.
        ``late_system``: False makes system messages in the middle the user's.
        Raises ApiError: the last message is the assistant's, and cannot be gone on with."""
        last = blocks_in(self.messages[-1].content)[-1:]
        if self.is_prefilled and not any(isinstance(block, TextBlock) for block in last):
            place = f"messages[{len(self.messages) - 1}]"
            reason = f"{place} is the assistant's and ends with no text; expected text for the answer to go on with"
            raise ApiError(400, reason, param=place)
        system = [block for block in blocks_in(self.system or "") if not block.text.startswith(BILLING)]
        messages = [{"role": "system", "content": text}] if (text := text_of(system)) else []
        first = next((at for at, each in enumerate(self.messages) if not isinstance(each, SystemMessage)), 0)
        latest = max((at for at, each in enumerate(self.messages) if isinstance(each, UserMessage)), default=0)
        for at, message in enumerate(self.messages):
            if not (isinstance(message, SystemMessage) and message.clear_at == "next_user_message" and at < latest):
                late = at > first and not late_system and isinstance(message, SystemMessage)
                messages += ({**each, "role": "user"} if late else each for each in message.plain())
        return _merge_turns(messages)

    def fit(self, turns: list[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
        """The ``turns`` of :meth:`plain`, without system messages in the middle where the template shows none there."""
        if all(turn["role"] != "system" for turn in turns[1:]) or shows_late_system(template):
            return turns
        self.ignore("messages.role.system")
        return self.plain(late_system=False)

    def make_arguments(self, model: Model) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.chat_tokens` beside the messages."""
        return {
            "tools": [tool.plain() for tool in self.tools_offered.values()] or None,
            "chat_template_kwargs": self._variables(model),
            "continue_final_message": self.is_prefilled,
        }

    def _variables(self, model: Model) -> dict[str, Any] | None:
        """Variables of the chat template for ``thinking`` and ``effort``, where it reads them."""
        known, variables = model.chat_template.variables(bool(self.tools_offered)), {}
        thinks = self.thinking is None or self.thinking.type != "disabled"
        if self.thinking and "enable_thinking" in known:
            variables["enable_thinking"] = thinks
        if self.effort and thinks and "reasoning_effort" in known:
            tools = bool(self.tools_offered)
            effort = EFFORTS[self.effort]
            return add_variables(model, variables, effort, None, tools, self.ignore, effort_name=EFFORT)
        return variables or None

    @property
    def omits_thoughts(self) -> bool:
        """True if blocks of thoughts are to be empty."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def effort(self) -> str | None:
        return self.output_config.effort if self.output_config else None


def _merge_turns(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make the messages of each turn one message; results of tools stay apart."""
    turns: list[dict[str, Any]] = []
    for role, group in groupby(messages, itemgetter("role")):
        turn = list(group)
        if role == "assistant":
            turns.append(_merge_answers(turn))
        elif role == "tool":
            turns += turn
        else:
            turns.append({"role": role, "content": make_content((message["content"] for message in turn), "\n")})
    return turns


def _merge_answers(turn: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"role": "assistant", "content": "".join(message["content"] for message in turn)}
    if thoughts := "".join(message.get("reasoning_content", "") for message in turn):
        merged["reasoning_content"] = thoughts
    if calls := [call for message in turn for call in message.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged


def shows_late_system(template: ChatTemplate) -> bool:
    """True if the template shows a system message in the middle of a conversation."""
    turns = [{"role": role, "content": f"{role}'s words"} for role in ("user", "system", "assistant", "user")]
    try:
        return all(turns[1]["content"] in template.render(given) for given in (turns[:2], turns))
    except RequestError:
        return False


class MessageRequest(Sampled, Prompted):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    tool_format: ToolFormat = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.stream_chat` beside the messages.
        Raises ApiError: parameters contradict each other."""
        wanted = (self.output_config and self.output_config.format) or self.output_format
        choice = self.tool_choice
        parallel = choice is None or not choice.disable_parallel_tool_use
        if not parallel and not self.tools_offered:
            self.ignore("tool_choice.disable_parallel_tool_use")
        return {
            **self.sampling(
                max_tokens=self.max_tokens,
                stop=self.stop_sequences or None,
                json_schema=wanted.schema_ if wanted else None,
            ),
            "tool_choice": self._tool_choice(),
            "tool_format": self.tool_format,
            "parallel_tool_calls": parallel,
            "ignored": lambda place: self.ignore(rename_place(place, self.names)),
        }

    def _tool_choice(self) -> str:
        choice, tools = self.tool_choice, self.tools_offered
        if isinstance(choice, NamedChoice):
            others = [tool for tool in self.tools or () if isinstance(tool, Other)]
            if forced := [tool for tool in others if choice.name in (tool.model_extra or {}).values()]:
                raise refuse_forced(forced[0])
            return check_choice(choice.name, tools)
        kind = choice.type if choice else "auto"
        return check_choice("required" if kind == "any" else kind, tools)

    @property
    def names(self) -> dict[str, str]:
        """This dialect's names of llmc's parameters, as the request has them."""
        tools = [(f"tools[{at}]", place) for at, place in enumerate(self.tools_offered)]
        schemas = {f"{ours}.function.parameters": f"{own}.input_schema" for ours, own in tools}
        return NAMES | self.form_names | dict(tools) | schemas

    def budget(self, model: Model, arguments: Mapping[str, Any]) -> int | None:
        """Tokens of thoughts at most; None bounds none. A model without thoughts keeps any bound.
        ``arguments``: those of :meth:`llmc.runtime.Model.stream_chat`.
        Raises ApiError: they are more than the whole answer, or would come before an answer that has begun."""
        kind, tools = self.thinking.type if self.thinking else None, bool(self.tools_offered)
        if kind == "between_tools":
            self.ignore("thinking.type")
        if not model.can_reason(tools):
            if kind not in (None, "disabled"):
                self.ignore("thinking")
            if self.effort and "reasoning_effort" not in model.chat_template.variables(tools):
                self.ignore(EFFORT)
            return None
        if isinstance(self.thinking, ThinkingOn):
            return self._check_budget(self.thinking.budget_tokens)
        if kind == "disabled":
            return None if self.is_prefilled or "enable_thinking" in model.chat_template.variables(tools) else 0
        return effort_budget(model, self.effort, arguments, self.ignore, EFFORT)

    def _check_budget(self, budget: int) -> int:
        if budget >= self.max_tokens:
            reason = f"thinking.budget_tokens is {budget}, expected less than max_tokens, {self.max_tokens}"
            raise ApiError(400, reason, param="thinking.budget_tokens")
        if self.is_prefilled:
            place = f"messages[{len(self.messages) - 1}]"
            reason = (
                f"{place} is the beginning of the answer, before which thoughts would come; leave out thinking or it"
            )
            raise ApiError(400, reason, param=place)
        return budget


def blocks_in(content: str | Sequence[B]) -> Sequence[B | TextBlock]:
    """The blocks of a message; a plain text is one."""
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def pieces_of(content: str | Sequence[Any]) -> Iterator[str | bytes]:
    """The texts and images of blocks."""
    for block in blocks_in(content):
        yield from block.pieces()


def text_of(content: str | Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks_in(content))


# ------------------------------------------------------------------------------------------------------------- answer


def usage_of(model: Model, result: ChatResult) -> dict[str, Any]:
    """Tokens of a request. Those of thoughts are what their text has."""
    usage = result.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": count_thoughts(model, result.message)},
        "server_tool_use": None,
    }


def find_ending(body: MessageRequest, result: ChatResult) -> dict[str, Any]:
    """The reason of the end, and the stop sequence that was met."""
    finish, stopped = result.message.finish_reason, None
    if finish == "tool_calls":
        reason = "tool_use"
    elif finish == "length":
        clipped = result.params.max_tokens < body.max_tokens  # the context had no room for more
        reason = "model_context_window_exceeded" if clipped else "max_tokens"
    else:
        stopped = result.stop_reason if isinstance(result.stop_reason, str) else None
        reason = "end_turn" if stopped is None else "stop_sequence"
    return {**NO_ENDING, "stop_reason": reason, "stop_sequence": stopped}


def blocks_of(message: Message, *, omits_thoughts: bool = False) -> list[dict[str, Any]]:
    """The blocks of an answer; a call that was cut off by the limit is left out, for its input is none."""
    found: list[dict[str, Any]] = []
    if message.reasoning:
        found.append(make_thinking_block("" if omits_thoughts else message.reasoning))
    if message.content:
        found.append(text_block(message.content))
    for call in message.tool_calls:
        with suppress(ValueError):
            found.append(call_block(call.id, call.name, json.loads(call.arguments)))
    return found


def make_thinking_block(text: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def text_block(text: str = "") -> dict[str, Any]:
    return {"type": "text", "text": text}


def call_block(call: str | None, name: str | None, given: dict[str, Any]) -> dict[str, Any]:
    caller = {"type": "direct"}
    return {"type": "tool_use", "id": f"toolu_{plain_id(call or '')}", "name": name, "input": given, "caller": caller}


class Blocks:
    """The blocks of a streamed answer: which is open, and the events that open, fill and close them."""

    def __init__(self, *, omits_thoughts: bool) -> None:
        self._omits_thoughts = omits_thoughts
        self._index = -1
        self._open: tuple[str, int] | None = None

    def events(self, delta: MessageDelta) -> Iterator[dict[str, Any]]:
        if delta.reasoning:
            yield from self._turn(("thinking", 0), make_thinking_block())
            if not self._omits_thoughts:
                yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._turn(("text", 0), text_block())
            yield self._delta({"type": "text_delta", "text": delta.content})
        for call in delta.tool_calls:
            yield from self._turn(("tool_use", call.index), call_block(call.id, call.name, {}))
            if call.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def close(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            if self._open[0] == "thinking":  # without it clients do not send the thoughts back
                yield self._delta({"type": "signature_delta", "signature": ""})
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _turn(self, kind: tuple[str, int], block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if kind != self._open:
            yield from self.close()
            self._index, self._open = self._index + 1, kind
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class MessageTurn(Turn[MessageRequest, ChatHandle]):
    """A conversation, and the message that answers it."""

    async def read(self) -> tuple[list[Any], dict[str, Any]]:
        self.call.note(user=self.body.metadata and self.body.metadata.user_id)
        return await self.call.aside(lambda: ([self.body.plain()], self.body.arguments()))

    def fit(self, prompt: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = arguments | self.body.make_arguments(self.model)
        budget = self.body.budget(self.model, given)
        return self.body.fit(prompt, self.model.chat_template), {"reasoning_budget": budget, **given}

    def start(self, prompt: Any, arguments: dict[str, Any]) -> ChatHandle:
        """Submit the messages; where the context has less room than ``max_tokens``, for as many tokens as fit."""
        try:
            return self.model.stream_chat(prompt, **arguments)
        except ContextError:
            names = ("tools", "tool_format", "chat_template_kwargs", "continue_final_message", "parse_special")
            shown = {name: arguments[name] for name in names if name in arguments}
            room = self.model.max_context - len(self.model.chat_tokens(prompt, **shown))
            if not 0 < room < arguments["max_tokens"]:
                raise
            return self.model.stream_chat(prompt, **{**arguments, "max_tokens": room})

    def _head(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self.name,
            "content": [],
            **NO_ENDING,
            "usage": {**usage, "cache_creation": None, "inference_geo": None, "service_tier": "standard"},
        }

    async def make_whole(self, result: ChatResult) -> Response:
        usage = await run_in_threadpool(usage_of, self.model, result)
        content = blocks_of(result.message, omits_thoughts=self.body.omits_thoughts)
        return JSONResponse({**self._head(usage), "content": content, **find_ending(self.body, result)})

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer; the usage of the last but one is the whole request's."""
        counts = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
        before = {**counts, "output_tokens_details": None, "server_tool_use": None}
        yield {"type": "message_start", "message": self._head({"input_tokens": self.handle.prompt_tokens, **before})}
        blocks = Blocks(omits_thoughts=self.body.omits_thoughts)
        async for delta in self.handle.deltas_async():
            for found in blocks.events(delta):
                yield found
        for found in blocks.close():
            yield found
        result = await self.handle
        usage = await run_in_threadpool(usage_of, self.model, result)
        yield {"type": "message_delta", "delta": find_ending(self.body, result), "usage": usage}
        yield {"type": "message_stop"}

    def stream(self, held: AsyncExitStack) -> Response:
        return EventStream(self.events(), held, self.service.config.heartbeat_s, heartbeat=PING)

    def events(self) -> AsyncIterator[bytes]:
        request_id = self.request.scope["state"].get("request_id")
        return guard_pieces(
            self.pieces(),
            lambda piece: event(piece, piece["type"]),
            lambda error: event(error.anthropic_body(request_id), "error"),
        )


# ------------------------------------------------------------------------------------------------------------- routes


@router.post("/v1/messages")
async def messages(body: Annotated[MessageRequest, take_body(MessageRequest)], request: Request) -> Response:
    """Answer a conversation. With ``stream`` the answer comes as server-sent events, pings among them."""
    return await MessageTurn(body, request).answer()


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: Annotated[Prompted, take_body(Prompted)], call: Called, service: Served) -> dict[str, Any]:
    """The tokens of the prompt that such a conversation becomes."""

    def tokenize(model: Model) -> list[int]:
        return model.chat_tokens(body.fit(body.plain(), model.chat_template), **body.make_arguments(model))

    count = await service.count_tokens(call, body.model, NAMES, tokenize)
    return {"input_tokens": count}
