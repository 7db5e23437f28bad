"""Vectors in OpenAI's form, and scores of documents in the form that Cohere and Jina share."""

import base64
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from anyio import to_thread
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import Field
from starlette.responses import JSONResponse

from llmc.errors import DeadlineError, QueueFullError
from llmc.runtime import Embedder
from llmc.runtime.server.http.bodies import Body, list_texts
from llmc.runtime.server.http.call import LARGE, call_of
from llmc.runtime.server.http.errors import ApiError, name_parameters
from llmc.runtime.server.http.streams import make_answer
from llmc.runtime.server.http.validation import take_body
from llmc.runtime.server.models.service import Served, Service, new_id

router = APIRouter(tags=["Embeddings"])
MOST_TEXTS = 2048  # of one request, as OpenAI has it
# Texts between two looks whether the client is still there; many enough to share the model's calls.
PIECE = 32
MOST_WAITING = 256  # requests, where the settings say nothing
Rows = Sequence[Sequence[int]]
Results = NDArray[np.float32]  # (texts, width), or (texts, 1) of scores

Truncate = Annotated[
    bool, Field(description="leave out the end of a text that is too long, which is refused otherwise; extension")
]
Instruction = Annotated[
    str | None, Field(description="name of one of the checkpoint's prompts, or a task in words; extension of llmc")
]


class EmbeddingRequest(Body):
    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    instruction: Instruction = None
    truncate: Truncate = False
    user: Annotated[str | None, Field(description="written into the log")] = None

    def texts(self) -> list[Any]:
        """The texts, or their tokens, one by one.
        Raises ApiError: there are none, or too many; or tokens come with an instruction, which is text."""
        found: list[Any] = list_texts("input", self.input, MOST_TEXTS)
        if self.instruction is not None and not isinstance(found[0], str):
            raise ApiError(400, "instruction stands before a text, but input holds tokens", param="instruction")
        return found


class Document(Body):
    text: str


class RerankRequest(Body):
    model: str | None = None
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MOST_TEXTS)]
    top_n: Annotated[int | None, Field(ge=1)] = None
    return_documents: bool | None = None
    instruction: Instruction = None
    truncate: Truncate = False


def usage_of(rows: Rows) -> dict[str, Any]:
    tokens = sum(map(len, rows))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


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
            tokenize = partial(encoder.text_tokens, texts, instruction=body.instruction, truncate=body.truncate)
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
        found: Any = vectors.tolist()
        if body.encoding_format == "base64":  # of little-endian float32
            found = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(found)]
        return {"object": "list", "data": data, "model": name, "usage": usage_of(rows)}

    return await make_answer(made, large=vectors.size > LARGE)


@router.post("/v1/rerank")
async def rerank(
    body: Annotated[RerankRequest, take_body(RerankRequest)], request: Request, service: Served
) -> Response:
    """Documents in the order in which they answer a query.

    The scores are what the checkpoint makes of them: the higher the better, between 0 and 1 only where it says so.
    """
    texts = [given if isinstance(given, str) else given.text for given in body.documents]
    name = service.find_for(call_of(request.scope), body.model, "scores")
    async with service.pool.lease(name) as model:
        pairs = partial(model.pair_tokens, instruction=body.instruction, truncate=body.truncate)
        tokenize = partial(pairs, body.query, texts)
        with name_parameters({"prompt": "documents"}):
            rows, scores = await encode_texts(request, model, tokenize)
    order = np.argsort(-scores[:, 0], kind="stable")[: body.top_n].tolist()
    shown = {index: {"document": {"text": texts[index]}} if body.return_documents else {} for index in order}
    results = [{"index": index, "relevance_score": float(scores[index, 0]), **shown[index]} for index in order]
    head = {"id": new_id("rerank-"), "object": "list", "model": name}
    return JSONResponse({**head, "results": results, "usage": usage_of(rows)})
