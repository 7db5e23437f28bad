"""Judges a model that embeds or ranks: each golden text alone, beside a call with all texts and the unquantized model;
and the order of documents."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from llmc.bundle import GoldenVector, Manifest, write_manifest
from llmc.optimize.judge.golden import SPREAD_FACTOR, prompt_ids
from llmc.optimize.judge.reference import Reference
from llmc.optimize.judge.replay import replay_apart
from llmc.optimize.judge.retrieval import compare_orders, score_documents, tokenize_passages
from llmc.optimize.judge.vectors import check_finite, compare_vectors
from llmc.optimize.order import Order
from llmc.optimize.weights.store import Calibrated
from llmc.runtime import Embedder, load
from llmc.runtime.selftest.values import KEPT_VALUES, difference


def judge_texts(order: Order, folder: Path, manifest: Manifest, _: Calibrated) -> Manifest:
    """Run the golden texts, write the manifest with their vectors or scores, and replay it.

    Raises:
        BundleError: the bundle computes NaN or infinity.
        BuildError: a fresh process that loads the bundle computes other results.
    """
    write_manifest(manifest, folder)
    with load(folder, kind=Embedder, self_test=False) as model:
        order.progress("running the golden texts")
        texts = prompt_ids(model)
        alone = [model.encode([ids])[0] for ids in texts]
        check_finite(model, alone)
        spread = max(map(difference, alone, model.encode(texts)))
        order.progress("ranking documents")
        passages = tokenize_passages(model)
        found = score_documents(list(model.encode(passages)))
        wanted = Reference(order.source).results([*texts, *passages], order.progress)
    finished = replace(
        manifest,
        vectors=tuple(
            GoldenVector(tuple(ids), tuple(it[:KEPT_VALUES].tolist())) for ids, it in zip(texts, alone, strict=True)
        ),
        golden_tolerance=max(manifest.golden_tolerance, SPREAD_FACTOR * spread),
        golden_spread=spread,
        similarity=compare_vectors(np.stack(alone), np.stack(wanted[: len(texts)])),
        ranking=compare_orders(found, score_documents(wanted[len(texts) :])),
    )
    write_manifest(finished, folder)
    order.progress("replaying the golden texts as a first load does")
    replay_apart(folder)
    return finished
