"""Anthropic's messages: blocks of text, thoughts and tools in and out, and a count of their tokens."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Header, Request, Response
from pydantic import Field, JsonValue
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from llmc.errors import ContextError
from llmc.runtime import Model
from llmc.runtime.api.chat import ChatHandle, ChatResult, Message, MessageDelta, ToolCall
from llmc.runtime.server.http.aside import aside
from llmc.runtime.server.http.bodies import Body, Logged, Sampled, ToolFormat
from llmc.runtime.server.http.errors import ANTHROPIC_ERRORS, ApiError, rename_schema
from llmc.runtime.server.http.ignored import ignore
from llmc.runtime.server.http.images import decode_base64, make_content
from llmc.runtime.server.http.logs import note
from llmc.runtime.server.http.streams import EventStream, event, guard_pieces, unless_gone
from llmc.runtime.server.http.validation import take_body
from llmc.runtime.server.models.service import Served, Service, new_id, plain_id
from llmc.runtime.server.openai.chat import EFFORTS, Function, add_variables, check_choice, count_thoughts

# This dialect's names of llmc's parameters.
NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "json_schema": "output_config.format.schema",
    "parameters": "input_schema",
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


class TextBlock(Body):
    IGNORED = CACHED | {"citations"}
    type: Literal["text"]
    text: str


class ImageData(Body):
    """An image itself; addresses and files are refused, for nothing is fetched."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/webp"]
    data: str


class ImageBlock(Body):
    """An image, for models that see."""

    IGNORED = CACHED
    type: Literal["image"]
    source: ImageData

    def decode(self) -> bytes:
        return decode_base64(self.source.data, "messages.content.source.data")


class ThinkingBlock(Body):
    """Thoughts of an earlier answer. Nobody checks the signature, which this server leaves empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Body):
    IGNORED = CACHED
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]
    caller: dict[Literal["type"], Literal["direct"]] | None = None

    def plain(self) -> dict[str, Any]:
        return ToolCall(plain_id(self.id), self.name, json.dumps(self.input, ensure_ascii=False)).to_dict()


class ToolResultBlock(Body):
    IGNORED = CACHED
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = None

    def plain(self) -> dict[str, Any]:
        found = [each.decode() if isinstance(each, ImageBlock) else each.text for each in blocks_in(self.content or "")]
        content = make_content(found, "\n")
        if self.is_error:
            content = FAILED + content if isinstance(content, str) else [{"type": "text", "text": FAILED}, *content]
        return {"role": "tool", "tool_call_id": plain_id(self.tool_use_id), "content": content}


B = TypeVar("B", bound=Body)
UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(Body):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1)]

    def plain(self) -> Iterator[dict[str, Any]]:
        for block in blocks_in(self.content):
            if isinstance(block, ToolResultBlock):
                yield block.plain()
            elif isinstance(block, ImageBlock):
                yield {"role": "user", "content": block.decode()}
            else:
                yield {"role": "user", "content": block.text}


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]

    def plain(self) -> Iterator[dict[str, Any]]:
        blocks = blocks_in(self.content)
        texts = [block.text for block in blocks if isinstance(block, TextBlock)]
        found: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
            found["reasoning_content"] = "".join(thoughts)
        if calls := [block.plain() for block in blocks if isinstance(block, ToolUseBlock)]:
            found["tool_calls"] = calls
        yield found


class SystemMessage(Body):
    role: Literal["system"]
    content: str | Annotated[list[TextBlock], Field(min_length=1)]

    def plain(self) -> Iterator[dict[str, Any]]:
        yield {"role": "system", "content": text_of(self.content)}


AnyMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(Function):
    """A tool of the client; those that Anthropic's servers run are refused."""

    IGNORED = CACHED | {"allowed_callers", "eager_input_streaming"}
    type: Literal["custom"] | None = None
    parameters: Annotated[dict[str, JsonValue], Field(alias="input_schema")]
    defer_loading: Literal[False] | None = None


class AutoChoice(Body):
    """The model decides whether it calls a tool (auto), must call one (any), or calls none."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


Display = Annotated[Literal["summarized"] | None, Field(description="thoughts are given whole, not summed up")]


class ThinkingOn(Body):
    """Thoughts, of so many tokens at most."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=0)]
    display: Display = None


class ThinkingOther(Body):
    """Thoughts as the model likes, or none where its template can leave them out."""

    type: Literal["adaptive", "disabled"]
    display: Display = None


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class KeptThinking(Body):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    edits: list[KeptThinking] | None = None


class Metadata(Body):
    user_id: Logged = None


class Prompted(Body):
    """The members that make the prompt."""

    IGNORED = CACHED | {"diagnostics", "inference_geo", "service_tier", "speed", "user_profile_id"}
    model: str
    messages: Annotated[list[AnyMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[AutoChoice | NamedChoice | None, Field(discriminator="type")] = None
    thinking: Annotated[ThinkingOn | ThinkingOther | None, Field(discriminator="type")] = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None

    @property
    def is_prefilled(self) -> bool:
        """True if the last message is the assistant's, of which the answer is the rest."""
        return isinstance(self.messages[-1], AssistantMessage)

    def plain(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it; turns of the user that follow each other are one.
        Raises ApiError: the last message is the assistant's, and cannot be gone on with."""
        if self.is_prefilled:
            self._check_prefill(f"messages[{len(self.messages) - 1}]")
        system = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        found: list[dict[str, Any]] = []
        for role, turn in groupby(
            [*system, *(plain for each in self.messages for plain in each.plain())], itemgetter("role")
        ):
            if role == "user":
                found.append({"role": role, "content": make_content((message["content"] for message in turn), "\n")})
            else:
                found.extend(turn)
        return found

    def _check_prefill(self, place: str) -> None:
        if not any(isinstance(block, TextBlock) for block in blocks_in(self.messages[-1].content)[-1:]):
            said = f"{place} is the assistant's and ends with no text; expected text for the answer to go on with"
            raise ApiError(400, said, param=place)
        if isinstance(self.thinking, ThinkingOn):
            said = f"{place} is the beginning of the answer, before which thoughts would come; leave out thinking or it"
            raise ApiError(400, said, param=place)

    def make_arguments(self, model: Model) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.chat_tokens` beside the messages.
        Raises UsageError: the chat template cannot do as ``thinking`` says."""
        kind = self.thinking.type if self.thinking else None
        if kind == "adaptive" and "enable_thinking" not in model.chat_template.variables(False):
            kind = None
        effort = "none" if kind == "disabled" else kind
        return {
            "tools": [tool.plain() for tool in self.tools] if self.tools else None,
            "chat_template_kwargs": add_variables(model, {}, effort, None, bool(self.tools)),
            "continue_final_message": self.is_prefilled,
        }


class MessageRequest(Sampled, Prompted):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    tool_format: ToolFormat = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.stream_chat` beside the messages.
        Raises ApiError: parameters contradict each other."""
        wanted = self.output_config.format if self.output_config else None
        choice = self.tool_choice
        parallel = choice is None or not choice.disable_parallel_tool_use
        if not parallel and not self.tools:
            ignore("tool_choice.disable_parallel_tool_use")
        return {
            **self.sampling(
                max_tokens=self.max_tokens,
                stop=self.stop_sequences or None,
                json_schema=wanted.schema_ if wanted else None,
            ),
            "tool_choice": self._tool_choice(),
            "tool_format": self.tool_format,
            "parallel_tool_calls": parallel,
            "reasoning_budget": self._budget(),
            "ignored": lambda place: ignore(rename_schema(place, NAMES)),
        }

    def _tool_choice(self) -> str:
        if isinstance(self.tool_choice, NamedChoice):
            return check_choice(self.tool_choice.name, self.tools)
        kind = self.tool_choice.type if self.tool_choice else "auto"
        return check_choice("required" if kind == "any" else kind, self.tools)

    def _budget(self) -> int | None:
        if isinstance(self.thinking, ThinkingOn):
            budget = self.thinking.budget_tokens
            if budget >= self.max_tokens:
                said = f"thinking.budget_tokens is {budget}, expected less than max_tokens, {self.max_tokens}"
                raise ApiError(400, said, param="thinking.budget_tokens")
            return budget
        if self.is_prefilled or self.output_config is None:  # no thoughts precede what has begun
            return None
        return EFFORTS.get(self.output_config.effort or "")


def blocks_in(content: str | Sequence[B]) -> Sequence[B | TextBlock]:
    """The blocks of a message; a plain text is one."""
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


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


def blocks_of(message: Message) -> list[dict[str, Any]]:
    """The blocks of an answer; a call that was cut off by the limit is left out, for its input is none."""
    found: list[dict[str, Any]] = []
    if message.reasoning:
        found.append(make_thinking_block(message.reasoning))
    if message.content:
        found.append(text_block(message.content))
    for call in message.tool_calls:
        with suppress(ValueError):
            found.append(call_block(call.id, call.name, json.loads(call.arguments)))
    return found


def make_thinking_block(text: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def text_block(text: str = "") -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def call_block(call: str | None, name: str | None, given: dict[str, Any]) -> dict[str, Any]:
    caller = {"type": "direct"}
    return {"type": "tool_use", "id": f"toolu_{plain_id(call or '')}", "name": name, "input": given, "caller": caller}


def head_of(body: MessageRequest, service: Service, usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": service.echo_name(body.model),
        "content": [],
        **NO_ENDING,
        "usage": {**usage, "cache_creation": None, "inference_geo": None, "service_tier": "standard"},
    }


class Blocks:
    """The blocks of a streamed answer: which is open, and the events that open, fill and close them."""

    def __init__(self) -> None:
        self._index = -1
        self._open: tuple[str, int] | None = None

    def events(self, delta: MessageDelta) -> Iterator[dict[str, Any]]:
        if delta.reasoning:
            yield from self._turn(("thinking", 0), make_thinking_block())
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
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _turn(self, kind: tuple[str, int], block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if kind != self._open:
            yield from self.close()
            self._index, self._open = self._index + 1, kind
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


async def events_of(
    body: MessageRequest, service: Service, model: Model, handle: ChatHandle
) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer; the usage of the last but one is the whole request's."""
    counts = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
    before = {**counts, "output_tokens_details": None, "server_tool_use": None}
    head = head_of(body, service, {"input_tokens": handle.prompt_tokens, **before})
    yield {"type": "message_start", "message": head}
    blocks = Blocks()
    async for delta in handle.deltas_async():
        for found in blocks.events(delta):
            yield found
    for found in blocks.close():
        yield found
    result = await handle
    usage = await run_in_threadpool(usage_of, model, result)
    yield {"type": "message_delta", "delta": find_ending(body, result), "usage": usage}
    yield {"type": "message_stop"}


# ------------------------------------------------------------------------------------------------------------- routes


def _submit(model: Model, messages: list[dict[str, Any]], **arguments: Any) -> ChatHandle:
    try:
        return model.stream_chat(messages, **arguments)
    except ContextError:
        names = ("tools", "tool_format", "chat_template_kwargs", "continue_final_message", "parse_special")
        shown = {name: arguments[name] for name in names if name in arguments}
        room = model.max_context - len(model.chat_tokens(messages, **shown))
        if not 0 < room < arguments["max_tokens"]:
            raise
        return model.stream_chat(messages, **{**arguments, "max_tokens": room})


async def _submit_chat(body: MessageRequest, held: AsyncExitStack, service: Service) -> tuple[Model, ChatHandle]:
    note(user=body.metadata and body.metadata.user_id)
    messages, arguments = await aside(lambda: (body.plain(), service.bound_sampling(body.arguments())))

    def make(model: Model) -> "partial[ChatHandle]":
        return partial(_submit, model, messages, **arguments | body.make_arguments(model))

    return await service.submit(held, body.model, NAMES | body.form_names, make)


@router.post("/v1/messages")
async def messages(
    body: Annotated[MessageRequest, take_body(MessageRequest)], request: Request, service: Served
) -> Response:
    """Answer a conversation. With ``stream`` the answer comes as server-sent events, pings among them."""
    request_id = request.scope.get("state", {}).get("request_id")
    async with AsyncExitStack() as held:
        model, handle = await _submit_chat(body, held, service)
        if body.stream:
            events = guard_pieces(
                events_of(body, service, model, handle),
                lambda piece: event(piece, piece["type"]),
                lambda error: event(error.anthropic_body(request_id), "error"),
            )
            return EventStream(events, held.pop_all(), service.config.heartbeat_s, heartbeat=PING)
        result = await unless_gone(request.receive, handle)
        usage = await run_in_threadpool(usage_of, model, result)
        answer = {
            **head_of(body, service, {**usage}),
            "content": blocks_of(result.message),
            **find_ending(body, result),
        }
        return JSONResponse(answer)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: Annotated[Prompted, take_body(Prompted)], service: Served) -> dict[str, Any]:
    """The tokens of the prompt that such a conversation becomes."""
    count = await service.count_tokens(
        body.model, NAMES, lambda model: model.chat_tokens(body.plain(), **body.make_arguments(model))
    )
    return {"input_tokens": count}
