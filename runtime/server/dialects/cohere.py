"""Cohere's vectors, and scores of documents in the form that Cohere and Jina share.

Sources: https://docs.cohere.com/v1/reference/rerank, /v2/reference/rerank, /v2/reference/embed, https://jina.ai/reranker
"""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field

from llmc.runtime import Embedder
from llmc.runtime.server.dialects.embeddings import (
    MOST_TEXTS,
    EmbeddingRequest,
    Instruction,
    Rows,
    Truncate,
    compute_vectors,
    encode_base64,
    encode_texts,
    usage_of,
)
from llmc.runtime.server.http.bodies import Asked
from llmc.runtime.server.http.call import LARGE, call_of
from llmc.runtime.server.http.errors import ApiError, name_parameters
from llmc.runtime.server.http.streams import make_answer
from llmc.runtime.server.http.validation import take_body
from llmc.runtime.server.models.service import Served, new_id

router = APIRouter(tags=["Cohere"])
DOCUMENTS_OF_UNIT = 100  # of one query, which Cohere bills as a search unit
V2 = "/v2/"  # beginning of the addresses of Cohere's second version, which returns no documents


class RerankRequest(Asked):
    IGNORED: ClassVar[frozenset[str]] = frozenset({"priority"})

    model: str | None = None
    query: str
    documents: Annotated[list[str | dict[str, Any]], Field(min_length=1, max_length=MOST_TEXTS)]
    rank_fields: Annotated[
        list[str] | None, Field(min_length=1, description="members of documents to rank by; default: text")
    ] = None
    top_n: Annotated[int | None, Field(ge=1)] = None
    return_documents: Annotated[
        bool | None, Field(description="default: true; false for /v2/rerank, as Cohere has it")
    ] = None
    max_tokens_per_doc: Annotated[int | None, Field(ge=1, description="leave out what follows in a document")] = None
    instruction: Instruction = None
    truncate: Truncate = False
    user: Annotated[str | None, Field(description="written into the log")] = None

    def texts(self) -> list[str]:
        """The text of each document: a text, or its ranked members, which are lines with their names if several are.
        Raises ApiError: a ranked member is missing, or no text."""
        return [
            document if isinstance(document, str) else self._join(index, document)
            for index, document in enumerate(self.documents)
        ]

    def _join(self, index: int, document: dict[str, Any]) -> str:
        fields = self.rank_fields or ["text"]
        for field in fields:
            if not isinstance(document.get(field), str):
                place = f"documents[{index}].{field[:40]}"
                problem = "is no text" if field in document else "is missing"
                raise ApiError(400, f"{place} {problem}; give it, or name other members in rank_fields", param=place)
        return document[fields[0]] if len(fields) == 1 else "\n".join(f"{field}: {document[field]}" for field in fields)


def meta_of(version: str, rows: Rows, **billed: int) -> dict[str, Any]:
    """The cost, in the members that Cohere's clients read."""
    tokens = {"input_tokens": sum(map(len, rows))}
    return {"api_version": {"version": version}, "billed_units": billed, "tokens": tokens}


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(
    body: Annotated[RerankRequest, take_body(RerankRequest)], request: Request, service: Served
) -> Response:
    """Documents in the order in which they answer a query.

    The scores are what the checkpoint makes of them: the higher the better, between 0 and 1 only where it says so.
    """
    texts, second = body.texts(), request.url.path.startswith(V2)
    name = service.find_for(call_of(request.scope), body.model, "scores")
    async with service.pool.lease(name) as model:

        def tokenize() -> Rows:
            encoder: Embedder = model
            most = body.max_tokens_per_doc
            cut = texts if most is None else [encoder.tokenizer.cut_text(text, most) for text in texts]
            return encoder.pair_tokens(body.query, cut, instruction=body.instruction, truncate=body.truncate)

        with name_parameters({"prompt": "documents"}):
            rows, scores = await encode_texts(request, model, tokenize)
    order = np.argsort(-scores[:, 0], kind="stable")[: body.top_n].tolist()
    shown = {}
    if body.return_documents if body.return_documents is not None else not second:
        given = ({"text": it} if isinstance(it, str) else it for it in body.documents)
        shown = {index: {"document": document} for index, document in enumerate(given)}

    def made() -> dict[str, Any]:
        results = [
            {"index": index, "relevance_score": float(scores[index, 0]), **shown.get(index, {})} for index in order
        ]
        meta = meta_of("2" if second else "1", rows, search_units=-(-len(texts) // DOCUMENTS_OF_UNIT))
        head = {"id": new_id("rerank-"), "object": "list", "model": name}
        return {**head, "results": results, "usage": usage_of(rows), "meta": meta}

    return await make_answer(made, large=call_of(request.scope).size > LARGE)


class EmbedRequest(Asked):
    model: str | None = None
    texts: Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
    input_type: str
    embedding_types: Annotated[list[Literal["float", "base64"]], Field(min_length=1, default_factory=lambda: ["float"])]
    output_dimension: int | None = None
    truncate: Annotated[Literal["NONE", "END"], Field(description="what to leave out of texts that are too long")] = (
        "END"
    )


@router.post("/v2/embed")
async def embed(body: Annotated[EmbedRequest, take_body(EmbedRequest)], request: Request) -> Response:
    """Vectors of texts in Cohere's form; ``input_type`` chooses one of the checkpoint's prompts."""
    asked = EmbeddingRequest.model_validate(
        {
            "model": body.model,
            "input": body.texts,
            "dimensions": body.output_dimension,
            "input_type": body.input_type,
            "truncate": body.truncate == "END",
        },
        context=call_of(request.scope),
    )
    with name_parameters({"input": "texts", "prompt": "texts", "dimensions": "output_dimension"}):
        _, rows, vectors = await compute_vectors(asked, request)

    def made() -> dict[str, Any]:
        forms = {"float": vectors.tolist, "base64": lambda: encode_base64(vectors)}
        embeddings = {kind: forms[kind]() for kind in body.embedding_types}
        head = {"id": new_id("embed-"), "response_type": "embeddings_by_type", "texts": body.texts}
        return {**head, "embeddings": embeddings, "meta": meta_of("2", rows, input_tokens=sum(map(len, rows)))}

    return await make_answer(made, large=vectors.size > LARGE)
