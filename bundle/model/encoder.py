"""The end of a model that embeds or ranks."""

from dataclasses import dataclass
from typing import Annotated, Literal

from llmc.bundle.model.ranges import Width

# Linears of an encoder in the place of the head: ``dense.0`` and on, and behind them ``score.0`` and on of a score.
DENSE, SCORE = "dense", "score"

# ``embeddings`` are one vector for each text, ``scores`` one number for each query with a document.
Result = Literal["embeddings", "scores"]

# The first or last token's output of the last norm, or the mean of all.
Pooling = Literal["first", "last", "mean"]


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An end that makes one result of a text, in one pass and without a cache."""

    result: Result
    pooling: Pooling
    width: Width = 0  # values of a result, 1 for scores
    normalized: bool = False  # embeddings have length one
    template: bool = False  # the chat template joins query and document; else the tokenizer does, as a pair
    # Types of tokens that the graph takes: 0 for a query's, 1 for a document's. 0 types if it takes none.
    types: Annotated[int, range(1 << 8)] = 0
    # Attentions add a value for each head, by the distance of two tokens: a table [2 * max_positions - 1, heads].
    biased: bool = False
    padding: Annotated[int, range(1 << 24)] | None = None  # token that is ignored at the end of a text
