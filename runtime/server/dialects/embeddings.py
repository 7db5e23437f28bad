"""Vectors in OpenAI's form, and what all routes for vectors and scores share."""

import base64
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from anyio import to_thread
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import Field

from llmc.errors import DeadlineError, QueueFullError, format_value
from llmc.runtime import Embedder
from llmc.runtime.server.http.bodies import Asked, list_texts
from llmc.runtime.server.http.call import LARGE, call_of
from llmc.runtime.server.http.errors import ApiError, name_parameters
from llmc.runtime.server.http.streams import make_answer
from llmc.runtime.server.http.validation import take_body
from llmc.runtime.server.models.service import Service

router = APIRouter(tags=["Embeddings"])
MOST_TEXTS = 2048  # of one request, as OpenAI has it
# Texts between two looks whether the client is still there; many enough to share the model's calls.
PIECE = 32
MOST_WAITING = 256  # requests, where the settings say nothing
# Names of one kind of text in different APIs and checkpoints.
KINDS_OF_TEXT = (
    ("query", "search_query", "retrieval.query"),
    ("document", "passage", "search_document", "retrieval.passage"),
)
Rows = Sequence[Sequence[int]]
Results = NDArray[np.float32]  # (texts, width), or (texts, 1) of scores

Truncate = Annotated[
    bool, Field(description="leave out the end of a text that is too long, which is refused otherwise; extension")
]
Instruction = Annotated[
    str | None, Field(description="name of one of the checkpoint's prompts, or a task in words; extension of llmc")
]


class EmbeddingRequest(Asked):
    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    instruction: Instruction = None
    input_type: Annotated[
        str | None, Field(description="kind of text, such as query or document: the checkpoint's prompt for it; Voyage")
    ] = None
    task: Annotated[str | None, Field(description="the same in Jina's words, such as retrieval.query")] = None
    truncate: Truncate = False
    user: Annotated[str | None, Field(description="written into the log")] = None

    def texts(self) -> list[Any]:
        """The texts, or their tokens, one by one.
        Raises ApiError: there are none, or too many; or a prompt is asked for twice, or for tokens."""
        found: list[Any] = list_texts("input", self.input, MOST_TEXTS)
        asked = [name for name in ("instruction", "input_type", "task") if getattr(self, name) is not None]
        if asked and not isinstance(found[0], str):
            raise ApiError(400, f"{asked[0]} stands before a text, but input holds tokens", param=asked[0])
        if asked[1:]:
            raise ApiError(400, f"{' and '.join(asked)} each name a prompt; leave one out", param=asked[1])
        return found

    def prompt(self, names: Collection[str]) -> str | None:
        """The instruction: given as it is, or the one of the checkpoint's prompts ``names`` for the kind of text.
        Raises ApiError: the checkpoint has prompts, but none for this kind."""
        place = "task" if self.input_type is None else "input_type"
        kind = getattr(self, place)
        if kind is None:
            return self.instruction
        if not names:
            self.ignore(place)  # all texts are embedded alike
            return None
        alike = next((group for group in KINDS_OF_TEXT if kind.lower() in group), ())
        for wanted in (kind.lower(), *alike):
            for name in names:
                if name.lower() == wanted:
                    return name
        raise ApiError(400, f"{place} is {format_value(kind)}, expected one of {', '.join(names)}", param=place)


def usage_of(rows: Rows) -> dict[str, Any]:
    tokens = sum(map(len, rows))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def encode_base64(vectors: Results) -> list[str]:
    """Each vector's values, little-endian float32, in base64."""
    return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]


async def encode_texts(request: Request, model: Embedder, tokenize: Callable[[], Rows]) -> tuple[Rows, Results]:
    """Tokens and results of texts, computed piece by piece while the client is there and the deadline has not passed.

    A running piece is waited for, since the model must stay until it ends.

    Raises:
        QueueFullError: as many requests wait as may wait.
        ApiError: the client is gone.
        DeadlineError: the deadline of the server's settings has passed.
    """
    service: Service = request.app.state.service
    most = service.config.max_queue or MOST_WAITING
    if service.encoding.statistics().tasks_waiting >= most:
        raise QueueFullError(f"{most} requests for vectors or scores wait already; try again later")
    seconds, began = service.config.request_deadline_s, time.monotonic()
    rows = await to_thread.run_sync(tokenize, limiter=service.encoding)
    call_of(request.scope).client.spend(tokens=sum(map(len, rows)))
    found = []
    for start in range(0, len(rows), PIECE):
        if await request.is_disconnected():
            raise ApiError(499, "the client closed the connection before the answer was there")
        if seconds is not None and time.monotonic() - began > seconds:
            raise DeadlineError(f"the request was not finished within {seconds} s; send fewer texts")
        work = partial(model.encode, rows[start : start + PIECE])
        found.append(await to_thread.run_sync(work, limiter=service.encoding))
    return rows, np.concatenate(found)


async def compute_vectors(body: EmbeddingRequest, request: Request) -> tuple[str, Rows, Results]:
    """The model's name, and tokens and vectors of the texts.
    Raises what :func:`encode_texts` does; ApiError: the model does not embed."""
    texts, service = body.texts(), request.app.state.service
    name = service.find_for(call_of(request.scope), body.model, "embeddings")
    async with service.pool.lease(name) as model:
        encoder: Embedder = model
        width = encoder.vector_width(body.dimensions)
        if isinstance(texts[0], str):
            prompt = body.prompt(encoder.prompt_names)
            tokenize = partial(encoder.text_tokens, texts, instruction=prompt, truncate=body.truncate)
        else:
            tokenize = partial(encoder.check_token_ids, texts, truncate=body.truncate)
        with name_parameters({"prompt": "input"}):
            rows, vectors = await encode_texts(request, model, tokenize)
    return name, rows, encoder.cut(vectors, width)


@router.post("/v1/embeddings")
async def embeddings(body: Annotated[EmbeddingRequest, take_body(EmbeddingRequest)], request: Request) -> Response:
    """Vectors of texts, of length one where the checkpoint normalises."""
    name, rows, vectors = await compute_vectors(body, request)

    def made() -> dict[str, Any]:
        found: Any = encode_base64(vectors) if body.encoding_format == "base64" else vectors.tolist()
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(found)]
        return {"object": "list", "data": data, "model": name, "usage": usage_of(rows)}

    return await make_answer(made, large=vectors.size > LARGE)
