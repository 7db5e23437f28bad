"""OpenAI's transcriptions: audio in, and what is said in it."""

import math
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import PlainTextResponse

from llmc.errors import ContextError
from llmc.runtime.api.chat import ChatResult
from llmc.runtime.api.transcript import Transcript, TranscriptHandle, find_language, make_messages
from llmc.runtime.server.http.bodies import Asked
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.streams import event, guard_pieces, make_answer
from llmc.runtime.server.http.validation import take_form
from llmc.runtime.server.turn import Turn

router = APIRouter(tags=["OpenAI"])


class TranscriptionRequest(Asked):
    file: Annotated[bytes, Field(description="WAV, FLAC, Ogg or MP3")]
    model: str | None = None
    language: Annotated[str | None, Field(description="ISO 639 code or English name; recognized by default")] = None
    prompt: Annotated[str | None, Field(description="names and words that may occur, or the topic")] = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    stream: bool | None = None

    @property
    def names(self) -> dict[str, str]:
        """This dialect's names of llmc's parameters."""
        return {"prompt": "file", "messages": "file"}


def usage_of(result: ChatResult) -> dict[str, Any]:
    prompt, made = result.usage.prompt_tokens, result.usage.completion_tokens
    return {"type": "tokens", "input_tokens": prompt, "output_tokens": made, "total_tokens": prompt + made}


class TranscriptionTurn(Turn[TranscriptionRequest, TranscriptHandle]):
    """Audio, and its transcript."""

    async def read(self) -> tuple[list[Any], dict[str, Any]]:
        body = self.body
        if self.service.pool.manifest(self._base).geometry.audio is None:
            said = f"the model {self.name!r} hears no audio; GET /v1/models lists those that do (x_llmc.hears)"
            raise ApiError(400, said, param="model")
        if body.stream and body.response_format != "json":
            raise ApiError(400, "stream is true, expected response_format json with it", param="response_format")
        find_language(body.language)
        sampling = {} if body.temperature is None else {"temperature": body.temperature}
        return [make_messages(body.file, body.prompt, "")], sampling

    def start(self, prompt: Any, arguments: dict[str, Any]) -> TranscriptHandle:
        body = self.body
        return self.model.stream_transcript(body.file, language=body.language, prompt=body.prompt, **arguments)

    def _read_result(self, result: ChatResult) -> Transcript:
        """Raises ContextError: the transcript was cut off."""
        if result.outputs[0].finish_reason == "length":
            tokens = result.usage.completion_tokens
            raise ContextError(f"the transcript goes on after {tokens} tokens", "send shorter audio")
        return self.handle.transcript(result)

    async def make_whole(self, result: ChatResult) -> Response:
        found = self._read_result(result)
        if self.body.response_format == "text":
            return PlainTextResponse(f"{found.text}\n")
        answer: dict[str, Any] = {"text": found.text, "usage": usage_of(result)}
        if self.body.response_format == "verbose_json":
            usage = {"type": "duration", "seconds": math.ceil(found.seconds)}
            about = {"task": "transcribe", "language": (found.language or "").lower(), "duration": found.seconds}
            answer = {**about, "text": found.text, "usage": usage}
        return await make_answer(partial(dict, answer), large=False)

    def events(self) -> AsyncIterator[bytes]:
        return guard_pieces(self.pieces(), event, lambda error: event(error.body), end=b"data: [DONE]\n\n")

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """The text as it comes, and all of it."""
        async for delta in self.handle.deltas_async():
            if delta.content:
                yield {"type": "transcript.text.delta", "delta": delta.content}
        result = await self.handle
        yield {"type": "transcript.text.done", "text": self._read_result(result).text, "usage": usage_of(result)}


@router.post("/v1/audio/transcriptions")
async def transcriptions(
    body: Annotated[TranscriptionRequest, take_form(TranscriptionRequest)], request: Request
) -> Response:
    """Write down what is said in audio. With ``stream`` the text comes as server-sent events that end with
    ``[DONE]``."""
    return await TranscriptionTurn(body, request).answer()


@router.post("/v1/audio/translations")
async def translations() -> Response:
    """Refused: models write in the language that is spoken."""
    said = "translations are not made: models write in the language that is spoken; use /v1/audio/transcriptions"
    raise ApiError(400, said)
