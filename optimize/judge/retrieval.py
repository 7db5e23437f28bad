"""The order of documents for each query, compared with the unquantized model's: what users of encoders see of rounding.

Passages are paragraphs of llmc's own text; a passage's first sentence is a query, the rest a document. No labels are
needed: the unquantized model's order is the truth.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Ranking
from llmc.optimize.calibrate.text import DEFAULT_TEXT
from llmc.runtime import Embedder

# Each text is computed by the unquantized model, too: some 3,500 tokens.
PASSAGES, PAIRED_QUERIES, PAIRED_DOCUMENTS = 32, 6, 8
MOST_TOKENS = 64  # of a query, and of a document
DEPTH = 10  # of nDCG
LEAST_DOCUMENT = 200  # characters: enough that passages differ in more than a word
_FIRST_SENTENCE = re.compile(r"(.{20,}?[.!?])\s+(.+)", re.DOTALL)

Float = NDArray[np.float32]
Rows = list[list[int]]
Encode = Callable[[Rows], Float]


def read_passages() -> list[tuple[str, str]]:
    """A query and a document each, evenly spread over the text."""
    paragraphs = DEFAULT_TEXT.read_text(encoding="utf-8").split("\n\n")
    parts = [match.groups() for it in paragraphs if (match := _FIRST_SENTENCE.fullmatch(it.strip()))]
    found = [(query, document) for query, document in parts if len(document) >= LEAST_DOCUMENT]
    return [found[number * len(found) // PASSAGES] for number in range(PASSAGES)]


def tokenize_passages(model: Embedder) -> Rows:
    """Tokens of what a model is judged on: all queries and then all documents, or each query with its documents."""
    cut = partial(model.tokenizer.cut_text, most=MOST_TOKENS)
    queries, documents = zip(*((cut(query), cut(document)) for query, document in read_passages()), strict=True)
    if model.manifest.geometry.encoder is not None and model.manifest.geometry.encoder.result == "scores":
        pairs = [
            model.pair_tokens(
                queries[number],
                [documents[(number + step) % PASSAGES] for step in range(PAIRED_DOCUMENTS)],
                instruction=None,
                truncate=True,
            )
            for number in range(0, PASSAGES, PASSAGES // PAIRED_QUERIES)
        ]
        return [row for rows in pairs[:PAIRED_QUERIES] for row in rows]
    known = model.prompt_names
    prompts = [name if name in known else None for name in ("query", "document")]
    return [
        row
        for texts, prompt in zip((queries, documents), prompts, strict=True)
        for row in model.text_tokens(list(texts), instruction=prompt, truncate=True)
    ]


def score_documents(results: Sequence[Float]) -> Float:
    """Scores [queries, documents] of the results of :func:`tokenize_passages`: their own, or cosines of vectors."""
    found = np.stack(results)
    if found.shape[1] == 1:
        return found.reshape(-1, PAIRED_DOCUMENTS)
    found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return np.asarray(found[:PASSAGES] @ found[PASSAGES:].T)


def compare_orders(scores: Float, wanted: Float) -> Ranking:
    """Compare orders by ``scores`` [queries, documents] with those by ``wanted``."""
    queries, documents = scores.shape
    order, truth = (np.argsort(-it, axis=1, kind="stable") for it in (scores, wanted))
    depth = min(DEPTH, documents)
    gains = np.zeros(scores.shape)  # of each document: of the first one DEPTH, of the next one less, ...
    np.put_along_axis(gains, truth[:, :depth], np.arange(depth, 0, -1, dtype=float)[None], axis=1)
    discounts = 1 / np.log2(np.arange(depth) + 2)
    found, best = (np.take_along_axis(gains, it[:, :depth], axis=1) @ discounts for it in (order, truth))
    return Ranking(
        queries=queries,
        documents=documents,
        top1_agreement=float((order[:, 0] == truth[:, 0]).mean()),
        ndcg=float((found / best).mean()),
    )
