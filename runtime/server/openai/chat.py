"""OpenAI's chat completions: messages in, messages out, tools and reasoning included."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response, WebSocket
from pydantic import Field

from llmc.errors import format_value
from llmc.runtime import Model
from llmc.runtime.api.chat import ChatHandle, ChatResult, Message, MessageDelta
from llmc.runtime.server.http.aside import aside
from llmc.runtime.server.http.bodies import (
    ANY,
    Body,
    CacheKey,
    Logged,
    Metadata,
    Retention,
    Sampled,
    StreamOptions,
    ToolFormat,
    Verbosity,
    biases,
    check_stream,
    make_extra_member,
    make_last_members,
    make_unknown_usage,
    usage_of,
)
from llmc.runtime.server.http.errors import ApiError, name_parameters
from llmc.runtime.server.http.ignored import ignore
from llmc.runtime.server.http.logs import note
from llmc.runtime.server.http.sockets import converse
from llmc.runtime.server.http.streams import Chunks, EventStream, encode_json, guard_chunks, make_answer, unless_gone
from llmc.runtime.server.http.validation import read_json, take_body
from llmc.runtime.server.models.service import Service, service_at, service_of, submit_promptly
from llmc.runtime.server.openai.logprobs import chat_logprobs

router = APIRouter(tags=["OpenAI"])
CALL_ID = "call_"  # with which ids of calls begin in OpenAI's dialect
# Tokens that a model may think, by OpenAI's words for effort; "none" asks the template for no thoughts at all.
EFFORTS = {"minimal": 128, "low": 1024, "medium": 4096, "high": 16384, "xhigh": None}


# ------------------------------------------------------------------------------------------------------------ request


class TextPart(Body):
    """A piece of a message; text is all that these models read."""

    IGNORED = frozenset({"annotations", "cache_control", "prompt_cache_breakpoint"})

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """A piece of a message in which the assistant refused."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class CalledFunction(Body):
    IGNORED = frozenset({"parsed_arguments", "provider_specific_fields"})  # the former is OpenAI's own client's

    name: str
    arguments: Annotated[str, Field(description="JSON, as the model wrote it")]


class Call(Body):
    IGNORED = frozenset({"cache_control", "caller", "index", "provider_specific_fields"})

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    # What answers carry that is not shown to models, and what other servers' caches are told.
    IGNORED = frozenset({"annotations", "cache_control", "parsed", "provider_specific_fields", "thinking_blocks"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(min_length=1)] | None = None
    name: Annotated[str | None, Field(description="for templates that show it, and ignored by others")] = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, Field(description="another name of reasoning_content")] = None
    refusal: str | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """The message as chat templates read it: they know no developers, who are the system's voice.

        Raises:
            ApiError: it has what its role has not, or no content.
        """
        for name in self.model_fields_set & OF_ROLES.keys():
            if getattr(self, name) not in (None, []) and self.role != OF_ROLES[name]:
                said = f"{where}.{name} is for messages of the role {OF_ROLES[name]}, not {self.role}; leave it out"
                raise ApiError(400, said, param=f"{where}.{name}")
        if self.content is None and self.role != "assistant":
            raise ApiError(400, f"{where}.content is missing, expected text", param=f"{where}.content")
        _one(f"{where}.reasoning_content", self.reasoning_content, f"{where}.reasoning", self.reasoning)
        found = self.model_dump(exclude_none=True, exclude={"refusal"})
        if isinstance(self.content, list):
            found["content"] = "".join(part.text for part in self.content)
        if self.content is None:
            found["content"] = self.refusal or ""
        if self.tool_call_id is not None:
            found["tool_call_id"] = _convert_id(self.tool_call_id)
        if calls := found.pop("tool_calls", None):
            found["tool_calls"] = [{**call, "id": _convert_id(call["id"])} for call in calls]
        return {**found, "role": "system" if self.role == "developer" else self.role}


def _convert_id(given: str) -> str:
    """The id of a call as the model's template has it, which may take no other than nine letters and digits."""
    return given.removeprefix(CALL_ID)


# Fields of messages of one role alone.
OF_ROLES = {
    "refusal": "assistant",
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates read them.

    Raises:
        ApiError: one has what its role has not.
    """
    return [message.plain(f"messages[{number}]") for number, message in enumerate(messages)]


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, Field(description="refuse the schema where a keyword of it cannot be enforced")] = (
        None
    )


class Tool(Body):
    """A tool: functions are all there are."""

    IGNORED = frozenset({"cache_control"})

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """Those of the tools that may be called, and whether one must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Schema(Body):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class ObjectFormat(Body):
    """A JSON object, of any form unless there is a schema."""

    type: Literal["json_object"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema", description="llama.cpp's; as json_schema")] = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: Schema


class GrammarFormat(Body):
    """Text that a grammar derives, in GBNF or llguidance's Lark."""

    type: Literal["grammar"]
    grammar: str


ResponseFormat = TextFormat | ObjectFormat | SchemaFormat | GrammarFormat


class ChatRequest(Sampled):
    IGNORED = frozenset({"prediction", "prompt_cache_options", "service_tier", "store"})

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    logit_bias: dict[str, float] | None = None
    response_format: Annotated[ResponseFormat | None, Field(discriminator="type")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    tool_format: ToolFormat = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    reasoning_budget: Annotated[int | None, Field(ge=0, description="tokens of thought; extension of llmc")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: Annotated[bool | None, Field(description="as in chat_template_kwargs")] = None
    add_generation_prompt: Annotated[bool | None, Field(description="false beside continue_final_message alone")] = None
    continue_final_message: Annotated[
        bool | None, Field(description="go on with the last message, the assistant's; extension of llmc")
    ] = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[Literal["text"]] | None = None
    metadata: Metadata = None
    verbosity: Verbosity = None
    prompt_cache_key: CacheKey = None
    prompt_cache_retention: Retention = None
    safety_identifier: Logged = None
    user: Logged = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.stream_chat` beside the messages.

        Raises:
            ApiError: parameters contradict each other, or one counts for nothing.
        """
        check_stream(self.stream, self.stream_options)
        if self.tool_format is not None and not self.tools:
            said = "tool_format is given without tools; leave it out, or give the tools"
            raise ApiError(400, said, param="tool_format")
        if self.parallel_tool_calls is not None and not self.tools:
            ignore("parallel_tool_calls")
        if self.add_generation_prompt is (self.continue_final_message is True):
            said = "add_generation_prompt must be the contrary of continue_final_message; leave it out"
            raise ApiError(400, said, param="add_generation_prompt")
        most = _one("max_tokens", self.max_tokens, "max_completion_tokens", self.max_completion_tokens)
        sampling = self.sampling(
            max_tokens=None if most == ANY else most,
            stop=self.stop,
            n=self.n,
            best_of=self.best_of,
            logprobs=self._logprobs(),
            logit_bias=biases(self.logit_bias),
            **form(self.response_format),
        )
        budget = EFFORTS.get(self.reasoning_effort or "") if self.reasoning_budget is None else self.reasoning_budget
        return {
            **sampling,
            "tools": [tool.plain() for tool in self._callable()] if self.tools else None,
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "tool_format": self.tool_format,
            "reasoning_budget": budget,
            "documents": self.documents,
            "chat_template_kwargs": self.chat_template_kwargs,
            "continue_final_message": self.continue_final_message is True,
            "ignored": ignore,
        }

    @property
    def thinks(self) -> bool | None:
        """True or False where the request asks for reasoning or for none, in OpenAI's words."""
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"

    @property
    def names(self) -> dict[str, str]:
        """This dialect's names of llmc's parameters, as the request has them."""
        found = {"prompt": "messages", "reasoning": "reasoning_effort"}
        if self.max_completion_tokens is not None:
            found["max_tokens"] = "max_completion_tokens"
        if self.reasoning_budget is None:
            found["reasoning_budget"] = "reasoning_effort"
        if isinstance(self.response_format, SchemaFormat | ObjectFormat):
            found["json_schema"] = "response_format"
        if isinstance(self.response_format, GrammarFormat):
            found["grammar"] = "response_format"
        return found

    def _logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def _callable(self) -> list[Tool]:
        tools = self.tools or []
        if not isinstance(self.tool_choice, AllowedChoice):
            return tools
        allowed = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        if missing := sorted(allowed - {tool.function.name for tool in tools}):
            said = f"tool_choice allows {missing[0][:64]!r}, which is none of the tools; give it, or leave it out"
            raise ApiError(400, said, param="tool_choice")
        return [tool for tool in tools if tool.function.name in allowed]

    def _tool_choice(self) -> str:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ApiError(400, "tool_choice asks for a call, but tools is empty; give the tools", param="tool_choice")
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        if isinstance(self.tool_choice, AllowedChoice):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice or "auto"


def read_thinking(body: ChatRequest) -> dict[str, Any] | None:
    """The variables of the chat template that a request gives, ``enable_thinking`` among them."""
    given = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is None:
        return given or None
    if given.get("enable_thinking", body.enable_thinking) != body.enable_thinking:
        said = "chat_template_kwargs holds enable_thinking, which contradicts enable_thinking; leave one of them out"
        raise ApiError(400, said, param="chat_template_kwargs")
    return {**given, "enable_thinking": body.enable_thinking}


def without_idle_switch(model: Model, variables: dict[str, Any] | None, tools: bool) -> dict[str, Any] | None:
    """Variables of the chat template without a switch of thoughts that the template does not have."""
    if variables is None or "enable_thinking" not in variables:
        return variables
    if "enable_thinking" in model.chat_template.variables(tools):
        return variables
    if variables["enable_thinking"] is False:
        model.reasoning_variables(False)
    ignore("enable_thinking")
    return {name: value for name, value in variables.items() if name != "enable_thinking"}


def add_reasoning(model: Model, variables: dict[str, Any] | None, thinks: bool | None) -> dict[str, Any] | None:
    """Variables of the chat template: those given, and what asks it for reasoning, or for none.

    Raises:
        UsageError: the template has no choice.
        ApiError: the given ones say the contrary.
    """
    if thinks is None:
        return variables
    found = {**model.reasoning_variables(thinks), **(variables or {})}
    if "enable_thinking" in found and found["enable_thinking"] != thinks:
        said = "chat_template_kwargs holds enable_thinking, which contradicts reasoning_effort; leave one of them out"
        raise ApiError(400, said, param="chat_template_kwargs")
    return found


def add_verbosity(
    model: Model, variables: dict[str, Any] | None, verbosity: Verbosity, tools: bool, name: str
) -> dict[str, Any] | None:
    """Variables of the chat template: those given, and the length of answers, where the template shows it. What all
    models do without being told is ``medium``.

    Args:
        tools: whether the request has some, for which a template of its own may be there.
        name: of the parameter.
    """
    if verbosity is None:
        return variables
    given = (variables or {}).get("verbosity", verbosity)
    if given != verbosity:
        said = f"chat_template_kwargs holds verbosity, which contradicts {name}; leave one of them out"
        raise ApiError(400, said, param="chat_template_kwargs")
    if "verbosity" in model.chat_template.variables(tools):
        return {**(variables or {}), "verbosity": verbosity}
    if verbosity != "medium":
        said = f"{name} is {verbosity!r}, which the model's chat template does not show to the model; write it into "
        raise ApiError(400, f"{said}a message", param=name)
    return variables


def form(wanted: ResponseFormat | None) -> dict[str, Any]:
    if isinstance(wanted, ObjectFormat):
        return {"json_schema": {"type": "object"} if wanted.schema_ is None else wanted.schema_}
    if isinstance(wanted, SchemaFormat):
        return {"json_schema": wanted.json_schema.schema_}
    if isinstance(wanted, GrammarFormat):
        return {"grammar": wanted.grammar}
    return {}


def _one(name: str, value: Any, other: str, another: Any) -> Any:
    if value is not None and another is not None and value != another:
        raise ApiError(
            400,
            f"{name} is {format_value(value)} and {other} is {format_value(another)}; give one of them",
            param=other,
        )
    return value if another is None else another


# ------------------------------------------------------------------------------------------------------------- answer


def message_of(message: Message) -> dict[str, Any]:
    content = None if message.tool_calls and not message.content else message.content
    found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [{**call.to_dict(), "id": CALL_ID + call.id} for call in message.tool_calls]
    return found


def head_of(kind: str, body: ChatRequest, service: Service) -> dict[str, Any]:
    return {**service.head("chatcmpl", kind, body.model), "service_tier": "default"}


def completion(body: ChatRequest, service: Service, model: Model, result: ChatResult) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": message_of(message),
            "logprobs": chat_logprobs(model, output.logprobs),
            "finish_reason": message.finish_reason,
        }
        for index, (message, output) in enumerate(zip(result.messages, result.outputs, strict=True))
    ]
    head = head_of("chat.completion", body, service)
    return {**head, "choices": choices, "usage": usage_of([result]), **make_extra_member(body.x_llmc, model, result)}


def piece_of(delta: MessageDelta) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if delta.content:
        found["content"] = delta.content
    if delta.reasoning:
        found["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        found["tool_calls"] = [_call_piece(call) for call in delta.tool_calls]
    return found


def _call_piece(call: Any) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": CALL_ID + call.id, "type": "function", "function": function}


async def chunks(
    body: ChatRequest, service: Service, model: Model, handle: ChatHandle, outputs: int
) -> AsyncIterator[str]:
    """The answer's pieces as JSON: roles, deltas, reasons of the end, and the usage if the client wants it."""
    head = head_of("chat.completion.chunk", body, service)
    chunk_of = Chunks(head | make_unknown_usage(body.stream_options))

    def members(index: int, delta: dict[str, Any], **rest: Any) -> dict[str, Any]:
        return {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **rest}]}

    def chunk(index: int, delta: dict[str, Any], **rest: Any) -> str:
        return chunk_of(**members(index, delta, **rest))

    @cache
    def of_text(index: int) -> Callable[[str], str]:
        return chunk_of.of_texts(lambda text: members(index, {"content": text}))

    for index in range(outputs):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for delta in handle.deltas_async():
        if delta.content and not (delta.reasoning or delta.tool_calls or delta.logprobs):
            yield of_text(delta.index)(delta.content)
        elif (piece := piece_of(delta)) or delta.logprobs:
            yield chunk(delta.index, piece, logprobs=chat_logprobs(model, delta.logprobs or None))
    result = await handle
    for index, message in enumerate(result.messages):
        yield chunk(index, {}, finish_reason=message.finish_reason)
    if asked := make_last_members(body, model, [result]):
        yield encode_json({**head, "choices": [], **asked})


# ------------------------------------------------------------------------------------------------------------- routes


async def open_chat(body: ChatRequest, held: AsyncExitStack, service: Service) -> tuple[Model, ChatHandle]:
    """Submit the request; model and request are held until ``held`` is closed."""
    note(user=body.user, safety_identifier=body.safety_identifier, metadata=body.metadata or None)
    service.check_retention(body.prompt_cache_retention)
    arguments, messages = await aside(lambda: (service.bound_sampling(body.arguments()), conversation(body.messages)))
    arguments |= {"parse_special": service.parses_special(body.parse_special)}
    model = await held.enter_async_context(service.generator(body.model))
    with name_parameters(body.names):
        variables = without_idle_switch(model, read_thinking(body), bool(body.tools))
        variables = add_reasoning(model, variables, body.thinks)
        variables = add_verbosity(model, variables, body.verbosity, bool(body.tools), "verbosity")
        arguments["chat_template_kwargs"] = variables
        handle = await submit_promptly(partial(model.stream_chat, messages, **arguments))
    held.callback(handle.cancel)
    return model, handle


async def _events(service: Service, body: ChatRequest, held: AsyncExitStack) -> AsyncIterator[str]:
    model, handle = await open_chat(body, held, service)
    return chunks(body, service, model, handle, handle.outputs)


@router.post("/v1/chat/completions")
async def chat_completions(
    body: Annotated[ChatRequest, take_body(ChatRequest)],
    request: Request,
    service: Annotated[Service, Depends(service_of)],
) -> Response:
    """Answer a conversation. With ``stream`` the answer comes as server-sent events that end with ``[DONE]``."""
    async with AsyncExitStack() as held:
        if body.stream:
            events = guard_chunks(await _events(service, body, held))
            return EventStream(events, held.pop_all(), service.config.heartbeat_s)
        model, handle = await open_chat(body, held, service)
        result = await unless_gone(request, handle)
        return await make_answer(partial(completion, body, service, model, result), large=body.logprobs is True)


@router.websocket("/v1/chat/completions")
async def chat_socket(socket: WebSocket) -> None:
    """The same over a WebSocket: a body as text in, the stream's chunks as texts out."""
    await converse(socket, partial(read_json, ChatRequest), partial(_events, service_at(socket)))
