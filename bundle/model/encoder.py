"""The end of a model that embeds or ranks."""

from dataclasses import dataclass
from typing import Annotated, Literal

from llmc.bundle.model.ranges import Width

# Linears of an encoder in the place of the head: ``dense.0`` and on of an embedding, ``score.0`` of a score.
DENSE, SCORE = "dense", "score"

# ``embeddings`` are one vector for each text, ``scores`` one number for each query with a document.
Result = Literal["embeddings", "scores"]

# The last token's output of the last norm, or the mean of all.
Pooling = Literal["last", "mean"]


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An end that makes one result of a text, in one pass and without a cache."""

    result: Result
    pooling: Pooling
    width: Width = 0  # values of a result, 1 for scores
    normalized: bool = False  # embeddings have length one
    template: bool = False  # the chat template joins query and document; else the tokenizer does, as a pair
    padding: Annotated[int, range(1 << 24)] | None = None  # token that is ignored at the end of a text
