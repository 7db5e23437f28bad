"""Ollama's dialect: chats and prompts as its clients send them, over the parts of OpenAI's chats.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import JSONResponse

from llmc.runtime import Handle, Model
from llmc.runtime.api.chat import ChatHandle, Message
from llmc.runtime.api.results import GenerationResult
from llmc.runtime.server.http.aside import aside
from llmc.runtime.server.http.bodies import ANY, Body
from llmc.runtime.server.http.errors import OLLAMA_ERRORS, ApiError
from llmc.runtime.server.http.images import MOST_IMAGES
from llmc.runtime.server.http.streams import EventStream, encode_json, guard_pieces, unless_gone
from llmc.runtime.server.http.validation import take_body
from llmc.runtime.server.models.service import Served, Service
from llmc.runtime.server.openai.chat import ChatRequest, Tool, open_chat
from llmc.runtime.server.openai.completions import CompletionRequest

router = APIRouter(tags=["Ollama"], responses=OLLAMA_ERRORS)
# The version of Ollama whose routes these are: clients that want a newer one than this refuse to talk.
SPOKEN_VERSION = "0.12.6"
# Penalties by llmc's names, and the value with which each does nothing.
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Options(Body):
    # How Ollama's engine runs a model, and samplers that it has dropped.
    IGNORED = frozenset(
        {"num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "low_vram"}
        | {"f16_kv", "vocab_only", "numa", "logits_all", "embedding_only"}
        | {"tfs_z", "penalize_newline", "mirostat_tau", "mirostat_eta"}
    )

    num_predict: Annotated[
        int | None, Field(serialization_alias="max_tokens", description="below 0: as many as there is room for")
    ] = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float | None, Field(serialization_alias="repetition_penalty")] = None
    repeat_last_n: Annotated[int | None, Field(description="0 or -1: penalties look at no token, or at all")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: Annotated[Literal[0] | None, Field(exclude=True)] = None

    def plain(self) -> dict[str, Any]:
        """The parameters by llmc's names. Raises ApiError: a penalty shall look at the last tokens only."""
        given = self.model_dump(exclude_none=True, by_alias=True)
        last = given.pop("repeat_last_n", -1)
        if last == 0:
            given = {name: value for name, value in given.items() if name not in PENALTIES}
        elif last > 0 and any(given.get(name, idle) != idle for name, idle in PENALTIES.items()):
            said = f"options.repeat_last_n is {last}, but penalties look at all tokens; give -1, or leave it out"
            raise ApiError(400, said, param="options.repeat_last_n")
        if given.get("max_tokens", 0) < 0:
            given["max_tokens"] = ANY
        return given


class CalledFunction(Body):
    """A function that the model called, with its arguments as an object."""

    name: str
    arguments: Annotated[dict[str, Any], Field(default_factory=dict)]
    index: int | None = None


class Call(Body):
    IGNORED = frozenset({"id", "type"})
    function: CalledFunction


Images = Annotated[
    list[str], Field(default_factory=list, max_length=MOST_IMAGES, description="PNG, JPEG or WebP in base64")
]


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Images
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class Asked(Body):
    """The common part of chats and prompts."""

    IGNORED = frozenset({"keep_alive"})

    model: str
    stream: bool = True
    format: Annotated[Literal["", "json"] | dict[str, Any], Field(description="json, or a JSON schema")] = ""
    options: Options = Options()
    think: bool | Literal["low", "medium", "high"] | None = None

    def chat(self, service: Service, messages: list[dict[str, Any]], **more: Any) -> ChatRequest:
        effort = "none" if self.think is False else self.think
        thinks = {"enable_thinking": True} if self.think is True else None
        return ChatRequest.model_validate(
            {
                **self.options.plain(),
                "model": parse_model_name(service, self.model),
                "messages": messages,
                "json_schema": {"type": "object"} if self.format == "json" else self.format or None,
                "reasoning_effort": None if effort is True else effort,
                "chat_template_kwargs": thinks,
                **more,
            }
        )


class OllamaChat(Asked):
    messages: Annotated[list[OllamaMessage], Field(default_factory=list)]
    tools: list[Tool] | None = None

    def request(self, service: Service) -> ChatRequest:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tools else None
        return self.chat(service, conversation(self.messages), tools=tools)

    def member(self, content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """A piece of the answer."""
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": content, **more}}


class OllamaPrompt(Asked):
    prompt: str = ""
    system: str = ""
    raw: Annotated[bool, Field(description="the prompt as it is, without the chat template")] = False
    suffix: Annotated[Literal[""], Field(description="not supported")] = ""
    template: Annotated[Literal[""], Field(description="a bundle has its own")] = ""
    context: Annotated[list[int] | None, Field(max_length=0, description="not supported: use /api/chat")] = None
    images: Images

    def request(self, service: Service) -> ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.chat(service, [*system, {"role": "user", "content": content_of(self.prompt, self.images)}])

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


def head_of(body: Asked) -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    return {"model": body.model, "created_at": now}


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The calls of a message, their arguments as objects; one that the length cut off is left out."""
    found = []
    for index, call in enumerate(message.tool_calls):
        with suppress(ValueError):
            found.append({"function": {"index": index, "name": call.name, "arguments": json.loads(call.arguments)}})
    return found


def end_of(result: GenerationResult, reason: str) -> dict[str, Any]:
    """The members with which an answer ends; times are in nanoseconds."""
    times, usage = result.timings, result.usage

    def ns(seconds: float) -> int:
        return round(seconds * 1e9)

    return {
        "done": True,
        "done_reason": "length" if reason == "length" else "stop",
        "total_duration": ns(times.queue_s + times.ttft_s + times.decode_s),
        "load_duration": ns(times.queue_s),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": ns(times.ttft_s),
        "eval_count": usage.completion_tokens,
        "eval_duration": ns(times.decode_s),
    }


async def make_lines(body: OllamaChat | OllamaPrompt, handle: ChatHandle) -> AsyncIterator[dict[str, Any]]:
    """An answer as it comes: text and thoughts, then the calls, and the end."""
    async for delta in handle.deltas_async():
        if delta.content or delta.reasoning:
            yield {**head_of(body), **body.member(delta.content, delta.reasoning), "done": False}
    result = await handle
    if result.message.tool_calls:
        yield {**head_of(body), **body.member(calls=calls_of(result.message)), "done": False}
    yield {**head_of(body), **body.member(), **end_of(result, result.message.finish_reason)}


class Lines(EventStream):
    """Lines of JSON; no heartbeats, which the format has no room for."""

    media_type = "application/x-ndjson"

    def __init__(self, pieces: AsyncIterator[dict[str, Any]], held: AsyncExitStack) -> None:
        guarded = guard_pieces(pieces, encode_line, lambda error: encode_line({"error": error.message}))
        super().__init__(guarded, held, 0)


def encode_line(value: dict[str, Any]) -> bytes:
    """A line of JSON."""
    return encode_json(value).encode() + b"\n"


# ------------------------------------------------------------------------------------------------------------- routes


@router.post("/api/chat")
async def chat(body: Annotated[OllamaChat, take_body(OllamaChat)], request: Request, service: Served) -> Response:
    """Answer a conversation, in lines of JSON unless ``stream`` is false. Without messages the model is loaded."""
    return await answer_chat(body, request, service, empty=not body.messages)


@router.post("/api/generate")
async def generate(
    body: Annotated[OllamaPrompt, take_body(OllamaPrompt)], request: Request, service: Served
) -> Response:
    """Answer a prompt, through the chat template unless it is raw, in lines of JSON unless ``stream`` is false."""
    if body.raw and body.prompt:
        return await complete(body, request, service)
    return await answer_chat(body, request, service, empty=not body.prompt)


async def answer_chat(body: OllamaChat | OllamaPrompt, request: Request, service: Service, *, empty: bool) -> Response:
    """Answer through the chat template; what is empty asks for the model to be loaded, and no more."""
    async with AsyncExitStack() as held:
        if empty:
            await held.enter_async_context(service.model(parse_model_name(service, body.model)))
            return JSONResponse({**head_of(body), **body.member(), "done": True, "done_reason": "load"})
        asked = await aside(lambda: body.request(service))
        _, handle = await open_chat(asked, held, service)
        if body.stream:
            return Lines(make_lines(body, handle), held.pop_all())
        result = await unless_gone(request.receive, handle)
        message = result.message
        member = body.member(message.content, message.reasoning or "", calls_of(message))
        return JSONResponse({**head_of(body), **member, **end_of(result, message.finish_reason)})


async def complete(body: OllamaPrompt, request: Request, service: Service) -> Response:
    """Answer a raw prompt."""
    for name in ("system", "format", "think", "images"):
        if getattr(body, name):
            raise ApiError(400, f"{name} is given beside raw, which leaves the template out; leave {name} out")
    asked = CompletionRequest.model_validate({"prompt": body.prompt, "max_tokens": ANY, **body.options.plain()})
    arguments = {"parse_special": service.config.allow_special, **service.bound_sampling(asked.arguments())}

    def make(model: Model) -> "partial[Handle]":
        return partial(model.stream, body.prompt, **arguments)

    async def lines(handle: Handle) -> AsyncIterator[dict[str, Any]]:
        async for delta in handle.events_async():
            if delta.text:
                yield {**head_of(body), **body.member(delta.text), "done": False}
        result = await handle
        yield {**head_of(body), **body.member(), **end_of(result, result.finish_reason)}

    async with AsyncExitStack() as held:
        names = {"max_tokens": "options.num_predict"}
        _, handle = await service.submit(held, parse_model_name(service, body.model), names, make)
        if body.stream:
            return Lines(lines(handle), held.pop_all())
        result = await unless_gone(request.receive, handle)
        return JSONResponse({**head_of(body), **body.member(result.text), **end_of(result, result.finish_reason)})


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
async def tags(service: Served) -> dict[str, Any]:
    """The models that are served to this client."""
    return {"models": [card(service, name) for name in service.names]}


@router.get("/api/ps")
async def running(service: Served) -> dict[str, Any]:
    """Those of them that are loaded."""
    loaded = service.pool.models()
    return {"models": [card(service, name) for name in service.names if service.pool.base(name) in loaded]}


@router.get("/api/version")
async def version() -> dict[str, Any]:
    """The version of Ollama whose dialect this is."""
    return {"version": SPOKEN_VERSION}


class Named(Body):
    IGNORED = frozenset({"verbose"})
    model: str | None = None
    name: Annotated[str | None, Field(description="the older name of model")] = None


@router.post("/api/show")
async def show(body: Annotated[Named, take_body(Named)], service: Served) -> dict[str, Any]:
    """The facts of a model, and its abilities."""
    if not (name := body.model or body.name):
        raise ApiError(400, "model is missing; give it", param="model")
    name = service.name(parse_model_name(service, name))
    manifest = service.pool.manifest(name)
    geometry = manifest.geometry
    encoder, family = geometry.encoder, geometry.model_type
    calls = service.pool.has_template(name) and geometry.diffusion is None
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
