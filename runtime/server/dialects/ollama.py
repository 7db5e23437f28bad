"""Ollama's dialect: chats and prompts as its clients send them, over the parts of OpenAI's chats.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, ValidationInfo, model_validator
from starlette.responses import JSONResponse

from llmc.bundle.model.kinds import allows
from llmc.runtime.api.chat import Message
from llmc.runtime.api.results import GenerationResult
from llmc.runtime.server.dialects.completions import CompletionRequest
from llmc.runtime.server.dialects.embeddings import EmbeddingRequest, Rows, compute_vectors
from llmc.runtime.server.dialects.openai_chat import ChatRequest, ChatTurn, Effort, Function
from llmc.runtime.server.http.bodies import ANY, Lenient, Sampled, ignore
from llmc.runtime.server.http.call import LARGE, Call, Called, call_of
from llmc.runtime.server.http.errors import OLLAMA_ERRORS, ApiError
from llmc.runtime.server.http.images import MOST_IMAGES
from llmc.runtime.server.http.streams import EventStream, encode_json, guard_pieces, make_answer
from llmc.runtime.server.http.validation import take_body
from llmc.runtime.server.models.service import Served, Service
from llmc.runtime.server.turn import Turn

router = APIRouter(tags=["Ollama"], responses=OLLAMA_ERRORS)
# The version of Ollama whose routes these are: clients that want a newer one than this refuse to talk.
SPOKEN_VERSION = "0.12.6"
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
MIROSTAT, CUTS = ("mirostat", "mirostat_tau", "mirostat_eta"), ("top_k", "top_p", "min_p", "typical_p")
# Ollama's names of llmc's parameters.
NAMES = {"prompt": "messages", "max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty"}
NAMES |= {"json_schema": "format", "reasoning": "think", "reasoning_budget": "think"}
THINK = {"enable_thinking": "think", "reasoning_effort": "think"}  # what the request for it becomes
ZERO = frozenset("0.hmsuµn")  # characters of a keep_alive of no time: 0, "0s", "0m0s"


class Options(Sampled):
    """Sampling parameters by Ollama's names, or llmc's; how Ollama's engine would run a model is ignored."""

    model_config = ConfigDict(extra="ignore")

    num_predict: Annotated[
        int | None, Field(serialization_alias="max_tokens", description="below 0: as many as there is room for")
    ] = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float | None, Field(serialization_alias="repetition_penalty")] = None
    repeat_last_n: Annotated[int | None, Field(description="0: no penalties; else they look at all tokens")] = None

    @model_validator(mode="before")
    @classmethod
    def _read_integers(cls, given: Any) -> Any:
        """JSON of JavaScript's and Go's clients, which write 64 as 64.0."""
        if not isinstance(given, Mapping):
            return given
        return {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in given.items()
        }

    def plain(self) -> dict[str, Any]:
        """The parameters by llmc's names."""
        given = self.model_dump(exclude_none=True, by_alias=True)
        last = given.pop("repeat_last_n", -1)
        if last == 0:
            given |= NO_PENALTIES
        elif last > 0:
            self.ignore("repeat_last_n")
        if given.get("max_tokens", 0) < 0:
            given["max_tokens"] = ANY
        # As llama.cpp does it: Mirostat replaces the cuts, and temperature 0 leaves it nothing to choose.
        steers = given.get("mirostat") and given.get("temperature") != 0
        for name in CUTS if steers else MIROSTAT:
            if given.pop(name, None):
                self.ignore(name)
        return given


class CalledFunction(Lenient):
    """A function that the model called, with its arguments as an object."""

    name: str
    arguments: Annotated[dict[str, Any], Field(default_factory=dict)]
    index: int | None = None


class ToolCall(Lenient):
    function: CalledFunction


class OllamaTool(Lenient):
    type: Literal["function"] = "function"
    function: Function


Images = Annotated[
    list[str], Field(default_factory=list, max_length=MOST_IMAGES, description="PNG, JPEG or WebP in base64")
]


class OllamaMessage(Lenient):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Images
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class Common(Lenient):
    """The common part of chats and prompts."""

    model: str
    keep_alive: Annotated[Any, Field(description="0 without a prompt unloads the model, else it changes nothing")] = (
        None
    )
    stream: bool = True
    format: Annotated[Literal["", "json"] | dict[str, Any], Field(description="json, or a JSON schema")] = ""
    options: Options = Options()
    think: bool | Effort | None = None

    @property
    def is_empty(self) -> bool:
        """True if nothing is to be answered."""
        return False

    @property
    def unloads(self) -> bool:
        """True if all that is asked is that the model is unloaded."""
        return self.is_empty and "0" in str(self.keep_alive) and set(str(self.keep_alive)) <= ZERO

    @model_validator(mode="after")
    def _name_keep_alive(self, info: ValidationInfo) -> "Common":
        if self.keep_alive is not None and not self.unloads:
            ignore(info, "keep_alive")
        return self

    def chat(self, call: Call, service: Service, messages: list[dict[str, Any]], **more: Any) -> "OllamaRequest":
        effort = "none" if self.think is False else self.think
        thinks = {"enable_thinking": True} if self.think is True else None
        return OllamaRequest.model_validate(
            {
                **self.options.plain(),
                "model": parse_model_name(service, self.model),
                "messages": messages,
                "json_schema": {"type": "object"} if self.format == "json" else self.format or None,
                "reasoning_effort": None if effort is True else effort,
                "chat_template_kwargs": thinks,
                **more,
            },
            context=call,
        )


class OllamaRequest(ChatRequest):
    @property
    def names(self) -> dict[str, str]:
        return NAMES


class OllamaCompletion(CompletionRequest):
    @property
    def names(self) -> dict[str, str]:
        return NAMES


class OllamaChat(Common):
    messages: Annotated[list[OllamaMessage], Field(default_factory=list)]
    tools: list[OllamaTool] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def request(self, call: Call, service: Service) -> OllamaRequest:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tools else None
        return self.chat(call, service, conversation(self.messages), tools=tools)

    def member(self, content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """A piece of the answer."""
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": content, **more}}


class OllamaPrompt(Common):
    prompt: str = ""
    system: str = ""
    raw: Annotated[bool, Field(description="the prompt as it is, without the chat template")] = False
    suffix: Annotated[str, Field(description="text after the answer, for models that fill in the middle")] = ""
    template: Annotated[Literal[""], Field(description="a bundle has its own")] = ""
    context: Annotated[list[int] | None, Field(max_length=0, description="not supported: use /api/chat")] = None
    images: Images

    @property
    def is_raw(self) -> bool:
        """True if the prompt goes to the model without the chat template."""
        return self.raw or bool(self.suffix)

    @property
    def is_empty(self) -> bool:
        return not (self.prompt or self.suffix or self.images)

    def request(self, call: Call, service: Service) -> OllamaRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.chat(call, service, [*system, {"role": "user", "content": content_of(self.prompt, self.images)}])

    def member(self, content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """A piece of the answer; no tools are given here, so nothing is called."""
        return {"response": content, **({"thinking": thinking} if thinking else {})}


def parse_model_name(service: Service, name: str) -> str:
    """The model's name without the tag that clients add."""
    return name if name in service.pool.names else name.removesuffix(":latest")


def conversation(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages in OpenAI's dialect: calls get ids, which results without one refer to in their order."""
    found, waiting = [], []
    for number, message in enumerate(messages):
        content = content_of(message.content, message.images)
        one: dict[str, Any] = {"role": message.role, "content": content, "name": message.name}
        if message.role == "assistant":
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            one["tool_calls"] = [
                {
                    "id": f"call_{number:05}{index:04}",
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": json.dumps(call.function.arguments)},
                }
                for index, call in enumerate(message.tool_calls)
            ]
            waiting = [(call["id"], call["function"]["name"]) for call in one["tool_calls"]]
        if message.role == "tool":
            wanted = message.tool_name or message.name
            place = next((at for at, (_, name) in enumerate(waiting) if wanted in (None, name)), None)
            one["tool_call_id"] = message.tool_call_id or (waiting.pop(place)[0] if place is not None else None)
            del one["name"]
        found.append(one)
    return found


def content_of(text: str, images: Sequence[str]) -> Any:
    """Text with images before it in OpenAI's dialect."""
    if not images:
        return text
    urls = ({"url": f"data:image/png;base64,{image}"} for image in images)
    return [*({"type": "image_url", "image_url": url} for url in urls), {"type": "text", "text": text}]


# ------------------------------------------------------------------------------------------------------------- answer


def head_of(body: Common) -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    return {"model": body.model, "created_at": now}


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The calls of a message, their arguments as objects; one that the length cut off is left out."""
    found = []
    for index, call in enumerate(message.tool_calls):
        with suppress(ValueError):
            found.append({"function": {"index": index, "name": call.name, "arguments": json.loads(call.arguments)}})
    return found


def end_of(result: GenerationResult, message: Message) -> dict[str, Any]:
    """The members with which an answer ends; times are in nanoseconds."""
    times, usage = result.timings, result.usage

    def ns(seconds: float) -> int:
        return round(seconds * 1e9)

    return {
        "done": True,
        "done_reason": "length" if message.finish_reason == "length" else "stop",
        "total_duration": ns(times.queue_s + times.ttft_s + times.decode_s),
        "load_duration": ns(times.queue_s),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": ns(times.ttft_s),
        "eval_count": usage.completion_tokens,
        "eval_duration": ns(times.decode_s),
    }


class Lines(EventStream):
    """Lines of JSON; no heartbeats, which the format has no room for."""

    media_type = "application/x-ndjson"


def encode_line(value: dict[str, Any]) -> bytes:
    """A line of JSON."""
    return encode_json(value).encode() + b"\n"


class OllamaTurn(ChatTurn):
    """A conversation, through the chat template.

    ``asked`` is the body as the client sent it, ``body`` what it becomes in OpenAI's dialect.
    """

    def __init__(self, asked: OllamaChat | OllamaPrompt, body: Any, request: Request) -> None:
        super().__init__(body, request)
        self._asked = asked

    async def submit(self, held: AsyncExitStack) -> None:
        await super().submit(held)
        self.call.rename_ignored(THINK)

    @property
    def streams(self) -> bool:
        return self._asked.stream

    async def texts(self) -> AsyncIterator[tuple[str, str]]:
        """Pieces of text, each with one of thoughts."""
        async for delta in self.handle.deltas_async():
            yield delta.content, delta.reasoning

    def message(self, result: Any) -> Message:
        """The whole answer."""
        message: Message = result.message
        return message

    def _line(self, *parts: Any) -> dict[str, Any]:
        return {**head_of(self._asked), **self._asked.member(*parts), "done": False}

    async def make_whole(self, result: GenerationResult) -> Response:
        message = self.message(result)
        line = self._line(message.content, message.reasoning or "", calls_of(message))
        return JSONResponse({**line, **end_of(result, message)})

    def stream(self, held: AsyncExitStack) -> Response:
        return Lines(self.events(), held, heartbeat_s=0)

    def events(self) -> AsyncIterator[bytes]:
        return guard_pieces(self._lines(), encode_line, lambda error: encode_line({"error": error.message}))

    async def _lines(self) -> AsyncIterator[dict[str, Any]]:
        """An answer as it comes: text and thoughts, then the calls, and the end."""
        async for text, thoughts in self.texts():
            if text or thoughts:
                yield self._line(text, thoughts)
        result = await self.handle
        message = self.message(result)
        if message.tool_calls:
            yield self._line("", "", calls_of(message))
        yield {**self._line(), **end_of(result, message)}


class OllamaPromptTurn(OllamaTurn):
    """A raw prompt, or the gap between ``prompt`` and ``suffix``."""

    RAW = True
    fit = Turn.fit

    async def read(self) -> tuple[list[Any], dict[str, Any]]:
        body: Any = self.body
        return [body.prompt], body.arguments()

    async def texts(self) -> AsyncIterator[tuple[str, str]]:
        async for delta in self.handle.events_async():
            yield delta.text, ""

    def message(self, result: Any) -> Message:
        return Message(result.text, finish_reason="length" if result.finish_reason == "length" else "stop")


# ------------------------------------------------------------------------------------------------------------- routes


@router.post("/api/chat")
async def chat(body: Annotated[OllamaChat, take_body(OllamaChat)], request: Request) -> Response:
    """Answer a conversation, in lines of JSON unless ``stream`` is false. Without messages the model is loaded, or
    unloaded where ``keep_alive`` is 0."""
    return await answer(body, request)


@router.post("/api/generate")
async def generate(body: Annotated[OllamaPrompt, take_body(OllamaPrompt)], request: Request) -> Response:
    """Answer a prompt, through the chat template unless it is raw, in lines of JSON unless ``stream`` is false. Without
    a prompt the model is loaded, or unloaded where ``keep_alive`` is 0."""
    return await (complete if body.is_raw and not body.is_empty else answer)(body, request)


async def answer(body: OllamaChat | OllamaPrompt, request: Request) -> Response:
    """Answer through the chat template, or load or unload the model."""
    call, service = call_of(request.scope), request.app.state.service
    if body.is_empty:
        return await load_or_unload(body, call, service)
    return await OllamaTurn(body, await call.aside(lambda: body.request(call, service)), request).answer()


async def load_or_unload(body: OllamaChat | OllamaPrompt, call: Call, service: Service) -> Response:
    """Load the model, or unload it where ``keep_alive`` is 0.
    Raises ApiError: 403, there are keys, and the client's is no admin's."""
    name = service.find(call.client, parse_model_name(service, body.model))
    if body.unloads:
        base = service.find(call.client, service.pool.base(name))
        call.client.check_admin()
        await service.pool.place(base).unload()
    else:
        call.note(model=name)
        async with service.pool.lease(name):
            pass
    reason = "unload" if body.unloads else "load"
    return JSONResponse({**head_of(body), **body.member(), "done": True, "done_reason": reason})


async def complete(body: OllamaPrompt, request: Request) -> Response:
    """Answer a raw prompt, or fill in between ``prompt`` and ``suffix``."""
    why = "raw, which leaves" if body.raw else "suffix, which leaves"
    for name in ("system", "format", "think", "images"):
        if getattr(body, name):
            raise ApiError(400, f"{name} is given beside {why} the template out; leave {name} out")
    model = parse_model_name(request.app.state.service, body.model)
    given = {"model": model, "prompt": body.prompt, "suffix": body.suffix, "max_tokens": ANY, **body.options.plain()}
    asked = OllamaCompletion.model_validate(given, context=call_of(request.scope))
    return await OllamaPromptTurn(body, asked, request).answer()


class OllamaEmbed(Lenient):
    """Texts to embed."""

    model: str
    input: str | list[str]
    truncate: Annotated[bool, Field(description="leave out the end of a text that is too long")] = True
    dimensions: int | None = None


class OllamaEmbedding(Lenient):
    """A text to embed, in the older form."""

    model: str
    prompt: str


@router.post("/api/embed")
async def embed(body: Annotated[OllamaEmbed, take_body(OllamaEmbed)], request: Request) -> Response:
    """Vectors of texts."""
    began = time.perf_counter_ns()
    rows, vectors = await _embed(body, request)
    times = {"total_duration": time.perf_counter_ns() - began, "load_duration": 0}

    def made() -> dict[str, Any]:
        return {"model": body.model, "embeddings": vectors.tolist(), **times, "prompt_eval_count": sum(map(len, rows))}

    return await make_answer(made, large=vectors.size > LARGE)


@router.post("/api/embeddings")
async def embeddings(body: Annotated[OllamaEmbedding, take_body(OllamaEmbedding)], request: Request) -> Response:
    """The vector of a text, in the older form."""
    _, vectors = await _embed(OllamaEmbed(model=body.model, input=body.prompt), request)
    return JSONResponse({"embedding": [value for vector in vectors.tolist() for value in vector]})


async def _embed(body: OllamaEmbed, request: Request) -> tuple[Rows, NDArray[np.float32]]:
    """Tokens and vectors of texts; without any the model is loaded."""
    service: Service = request.app.state.service
    name = parse_model_name(service, body.model)
    if not body.input:
        async with service.pool.lease(service.find_for(call_of(request.scope), name, "embeddings")):
            return [], np.empty((0, 0), np.float32)
    asked = EmbeddingRequest(model=name, input=body.input, truncate=body.truncate, dimensions=body.dimensions)
    _, rows, vectors = await compute_vectors(asked, request)
    return rows, vectors


@router.post("/api/pull")
@router.post("/api/push")
@router.post("/api/create")
@router.post("/api/copy")
@router.delete("/api/delete")
async def manage() -> Response:
    """Refuse what would change the models that are here."""
    reason = (
        "models are not pulled, made, copied or deleted here: make a bundle with 'llmc build' and give its folder to "
    )
    raise ApiError(400, f"{reason}'llmc serve'; GET /api/tags lists the models that are here")


def card(service: Service, name: str) -> dict[str, Any]:
    manifest = service.pool.manifest(name)
    family, base = manifest.geometry.model_type, service.pool.base(name)
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(service.started, timezone.utc).isoformat(),
        "size": sum(entry.size for entry in manifest.files.values()),
        "digest": manifest.source.fingerprint,
        "details": {
            "parent_model": "" if base == name else base,
            "format": "onnx",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": manifest.recipe.precision,
        },
    }


@router.get("/api/tags")
async def tags(call: Called, service: Served) -> dict[str, Any]:
    """The models that are served to this client."""
    return {"models": [card(service, name) for name in service.names(call.client)]}


@router.get("/api/ps")
async def running(call: Called, service: Served) -> dict[str, Any]:
    """The loaded models that are served to this client."""
    loaded = service.pool.models()
    return {"models": [card(service, name) for name in service.names(call.client) if service.pool.base(name) in loaded]}


@router.get("/api/version")
async def version() -> dict[str, Any]:
    """The version of Ollama whose dialect this is."""
    return {"version": SPOKEN_VERSION}


class Named(Lenient):
    model: str | None = None
    name: Annotated[str | None, Field(description="the older name of model")] = None


@router.post("/api/show")
async def show(body: Annotated[Named, take_body(Named)], call: Called, service: Served) -> dict[str, Any]:
    """The facts of a model, and its abilities."""
    if not (name := body.model or body.name):
        raise ApiError(400, "model is missing; give it", param="model")
    name = service.find(call.client, parse_model_name(service, name))
    manifest = service.pool.manifest(name)
    geometry = manifest.geometry
    encoder, family = geometry.encoder, geometry.model_type
    calls = service.pool.has_template(name) and allows(geometry, "tools")
    able = ["embedding"] if encoder else ["completion", *["tools"] * calls]
    return {
        **{key: value for key, value in card(service, name).items() if key in ("details", "modified_at")},
        "modelfile": "",
        "parameters": "",
        "template": "",
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": service.config.max_context or manifest.limits.max_context,
        },
        "capabilities": [*able, *["vision"] * (geometry.vision is not None)],
    }
