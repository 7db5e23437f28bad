"""OpenAI's completions: a prompt as text or tokens, and what follows it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response, WebSocket
from pydantic import Field
from starlette.responses import JSONResponse
from typing_extensions import NotRequired, TypedDict

from llmc.runtime import GenerationResult, Handle, Model
from llmc.runtime.api.results import Delta
from llmc.runtime.server.bodies import Logged, Sampled, StreamOptions, Usage, biases, check_stream, told, usage_of
from llmc.runtime.server.errors import ApiError, named
from llmc.runtime.server.logprobs import completion_logprobs
from llmc.runtime.server.logs import note
from llmc.runtime.server.service import Service, service_at, service_of, submitted
from llmc.runtime.server.sockets import converse
from llmc.runtime.server.streams import Chunks, EventStream, guarded, unless_gone
from llmc.runtime.server.validation import read_json

router = APIRouter(tags=["OpenAI"])
MOST_PROMPTS = 128  # of one request; each is a request to the engine
DEFAULT_TOKENS = 16  # OpenAI's own, which clients of completions rely on


class CompletionRequest(Sampled):
    """The body of POST /v1/completions."""

    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: Annotated[bool | None, Field(description="BOS and its like around a text; on by default")] = (
        None
    )
    user: Logged = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one.

        Raises:
            ApiError: there are none, or too many.
        """
        given: Any = self.prompt
        several = isinstance(given, list) and not (given and isinstance(given[0], int))
        found = list(given) if several else [given]
        if not 1 <= len(found) <= MOST_PROMPTS:
            raise ApiError(400, f"prompt holds {len(found)} prompts, expected 1 to {MOST_PROMPTS}", param="prompt")
        return found

    def arguments(self) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.stream` beside the prompt.

        Raises:
            ApiError: parameters contradict each other.
        """
        check_stream(self.stream, self.stream_options)
        if self.echo and self.stream:
            raise ApiError(400, "echo repeats the prompt in whole answers only; leave stream or echo out", param="echo")
        return self.sampling(
            max_tokens=DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens,
            stop=self.stop,
            n=self.n,
            best_of=self.best_of,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            logit_bias=biases(self.logit_bias),
            add_special_tokens=self.add_special_tokens,
        )


class CompletionChoice(TypedDict):
    """One completion of one prompt."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None


class Completion(TypedDict):
    """The answer to a completion request."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str
    x_llmc: NotRequired[dict[str, Any]]


def choices_of(model: Model, body: CompletionRequest, results: list[GenerationResult]) -> list[CompletionChoice]:
    """All completions; those of a prompt follow each other."""
    found: list[CompletionChoice] = []
    for prompt, result in zip(body.prompts(), results, strict=True):
        echoed = ""
        if body.echo:
            echoed = prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, skip_special_tokens=False)
        for output in result.outputs:
            logprobs = completion_logprobs(model, output.logprobs, len(echoed))
            if logprobs is not None and body.echo:
                logprobs = _echoed(model, prompt, result, logprobs)
            found.append(
                {
                    "index": len(found),
                    "text": echoed + output.text,
                    "logprobs": logprobs,
                    "finish_reason": output.finish_reason,
                }
            )
    return found


def _echoed(
    model: Model, prompt: str | list[int], result: GenerationResult, logprobs: dict[str, Any]
) -> dict[str, Any]:
    """Log-probabilities with those of the prompt before them; its first token has none."""
    of_prompt = completion_logprobs(model, result.prompt_logprobs or (), 0) or {}
    first = model.tokenizer.encode(prompt)[:1] if isinstance(prompt, str) else prompt[:1]
    text = model.tokenizer.spelling(first[0]).decode("utf-8", "replace")
    shifted = [offset + len(text) for offset in of_prompt["text_offset"]]
    of_first: dict[str, list[Any]] = {"tokens": [text], "token_logprobs": [None], "top_logprobs": [None]}
    before = {name: [*found, *of_prompt[name]] for name, found in of_first.items()} | {"text_offset": [0, *shifted]}
    return {name: [*before[name], *logprobs[name]] for name in logprobs}


async def merged(handles: list[Handle]) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of several requests as they come, each with the number of its request."""
    streams = [handle.events_async() for handle in handles]
    waiting = {asyncio.ensure_future(anext(stream)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                if isinstance(task.exception(), StopAsyncIteration):
                    continue
                yield number, task.result()
                waiting[asyncio.ensure_future(anext(streams[number]))] = number
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def chunks(body: CompletionRequest, service: Service, model: Model, handles: list[Handle]) -> AsyncIterator[str]:
    """The pieces of the answer as JSON, reasons of the end, and the usage unless the client wants none."""
    chunk_of, outputs = Chunks(service.head("cmpl", "text_completion", body.model)), handles[0].outputs
    lengths = [0] * (outputs * len(handles))

    def chunk(index: int, text: str, **rest: Any) -> str:
        return chunk_of(choices=[{"index": index, "text": text, "logprobs": None, "finish_reason": None, **rest}])

    async for number, delta in merged(handles):
        index = number * outputs + delta.index
        if delta.text or delta.logprobs:
            yield chunk(index, delta.text, logprobs=completion_logprobs(model, delta.logprobs or None, lengths[index]))
        lengths[index] += len(delta.text)
    results = [await handle for handle in handles]
    for number, result in enumerate(results):
        for place, output in enumerate(result.outputs):
            yield chunk(number * outputs + place, "", finish_reason=output.finish_reason)
    told_of = told(body.x_llmc, model, results[0])
    if told_of or not (body.stream_options and body.stream_options.include_usage is False):
        yield chunk_of(choices=[], usage=usage_of(results), **told_of)


async def _opened(body: CompletionRequest, held: AsyncExitStack, service: Service) -> tuple[Model, list[Handle]]:
    """Submit a request for each prompt; model and requests are held until ``held`` is closed."""
    note(user=body.user)
    arguments, prompts = service.bounded(body.arguments()), body.prompts()
    arguments["parse_special"] = service.parses_special(body.parse_special, service.config.allow_special)
    model = await held.enter_async_context(service.generator(body.model))
    handles = []
    for prompt in prompts:
        with named({"prompt": "prompt"}):
            handle = await submitted(partial(model.stream, prompt, **arguments))
        held.callback(handle.cancel)
        handles.append(handle)
    return model, handles


async def _events(service: Service, body: CompletionRequest, held: AsyncExitStack) -> AsyncIterator[str]:
    model, handles = await _opened(body, held, service)
    return chunks(body, service, model, handles)


async def _results(handles: list[Handle]) -> list[GenerationResult]:
    return [await handle for handle in handles]


@router.post("/v1/completions", response_model=Completion)
async def completions(body: CompletionRequest, request: Request, service: Service = Depends(service_of)) -> Response:  # noqa: B008
    """Complete prompts. With ``stream`` the answer comes as server-sent events that end with ``[DONE]``."""
    async with AsyncExitStack() as held:
        if body.stream:
            events = guarded(await _events(service, body, held))
            return EventStream(events, held.pop_all(), service.config.heartbeat_s)
        model, handles = await _opened(body, held, service)
        results = await unless_gone(request, _results(handles))
        choices = choices_of(model, body, results)
        told_of = told(body.x_llmc, model, results[0])
        return JSONResponse(
            {
                **service.head("cmpl", "text_completion", body.model),
                "choices": choices,
                "usage": usage_of(results),
                **told_of,
            }
        )


@router.websocket("/v1/completions")
async def completion_socket(socket: WebSocket) -> None:
    """The same over a WebSocket: a body as text in, the stream's chunks as texts out."""
    await converse(socket, partial(read_json, CompletionRequest), partial(_events, service_at(socket)))
