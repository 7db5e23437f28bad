"""OpenAI's completions: a prompt as text or tokens, and what follows it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from llmc.runtime import GenerationResult, Handle, Model
from llmc.runtime.api.results import Delta
from llmc.runtime.server.dialects.logprobs import completion_logprobs, text_offsets
from llmc.runtime.server.http.aside import apart, aside
from llmc.runtime.server.http.bodies import (
    ANY,
    Logged,
    LogitBias,
    Sampled,
    StreamOptions,
    StreamUsage,
    list_texts,
    usage_of,
)
from llmc.runtime.server.http.errors import ApiError, name_parameters
from llmc.runtime.server.http.ignored import ignore
from llmc.runtime.server.http.logs import note
from llmc.runtime.server.http.streams import EventStream, encode_json, guard_chunks, make_answer, unless_gone
from llmc.runtime.server.http.validation import take_body
from llmc.runtime.server.models.service import Served, Service

router = APIRouter(tags=["OpenAI"])
MOST_PROMPTS = 128  # of one request; each is a request to the engine
MOST_ENTRIES = 1 << 20  # log-probabilities of prompts, which take some 200 bytes each
DEFAULT_TOKENS = 16  # OpenAI's own, which clients of completions rely on


class CompletionRequest(Sampled):
    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: Annotated[
        str | None, Field(description="text after the gap that the completion fills, for models with marks for it")
    ] = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool | None = None
    logit_bias: LogitBias = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: Annotated[bool | None, Field(description="BOS and its like around a text; on by default")] = (
        None
    )
    user: Logged = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. Raises ApiError: there are none, or too many."""
        return list_texts("prompt", self.prompt, MOST_PROMPTS)

    @property
    def is_prompt_alone(self) -> bool:
        """True if the answer is the prompt, and no token after it."""
        return self.echo is True and self.max_tokens == 0

    def arguments(self) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.stream` beside the prompt.
        Raises ApiError: parameters contradict each other."""
        if self.stream_options is not None and not self.stream:
            ignore("stream_options")
        if self.suffix and self.echo and self.logprobs is not None:
            said = "suffix cannot be combined with log-probabilities of the prompt; leave echo, logprobs or suffix out"
            raise ApiError(400, said, param="suffix")
        most = DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling(
            max_tokens=1 if self.is_prompt_alone else None if most == ANY else most,
            stop=self.stop,
            n=self.n,
            best_of=self.best_of,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            logit_bias=self.logit_bias,
            add_special_tokens=self.add_special_tokens,
            suffix=self.suffix or None,
        )


def choices_of(model: Model, body: CompletionRequest, results: list[GenerationResult]) -> list[dict[str, Any]]:
    """All completions; those of a prompt follow each other."""
    found: list[dict[str, Any]] = []
    for prompt, result in zip(body.prompts(), results, strict=True):
        echoed = echo_of(model, prompt) if body.echo else ""
        for output in result.outputs:
            text, chosen = ("", ()) if body.is_prompt_alone else (output.text, output.logprobs)
            logprobs = completion_logprobs(model, chosen, text, len(echoed))
            if body.logprobs is not None and body.echo:
                before = _prompt_logprobs(model, body, prompt, echoed, result)
                logprobs = {name: [*before[name], *of_name] for name, of_name in (logprobs or {}).items()}
            reason = output.finish_reason
            found.append({"index": len(found), "text": echoed + text, "logprobs": logprobs, "finish_reason": reason})
    return found


def echo_of(model: Model, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, skip_special_tokens=False)


def _prompt_logprobs(
    model: Model, body: CompletionRequest, prompt: str | list[int], echoed: str, result: GenerationResult
) -> dict[str, list[Any]]:
    later = result.prompt_logprobs or ()
    if isinstance(prompt, str):
        around = body.add_special_tokens is not False
        parsed = model.tokenizer.encode(prompt, around)
        # The settings, the key or the request may have had special tokens that it spells taken for text.
        prompt = parsed if len(parsed) == len(later) + 1 else model.tokenizer.encode_plain(prompt, around)
    found = completion_logprobs(model, later, "") or {}
    spelt = model.tokenizer.spell(prompt[0]).decode("utf-8", "replace")
    return {
        "tokens": [spelt, *found["tokens"]],
        "token_logprobs": [None, *found["token_logprobs"]],
        "top_logprobs": [None, *found["top_logprobs"]],
        "text_offset": text_offsets(model, [prompt[0], *(one.token for one in later)], echoed),
    }


async def merge_deltas(handles: list[Handle]) -> AsyncIterator[tuple[int, Delta]]:
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
    """The pieces of the answer as JSON, reasons of the end, and the usage if the client wants it."""
    head, outputs = service.head("cmpl", "text_completion", model, body.model), handles[0].outputs
    usage = StreamUsage(body.stream_options, [handle.prompt_tokens for handle in handles for _ in range(outputs)])
    lengths = [0] * (outputs * len(handles))
    # Log-probabilities of a prompt, which come before the completion's, are known at the end alone.
    whole = body.is_prompt_alone or (body.echo and body.logprobs is not None)

    def chunk(index: int, text: str, **rest: Any) -> str:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **rest}
        return encode_json({**head, **usage.member(index), "choices": [choice]})

    if body.echo and not whole:
        for index in range(len(lengths)):
            yield chunk(index, echo_of(model, body.prompts()[index // outputs]))
    async for number, delta in merge_deltas(handles):
        index = number * outputs + delta.index
        usage.add(index, 0 if body.is_prompt_alone else len(delta.token_ids))
        if (delta.text or delta.logprobs) and not whole:
            logprobs = completion_logprobs(model, delta.logprobs or None, delta.text, lengths[index])
            yield chunk(index, delta.text, logprobs=logprobs)
        lengths[index] += len(delta.text)
    results = await _results(body, handles)
    for choice in await apart(lambda: choices_of(model, body, results)) if whole else ():
        yield await apart(partial(chunk, choice["index"], choice["text"], logprobs=choice["logprobs"]))
    for number, result in enumerate(results):
        for place, output in enumerate(result.outputs):
            yield chunk(number * outputs + place, "", finish_reason=output.finish_reason)
    if usage.ends:
        yield encode_json({**head, "choices": [], "usage": usage_of(results)})


async def _submit_prompts(
    body: CompletionRequest, held: AsyncExitStack, service: Service
) -> tuple[Model, list[Handle]]:
    note(user=body.user)
    prompts = body.prompts()
    arguments = service.bound_sampling(await aside(body.arguments), len(prompts), raw=True)
    model, adapter = await held.enter_async_context(service.generator(body.model)), service.adapter(body.model)
    handles = []
    for prompt in prompts:
        with name_parameters({"prompt": "prompt"} | body.form_names):
            handle = await service.submit_promptly(partial(model.stream, prompt, **arguments, **adapter))
        held.callback(handle.cancel)
        handles.append(handle)
        if body.echo and body.logprobs is not None:
            tokens = sum(handle.prompt_tokens for handle in handles)
            if tokens * (body.logprobs + 1) > MOST_ENTRIES:
                said = f"prompt holds {tokens} tokens, of which each would be told with {body.logprobs} others"
                said = f"{said}, {MOST_ENTRIES} at most altogether; send fewer prompts, or ask for fewer logprobs"
                raise ApiError(400, said, param="prompt")
    await service.wait_turn(*handles)
    return model, handles


async def _results(body: CompletionRequest, handles: list[Handle]) -> list[GenerationResult]:
    """The results; where the prompt alone was asked for, without the token that the engine cannot do without."""
    found = [await handle for handle in handles]
    if body.is_prompt_alone:
        return [replace(result, usage=replace(result.usage, completion_tokens=0)) for result in found]
    return found


@router.post("/v1/completions")
async def completions(
    body: Annotated[CompletionRequest, take_body(CompletionRequest)], request: Request, service: Served
) -> Response:
    """Complete prompts. With ``stream`` the answer comes as server-sent events that end with ``[DONE]``."""
    async with AsyncExitStack() as held:
        model, handles = await _submit_prompts(body, held, service)
        if body.stream:
            events = guard_chunks(chunks(body, service, model, handles))
            return EventStream(events, held.pop_all(), service.config.heartbeat_s)
        results = await unless_gone(request.receive, _results(body, handles))
        head = service.head("cmpl", "text_completion", model, body.model)

        def made() -> dict[str, Any]:
            choices = choices_of(model, body, results)
            return {**head, "choices": choices, "usage": usage_of(results)}

        return await make_answer(made, large=bool(body.echo) or body.logprobs is not None)
