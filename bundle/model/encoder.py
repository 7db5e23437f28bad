"""The end of a model that embeds or ranks."""

from dataclasses import dataclass
from typing import Annotated, Literal

from llmc.bundle.model.ranges import Width

# What an encoder has in the place of the head: layers of an embedding's, ``dense.0`` and on; ``score.0``, a row.
DENSE, SCORE = "dense", "score"

Result = Literal["embeddings", "scores"]

Pooling = Literal["last", "mean"]


@dataclass(frozen=True)
class Encoder:
    """An end that makes one result of a text, in one pass and without a cache.

    Attributes:
        result: ``embeddings``, one vector for each text, or ``scores``, one number for each query with a document.
        pooling: which of the last norm's outputs count: the last token's, or the mean of all.
        width: values of a result, 1 for scores.
        normalized: whether embeddings have length one.
        template: whether the chat template puts query and document together; else the tokenizer does, as a pair.
        padding: the token that counts for nothing at the end of a text, None where every token does.
    """

    result: Result
    pooling: Pooling
    width: Width
    normalized: bool
    template: bool
    padding: Annotated[int, range(1 << 24)] | None = None
