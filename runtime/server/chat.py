"""OpenAI's chat completions: messages in, messages out, tools and reasoning included."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response, WebSocket
from pydantic import Field
from starlette.responses import JSONResponse
from typing_extensions import NotRequired, TypedDict

from llmc.runtime import Model
from llmc.runtime.api.chat import ChatHandle, ChatResult, Message, MessageDelta
from llmc.runtime.server.bodies import Body, Logged, Sampled, StreamOptions, ToolFormat, Usage, biases, told, usage_of
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.logprobs import chat_logprobs
from llmc.runtime.server.logs import note
from llmc.runtime.server.service import Service, service_at, service_of, submitted
from llmc.runtime.server.sockets import CHUNKS, converse
from llmc.runtime.server.streams import EventStream, guarded, unless_gone
from llmc.runtime.server.validation import read_json

router = APIRouter(tags=["OpenAI"])
# Tokens that a model may think, by OpenAI's words for effort; "none" asks the template for no thoughts at all.
EFFORTS = {"minimal": 128, "low": 1024, "medium": 4096, "high": 16384, "xhigh": None}


# ------------------------------------------------------------------------------------------------------------ request


class TextPart(Body):
    """A piece of a message; text is all that these models read."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """A function that the model called."""

    name: str
    arguments: Annotated[str, Field(description="JSON, as the model wrote it")]


class Call(Body):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, Field(description="another name of reasoning_content")] = None
    refusal: None = None

    def plain(self) -> dict[str, Any]:
        """The message as chat templates read it: they know no developers, who are the system's voice."""
        found = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            found["content"] = "".join(part.text for part in self.content)
        if self.content is None:
            found["content"] = ""
        return {**found, "role": "system" if self.role == "developer" else self.role}


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, Field(description="arguments always follow the schema, whatever is said here")] = (
        None
    )


class Tool(Body):
    """A tool: functions are all there are."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as templates and grammars read it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class Schema(Body):
    """A JSON schema with a name."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Body):
    """A JSON object of any form."""

    type: Literal["json_object"]


class SchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: Schema


class GrammarFormat(Body):
    """Text that a grammar derives, in GBNF or llguidance's Lark."""

    type: Literal["grammar"]
    grammar: str


ResponseFormat = TextFormat | ObjectFormat | SchemaFormat | GrammarFormat


class ChatRequest(Sampled):
    """The body of POST /v1/chat/completions."""

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
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    tool_format: ToolFormat = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    reasoning_budget: Annotated[int | None, Field(ge=0, description="tokens of thought; extension of llmc")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Annotated[
        bool | None, Field(description="go on with the last message, the assistant's; extension of llmc")
    ] = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    user: Logged = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.stream_chat` beside the messages."""
        sampling = self.sampling(
            max_tokens=_one("max_tokens", self.max_tokens, "max_completion_tokens", self.max_completion_tokens),
            stop=self.stop,
            n=self.n,
            best_of=self.best_of,
            logprobs=self._logprobs(),
            logit_bias=biases(self.logit_bias),
            **form(self.response_format),
        )
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("enable_thinking", self.reasoning_effort != "none")
        budget = EFFORTS.get(self.reasoning_effort or "") if self.reasoning_budget is None else self.reasoning_budget
        return {
            **sampling,
            "tools": [tool.plain() for tool in self.tools] if self.tools else None,
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "tool_format": self.tool_format,
            "reasoning_budget": budget,
            "documents": self.documents,
            "chat_template_kwargs": variables or None,
            "continue_final_message": self.continue_final_message is True,
        }

    def _logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def _tool_choice(self) -> str:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ApiError(400, "tool_choice asks for a call, but tools is empty; give the tools", param="tool_choice")
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        return self.tool_choice or "auto"


def form(wanted: ResponseFormat | None) -> dict[str, Any]:
    """The sampling parameter that makes the output have this form."""
    if isinstance(wanted, ObjectFormat):
        return {"json_schema": {"type": "object"}}
    if isinstance(wanted, SchemaFormat):
        return {"json_schema": wanted.json_schema.schema_}
    if isinstance(wanted, GrammarFormat):
        return {"grammar": wanted.grammar}
    return {}


def _one(name: str, value: Any, other: str, another: Any) -> Any:
    if value is not None and another is not None and value != another:
        raise ApiError(400, f"{name} is {value} and {other} is {another}; give one of them", param=other)
    return value if another is None else another


# ------------------------------------------------------------------------------------------------------------- answer


class Choice(TypedDict):
    """One answer."""

    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(TypedDict):
    """The answer to a chat request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str
    service_tier: Literal["default"]
    x_llmc: NotRequired[dict[str, Any]]


def message_of(message: Message) -> dict[str, Any]:
    """The assistant's message in OpenAI's form."""
    content = None if message.tool_calls and not message.content else message.content
    found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [call.to_dict() for call in message.tool_calls]
    return found


def head_of(kind: str, body: ChatRequest, service: Service) -> dict[str, Any]:
    """The members with which the answer and each of its pieces begin."""
    return {**service.head("chatcmpl", kind, body.model), "service_tier": "default"}


def completion(body: ChatRequest, service: Service, model: Model, result: ChatResult) -> ChatCompletion:
    """The whole answer."""
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
    return {**head, "choices": choices, "usage": usage_of([result]), **told(body.x_llmc, model, result)}  # type: ignore[typeddict-item]


def piece_of(delta: MessageDelta) -> dict[str, Any]:
    """A delta in OpenAI's form."""
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
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


async def chunks(
    body: ChatRequest, service: Service, model: Model, handle: ChatHandle, outputs: int
) -> AsyncIterator[dict[str, Any]]:
    """The pieces of the answer: roles, deltas, reasons of the end, and the usage unless the client wants none."""
    head = head_of("chat.completion.chunk", body, service)

    def chunk(index: int, delta: dict[str, Any], **rest: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **rest}
        return {**head, "choices": [choice]}

    for index in range(outputs):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for delta in handle.deltas_async():
        if (piece := piece_of(delta)) or delta.logprobs:
            yield chunk(delta.index, piece, logprobs=chat_logprobs(model, delta.logprobs or None))
    result = await handle
    for index, message in enumerate(result.messages):
        yield chunk(index, {}, finish_reason=message.finish_reason)
    told_of = told(body.x_llmc, model, result)
    if told_of or not (body.stream_options and body.stream_options.include_usage is False):
        yield {**head, "choices": [], "usage": usage_of([result]), **told_of}


# ------------------------------------------------------------------------------------------------------------- routes


async def _opened(body: ChatRequest, held: AsyncExitStack, service: Service) -> tuple[Model, ChatHandle]:
    """Submit the request; model and request are held until ``held`` is closed."""
    note(user=body.user)
    arguments = service.bounded(body.arguments()) | {"parse_special": service.parses_special(body.parse_special)}
    model = await held.enter_async_context(service.generator(body.model))
    messages = [message.plain() for message in body.messages]
    handle = await submitted(partial(model.stream_chat, messages, **arguments))
    held.callback(handle.cancel)
    return model, handle


async def _events(service: Service, body: ChatRequest, held: AsyncExitStack) -> AsyncIterator[dict[str, Any]]:
    model, handle = await _opened(body, held, service)
    return chunks(body, service, model, handle, handle.outputs)


@router.post("/v1/chat/completions", response_model=ChatCompletion)
async def chat_completions(body: ChatRequest, request: Request, service: Service = Depends(service_of)) -> Response:  # noqa: B008
    """Answer a conversation. With ``stream`` the answer comes as server-sent events that end with ``[DONE]``."""
    async with AsyncExitStack() as held:
        if body.stream:
            events = guarded(await _events(service, body, held))
            return EventStream(events, held.pop_all(), service.config.heartbeat_s)
        model, handle = await _opened(body, held, service)
        result = await unless_gone(request, handle)
        return JSONResponse(completion(body, service, model, result))


@router.websocket("/v1/chat/completions")
async def chat_socket(socket: WebSocket) -> None:
    """The same over a WebSocket: a body as text in, the stream's chunks as texts out."""
    await converse(socket, CHUNKS, partial(read_json, ChatRequest), partial(_events, service_at(socket)))
