"""OpenAI's chat completions: messages in, messages out, tools and reasoning included."""

import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, ConfigDict, Field, Tag

from llmc.errors import RequestError, UsageError, format_value
from llmc.runtime import Model
from llmc.runtime.api.chat import ChatHandle, ChatResult, Message, MessageDelta
from llmc.runtime.server.dialects.openai import OpenAITurn, StreamOptions, StreamUsage, chat_logprobs, usage_of
from llmc.runtime.server.http.bodies import (
    ANY,
    Body,
    Logged,
    LogitBias,
    Other,
    Sampled,
    ToolFormat,
    Verbosity,
    kind_among,
)
from llmc.runtime.server.http.call import Call
from llmc.runtime.server.http.errors import ApiError, rename_place
from llmc.runtime.server.http.images import DataUrl, Sound, decode_base64, make_content
from llmc.runtime.server.http.streams import encode_json, make_answer, unless_long
from llmc.runtime.server.http.validation import take_body
from llmc.runtime.server.models.service import Service, plain_id
from llmc.runtime.tools.calls import LONGEST_NAME

router = APIRouter(tags=["OpenAI"])
CALL_ID = "call_"  # with which ids of calls begin in OpenAI's dialect
# Tokens that a model may think, by OpenAI's words for effort; "none" asks the template for no thoughts at all.
EFFORTS = {"minimal": 128, "low": 1024, "medium": 4096, "high": 16384, "xhigh": None, "max": None}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Variables of templates that tell how to answer; a template without one answers as it does.
HINTS = frozenset({"enable_thinking", "thinking", "reasoning_effort", "verbosity"})


# ------------------------------------------------------------------------------------------------------------ request


class TextPart(Body):
    """A piece of a message."""

    IGNORED = frozenset({"annotations", "cache_control", "prompt_cache_breakpoint"})

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """A piece of a message in which the assistant refused."""

    type: Literal["refusal"]
    text: Annotated[str, Field(alias="refusal")]


class ImageUrl(Body):
    IGNORED = frozenset({"detail"})

    url: DataUrl


class ImagePart(Body):
    """An image, for models that see."""

    IGNORED = frozenset({"cache_control", "prompt_cache_breakpoint"})

    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(Body):
    data: str
    format: Literal["wav", "mp3"]


class AudioPart(Body):
    """Audio, for models that hear."""

    IGNORED = frozenset({"cache_control", "prompt_cache_breakpoint"})

    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[TextPart | RefusalPart | ImagePart | AudioPart, Field(discriminator="type")]


class CalledFunction(Body):
    IGNORED = frozenset({"parsed_arguments", "provider_specific_fields"})  # the former is OpenAI's own client's

    name: str
    arguments: Annotated[str, Field(description="JSON, as the model wrote it")]


CallId = Annotated[str, AfterValidator(plain_id)]


class FunctionCall(Body):
    IGNORED = frozenset({"cache_control", "caller", "index", "provider_specific_fields"})

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        return self.model_dump()


class CustomInput(Body):
    name: str
    input: str


class CustomCall(Body):
    """A call of a tool whose input is text, shown to the model as the call of a function."""

    IGNORED = FunctionCall.IGNORED
    id: CallId
    type: Literal["custom"]
    custom: CustomInput

    def plain(self) -> dict[str, Any]:
        function = {"name": self.custom.name, "arguments": write_input(self.custom.input)}
        return {"id": self.id, "type": "function", "function": function}


def write_input(text: str) -> str:
    """The arguments of a function whose call is one of a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


AnyCall = Annotated[
    Annotated[FunctionCall, Tag(":function")] | Annotated[CustomCall, Tag(":custom")], kind_among("function", "custom")
]


class ChatMessage(Body):
    # Members of answers that models are not shown, and hints for other servers' caches.
    IGNORED = frozenset({"annotations", "cache_control", "parsed", "provider_specific_fields", "thinking_blocks"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(min_length=1)] | None = None
    name: Annotated[str | None, Field(description="for templates that show it, and ignored by others")] = None
    tool_calls: list[AnyCall] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, Field(description="another name of reasoning_content")] = None
    refusal: str | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """The message as chat templates read it: they know no developers, who are the system's voice.
        Raises ApiError: it has what its role has not, or no content."""
        for name in self.model_fields_set & OF_ROLES.keys():
            if getattr(self, name) not in (None, []) and self.role != OF_ROLES[name]:
                said = f"{where}.{name} is for messages of the role {OF_ROLES[name]}, not {self.role}; leave it out"
                raise ApiError(400, said, param=f"{where}.{name}")
        if self.content is None and self.role != "assistant":
            raise ApiError(400, f"{where}.content is missing, expected text", param=f"{where}.content")
        _one(f"{where}.reasoning_content", self.reasoning_content, f"{where}.reasoning", self.reasoning)
        content = self.content or self.refusal or ""
        found = self.model_dump(exclude_none=True, exclude={"refusal", "tool_calls"})
        found["content"] = content if isinstance(content, str) else make_content(_pieces(content, f"{where}.content"))
        found["role"] = "system" if self.role == "developer" else self.role
        if self.tool_calls:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        return found


def _pieces(parts: Sequence[TextPart | RefusalPart | ImagePart | AudioPart], where: str) -> Iterator[str | bytes]:
    for number, part in enumerate(parts):
        if isinstance(part, ImagePart):
            yield decode_base64(part.image_url.url, f"{where}[{number}].image_url.url")
        elif isinstance(part, AudioPart):
            yield Sound(decode_base64(part.input_audio.data, f"{where}[{number}].input_audio.data"))
        else:
            yield part.text


# Fields of messages of one role alone.
OF_ROLES = {
    **dict.fromkeys(("refusal", "tool_calls", "reasoning_content", "reasoning"), "assistant"),
    "tool_call_id": "tool",
}


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates read them. Raises ApiError: one has what its role has not."""
    return [message.plain(f"messages[{number}]") for number, message in enumerate(messages)]


TOOL_NAME = rf"^[a-zA-Z0-9_.-]{{1,{LONGEST_NAME}}}$"


class Function(Body):
    """A function; members that are not known here say nothing to the model, as ``input_examples``."""

    model_config = ConfigDict(extra="ignore")
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, Field(description="refuse the schema where a keyword of it cannot be enforced")] = (
        None
    )

    def plain(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude_none=True, include=set(Function.model_fields))}


class Tool(Body):
    """A function that the model may call; tools of other types are left out."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["function"]
    function: Function


AnyTool = Annotated[Annotated[Tool, Tag(":function")] | Annotated[Other, Tag(":other")], kind_among("function")]


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[Annotated[NamedTool, Tag(":function")] | Annotated[Other, Tag(":other")], kind_among("function")]
        ],
        Field(min_length=1),
    ]


class AllowedChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(":word")]
    | Annotated[NamedTool, Tag(":function")]
    | Annotated[AllowedChoice, Tag(":allowed_tools")]
    | Annotated[Other, Tag(":other")],
    kind_among("function", "allowed_tools"),
]


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


Tags = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class OpenAIChat(Sampled):
    """The parameters that both of OpenAI's dialects of chats have."""

    model: str | None = None
    stop: str | list[str] | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    logit_bias: LogitBias = None
    stream: bool | None = None
    parallel_tool_calls: bool | None = None
    tool_format: ToolFormat = None
    metadata: Annotated[
        Annotated[Tags, Field(max_length=16)] | None,
        Field(description="up to 16 tags, for the log; echoed by responses"),
    ] = None
    prompt_cache_key: Annotated[
        str | None,
        Field(description="requests with the same one go to the same replica of a fleet; echoed by responses"),
    ] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "24h"] | None,
        Field(description="in_memory, where no folder keeps prefixes beyond the process; 24h changes nothing"),
    ] = None
    safety_identifier: Logged = None
    user: Logged = None

    def admit(self, call: Call, service: Service) -> None:
        """Log who asks.
        Raises ApiError: prefixes shall stay in memory alone, but a folder keeps them, too."""
        call.note(user=self.user, safety_identifier=self.safety_identifier, metadata=self.metadata or None)
        if self.prompt_cache_retention == "24h":
            self.ignore("prompt_cache_retention")
        elif self.prompt_cache_retention is not None and service.config.prefix_cache_folder is not None:
            said = "prompt_cache_retention is 'in_memory', but this server keeps prefixes in a folder; leave it out"
            raise ApiError(400, said, param="prompt_cache_retention")


class ChatRequest(OpenAIChat):
    IGNORED = frozenset({"prediction", "prompt_cache_options", "service_tier", "store"})

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: bool | None = None
    response_format: Annotated[ResponseFormat | None, Field(discriminator="type")] = None
    stream_options: StreamOptions | None = None
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: Effort | None = None
    reasoning_budget: Annotated[int | None, Field(ge=0, description="tokens of thought; extension of llmc")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: Annotated[bool | None, Field(description="as in chat_template_kwargs")] = None
    add_generation_prompt: Annotated[bool | None, Field(description="false beside continue_final_message alone")] = None
    continue_final_message: Annotated[
        bool | None, Field(description="go on with the last message, the assistant's; extension of llmc")
    ] = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Verbosity = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.stream_chat` beside the messages.
        Raises ApiError: parameters contradict each other, or one counts for nothing."""
        if self.stream_options is not None and not self.stream:
            self.ignore("stream_options")
        if self.parallel_tool_calls is not None and not self._functions:
            self.ignore("parallel_tool_calls")
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
            logit_bias=self.logit_bias,
            **form(self.response_format),
        )
        return {
            **sampling,
            "tools": [function.plain() for function in self._functions.values()] or None,
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "tool_format": self.tool_format,
            "documents": self.documents,
            "continue_final_message": self.continue_final_message is True,
            "ignored": lambda place: self.ignore(rename_place(place, self.names)),
        }

    @property
    def names(self) -> dict[str, str]:
        """This dialect's names of llmc's parameters, as the request has them."""
        found = {"prompt": "messages"}
        if self.max_completion_tokens is not None:
            found["max_tokens"] = "max_completion_tokens"
        if self.response_format is not None:
            found |= {"json_schema": "response_format", "grammar": "response_format"}
        return found | self.form_names | {f"tools[{at}]": place for at, place in enumerate(self._functions)}

    def _logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @cached_property
    def _functions(self) -> dict[str, Function]:
        """The functions that the model is offered, by their places.
        Raises ApiError: one that is allowed is not there."""
        found = {place: tool.function for place, tool in drop_others(self.ignore, "tools", self.tools or ()).items()}
        if not isinstance(self.tool_choice, AllowedChoice):
            return found
        allowed = drop_others(self.ignore, "tool_choice.tools", self.tool_choice.allowed_tools.tools).values()
        names = {tool.function.name for tool in allowed}
        if missing := sorted(names - {function.name for function in found.values()}):
            raise refuse_allowed("tool_choice", missing[0])
        return {place: function for place, function in found.items() if function.name in names}

    def _tool_choice(self) -> str:
        choice = self.tool_choice
        if isinstance(choice, Other):
            raise refuse_forced(choice)
        if isinstance(choice, NamedTool):
            return check_choice(choice.function.name, self._functions)
        return check_choice(
            choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice or "auto", self._functions
        )

    def make_variables(self, model: Model) -> dict[str, Any] | None:
        """Variables of the chat template. Raises ApiError: parameters contradict each other."""
        given = dict(self.chat_template_kwargs or {})
        if self.enable_thinking is not None:
            _agree(given, "enable_thinking", self.enable_thinking, "enable_thinking")
            given["enable_thinking"] = self.enable_thinking
        tools = bool(self._functions)
        return add_variables(model, given, self.reasoning_effort, self.verbosity, tools, self.ignore)

    def make_budget(self, model: Model, arguments: Mapping[str, Any]) -> int | None:
        """Tokens of reasoning at most: the budget, else what the effort comes to."""
        if self.reasoning_budget is not None:
            return self.reasoning_budget
        return effort_budget(model, self.reasoning_effort, arguments, self.ignore)


B = TypeVar("B", bound=Body)


Ignore = Callable[[str], None]  # takes the name of a parameter that the service ignores


def drop_others(ignore: Ignore, name: str, tools: Iterable[B | Other], where: str = "") -> dict[str, B]:
    """The tools of types that can be offered, by their places; the others are named as ignored.
    ``name``: of the list; ``where``: its place, if that is another text."""
    for tool in tools:
        if isinstance(tool, Other):
            ignore(f"{name}.{tool.type}")
    return {f"{where or name}[{at}]": tool for at, tool in enumerate(tools) if not isinstance(tool, Other)}


def refuse_allowed(param: str, name: str) -> ApiError:
    """The refusal of a choice that allows a tool which is not there."""
    said = f"{param} allows {name[:64]!r}, which is none of the tools; give it, or leave it out"
    return ApiError(400, said, param=param)


def refuse_forced(choice: Other) -> ApiError:
    """The refusal of a choice that wants a call of a tool that cannot be offered."""
    said = f"tool_choice forces a tool of the type {choice.type[:64]!r}, which this service cannot run"
    return ApiError(400, f"{said}; expected a function, or 'auto'", param="tool_choice")


def check_choice(choice: str, tools: Collection[object] | None) -> str:
    """The choice among tools, if there are some where it asks for a call. Raises ApiError: there are none."""
    if choice not in ("none", "auto") and not tools:
        said = "tool_choice asks for a call, but tools holds no function; give the tools"
        raise ApiError(400, said, param="tool_choice")
    return choice


def add_variables(
    model: Model,
    given: Mapping[str, Any],
    effort: str | None,
    verbosity: Verbosity,
    tools: bool,
    ignore: Ignore,
    name: str = "verbosity",
    effort_name: str = "reasoning_effort",
) -> dict[str, Any] | None:
    """Variables of the chat template: those given, and those that tell it the effort and the length of answers.
    All of these are hints: one that the template cannot follow is left out and named as ignored.

    Args:
        effort: in OpenAI's words, of which ``none`` asks for no reasoning.
        tools: whether the request has some, for which a template of its own may be there.
        name, effort_name: the dialect's names of the parameters ``verbosity`` and ``effort``.

    Raises:
        ApiError: the given ones say the contrary.
    """
    known = model.chat_template.variables(tools)
    found = {variable: value for variable, value in given.items() if variable in known or variable not in HINTS}
    for variable in sorted(given.keys() - found.keys()):
        ignore(variable)
    if effort is not None:
        asked = _effort_variables(model, effort, tools)
        for variable, value in (asked or {}).items():
            _agree(found, variable, value, effort_name)
        found |= asked or {}
        if asked is None:
            ignore(effort_name)
    if verbosity is not None:
        _agree(given, "verbosity", verbosity, name)
        if "verbosity" in known:
            found["verbosity"] = verbosity
        elif verbosity != "medium":  # which all models do without being told
            ignore(name)
    return found or None


def _effort_variables(model: Model, effort: str, tools: bool) -> dict[str, Any] | None:
    """Variables that tell the template the effort; None if it cannot follow it."""
    found: dict[str, Any] | None = None
    with suppress(UsageError):
        found = dict(model.reasoning_variables(effort != "none"))
    template = model.chat_template
    if "reasoning_effort" in template.variables(tools) and (effort != "none" or _NONE.search(template.source(tools))):
        with suppress(RequestError):  # some take two words alone
            template.render([{"role": "user", "content": "a"}], reasoning_effort=effort)
            found = {**(found or {}), "reasoning_effort": effort}
    return found


_NONE = re.compile("""(['"])none\\1""")


def effort_budget(
    model: Model, effort: str | None, arguments: Mapping[str, Any], ignore: Ignore, name: str = "reasoning_effort"
) -> int | None:
    """Tokens of reasoning that an effort comes to; None, and named as ignored, where the answer has no place for them.

    Args:
        effort: in OpenAI's words; :func:`add_variables` names it where the model does not reason.
        arguments: those of :meth:`llmc.runtime.Model.stream_chat`.
        name: the dialect's name of the effort.
    """
    budget = EFFORTS.get(effort or "")
    if budget is None or not model.can_reason(bool(arguments.get("tools"))):
        return None
    if arguments.get("continue_final_message") or arguments.get("num_beams", 1) > 1:
        ignore(name)
        return None
    return budget


def _agree(variables: Mapping[str, Any], name: str, value: Any, parameter: str) -> None:
    if variables.get(name, value) != value:
        said = f"chat_template_kwargs holds {name}, which contradicts {parameter}; leave one of them out"
        raise ApiError(400, said, param="chat_template_kwargs")


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
    found = {**message.to_dict(), "refusal": None, "annotations": []}
    for call in found.get("tool_calls", ()):
        call["id"] = CALL_ID + call["id"]
    return found


def count_thoughts(model: Model, message: Message) -> int:
    """The tokens of a message's thoughts, as their text has them."""
    return len(model.tokenizer.encode(message.reasoning, False)) if message.reasoning else 0


async def usage_of_chat(model: Model, result: ChatResult) -> dict[str, Any]:
    thoughts = await unless_long(
        [message.reasoning for message in result.messages],
        lambda: sum(count_thoughts(model, message) for message in result.messages),
    )
    return {**usage_of([result]), "completion_tokens_details": {"reasoning_tokens": thoughts}}


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


class ChatTurn(OpenAITurn[ChatRequest, ChatHandle]):
    """A conversation, and the messages that answer it."""

    async def read(self) -> tuple[list[Any], dict[str, Any]]:
        self.body.admit(self.call, self.service)
        return await self.call.aside(lambda: ([conversation(self.body.messages)], self.body.arguments()))

    def fit(self, prompt: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        own = {
            "chat_template_kwargs": self.body.make_variables(self.model),
            "reasoning_budget": self.body.make_budget(self.model, arguments),
        }
        return prompt, {**own, **arguments}

    def _head(self, kind: str) -> dict[str, Any]:
        return {**self.head("chatcmpl", kind), "service_tier": "default"}

    async def make_whole(self, result: ChatResult) -> Response:
        usage = await usage_of_chat(self.model, result)

        def make() -> dict[str, Any]:
            choices = [
                {
                    "index": index,
                    "message": message_of(message),
                    "logprobs": chat_logprobs(self.model, output.logprobs),
                    "finish_reason": message.finish_reason,
                }
                for index, (message, output) in enumerate(zip(result.messages, result.outputs, strict=True))
            ]
            return {**self._head("chat.completion"), "choices": choices, "usage": usage}

        return await make_answer(make, large=self.body.logprobs is True)

    async def pieces(self) -> AsyncIterator[str]:
        """Chunks: roles, deltas, reasons of the end, and the usage if the client wants it."""
        handle, head = self.handle, self._head("chat.completion.chunk")
        usage = StreamUsage(self.body.stream_options, [handle.prompt_tokens] * handle.outputs)

        def chunk(index: int, delta: dict[str, Any], **rest: Any) -> str:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **rest}
            return encode_json({**head, **usage.member(index), "choices": [choice]})

        for index in range(handle.outputs):
            yield chunk(index, {"role": "assistant", "content": ""})
        async for delta in handle.deltas_async():
            usage.add(delta.index, len(delta.token_ids))
            if (piece := piece_of(delta)) or delta.logprobs:
                yield chunk(delta.index, piece, logprobs=chat_logprobs(self.model, delta.logprobs or None))
        result = await handle
        for index, message in enumerate(result.messages):
            yield chunk(index, {}, finish_reason=message.finish_reason)
        if usage.ends:
            yield encode_json({**head, "choices": [], "usage": await usage_of_chat(self.model, result)})


@router.post("/v1/chat/completions")
async def chat_completions(body: Annotated[ChatRequest, take_body(ChatRequest)], request: Request) -> Response:
    """Answer a conversation. With ``stream`` the answer comes as server-sent events that end with ``[DONE]``."""
    return await ChatTurn(body, request).answer()
