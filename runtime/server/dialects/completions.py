"""OpenAI's completions: a prompt as text or tokens, and what follows it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from llmc.runtime import GenerationResult, Handle
from llmc.runtime.api.results import Delta
from llmc.runtime.server.dialects.openai import (
    OpenAITurn,
    StreamOptions,
    StreamUsage,
    completion_logprobs,
    text_offsets,
    usage_of,
)
from llmc.runtime.server.http.bodies import ANY, Logged, LogitBias, Sampled, list_texts
from llmc.runtime.server.http.call import apart
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.streams import encode_json, make_answer
from llmc.runtime.server.http.validation import take_body

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
    def names(self) -> dict[str, str]:
        """This dialect's names of llmc's parameters."""
        return {"prompt": "prompt"} | self.form_names

    @property
    def echoes_logprobs(self) -> bool:
        """True if the answer has log-probabilities of the prompt."""
        return self.echo is True and self.logprobs is not None

    @property
    def is_prompt_alone(self) -> bool:
        """True if the answer is the prompt, and no token after it."""
        return self.echo is True and self.max_tokens == 0

    def arguments(self) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.stream` beside the prompt.
        Raises ApiError: parameters contradict each other."""
        if self.stream_options is not None and not self.stream:
            self.ignore("stream_options")
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


class CompletionTurn(OpenAITurn[CompletionRequest, Handle]):
    """Prompts, and what follows them."""

    RAW = True

    async def read(self) -> tuple[list[Any], dict[str, Any]]:
        self.call.note(user=self.body.user)
        return self.body.prompts(), await self.call.aside(self.body.arguments)

    def check(self) -> None:
        logprobs, tokens = self.body.logprobs, sum(handle.prompt_tokens for handle in self.handles)
        if self.body.echo and logprobs is not None and tokens * (logprobs + 1) > MOST_ENTRIES:
            said = f"prompt holds {tokens} tokens, of which each would be told with {logprobs} others"
            said = f"{said}, {MOST_ENTRIES} at most altogether; send fewer prompts, or ask for fewer logprobs"
            raise ApiError(400, said, param="prompt")

    def result(self) -> Awaitable[list[GenerationResult]]:
        return self._results()

    async def _results(self) -> list[GenerationResult]:
        """The results; if the prompt alone is asked for, without the token that the engine cannot do without."""
        results = [await handle for handle in self.handles]
        if self.body.is_prompt_alone:
            return [replace(result, usage=replace(result.usage, completion_tokens=0)) for result in results]
        return results

    async def make_whole(self, result: list[GenerationResult]) -> Response:
        head = self.head("cmpl", "text_completion")

        def make() -> dict[str, Any]:
            return {**head, "choices": self.choices(result), "usage": usage_of(result)}

        return await make_answer(make, large=bool(self.body.echo) or self.body.logprobs is not None)

    def choices(self, results: list[GenerationResult]) -> list[dict[str, Any]]:
        """All completions; those of a prompt follow each other."""
        body = self.body
        found: list[dict[str, Any]] = []
        for prompt, result in zip(body.prompts(), results, strict=True):
            echoed = self._echo(prompt) if body.echo else ""
            for output in result.outputs:
                text, chosen = ("", ()) if body.is_prompt_alone else (output.text, output.logprobs)
                logprobs = completion_logprobs(self.model, chosen, text, len(echoed))
                if body.echoes_logprobs:
                    before = self._prompt_logprobs(prompt, echoed, result)
                    logprobs = {name: [*before[name], *of_name] for name, of_name in (logprobs or {}).items()}
                choice = {"index": len(found), "text": echoed + text, "logprobs": logprobs}
                found.append({**choice, "finish_reason": output.finish_reason})
        return found

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.model.tokenizer.decode(prompt, skip_special_tokens=False)

    def _prompt_logprobs(self, prompt: str | list[int], echoed: str, result: GenerationResult) -> dict[str, list[Any]]:
        later, tokenizer = result.prompt_logprobs or (), self.model.tokenizer
        if isinstance(prompt, str):
            around = self.body.add_special_tokens is not False
            parsed = tokenizer.encode(prompt, around)
            # The settings, the key or the request may have had special tokens that it spells taken for text.
            prompt = parsed if len(parsed) == len(later) + 1 else tokenizer.encode_plain(prompt, around)
        found = completion_logprobs(self.model, later, "") or {}
        return {
            "tokens": [tokenizer.spell(prompt[0]).decode("utf-8", "replace"), *found["tokens"]],
            "token_logprobs": [None, *found["token_logprobs"]],
            "top_logprobs": [None, *found["top_logprobs"]],
            "text_offset": text_offsets(self.model, [prompt[0], *(one.token for one in later)], echoed),
        }

    async def pieces(self) -> AsyncIterator[str]:
        """Chunks: texts, reasons of the end, and the usage if the client wants it."""
        body, head, outputs = self.body, self.head("cmpl", "text_completion"), self.handle.outputs
        prompts = [handle.prompt_tokens for handle in self.handles for _ in range(outputs)]
        usage, lengths = StreamUsage(body.stream_options, prompts), [0] * len(prompts)
        # Log-probabilities of a prompt come before the completion's, and are known at the end only.
        whole = body.is_prompt_alone or body.echoes_logprobs

        def chunk(index: int, text: str, **rest: Any) -> str:
            choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **rest}
            return encode_json({**head, **usage.member(index), "choices": [choice]})

        if body.echo and not whole:
            for index in range(len(lengths)):
                yield chunk(index, self._echo(body.prompts()[index // outputs]))
        async for number, delta in merge_deltas(self.handles):
            index = number * outputs + delta.index
            usage.add(index, 0 if body.is_prompt_alone else len(delta.token_ids))
            if (delta.text or delta.logprobs) and not whole:
                logprobs = completion_logprobs(self.model, delta.logprobs or None, delta.text, lengths[index])
                yield chunk(index, delta.text, logprobs=logprobs)
            lengths[index] += len(delta.text)
        results = await self._results()
        for choice in await apart(partial(self.choices, results)) if whole else ():
            yield await apart(partial(chunk, choice["index"], choice["text"], logprobs=choice["logprobs"]))
        for number, result in enumerate(results):
            for place, output in enumerate(result.outputs):
                yield chunk(number * outputs + place, "", finish_reason=output.finish_reason)
        if usage.ends:
            yield encode_json({**head, "choices": [], "usage": usage_of(results)})


@router.post("/v1/completions")
async def completions(body: Annotated[CompletionRequest, take_body(CompletionRequest)], request: Request) -> Response:
    """Complete prompts. With ``stream`` the answer comes as server-sent events that end with ``[DONE]``."""
    return await CompletionTurn(body, request).answer()
