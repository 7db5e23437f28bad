"""Golden self-tests of models that embed or rank (each text alone, and its difference to a call with all texts), and of
vision towers (one made-up image)."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import VISION_FILE, GoldenVector, Similarity
from llmc.errors import BundleError
from llmc.optimize.judge.golden import prompt_ids
from llmc.optimize.judge.reference import Reference, open_part
from llmc.optimize.lower.rewrite import read_graph
from llmc.optimize.progress import Progress, silent
from llmc.runtime import Embedder, Generator, LoadedBundle
from llmc.runtime.selftest import KEPT_VALUES, difference, make_image, sample_rows

Float = NDArray[np.float32]


def run_golden_vectors(
    model: Embedder, export: Path, progress: Progress = silent
) -> tuple[tuple[GoldenVector, ...], float, Similarity]:
    """Run the golden texts through the bundle and the unquantized model; NaN and infinity raise BundleError.

    Returns the cases of the self-test, the largest difference between calls, and what the bundle is worth.
    """
    progress("running the golden texts")
    texts = prompt_ids(model)
    alone = [model.encode([ids])[0] for ids in texts]
    _check_finite(model, alone)
    together = model.encode(texts)
    wanted = Reference(export).results(texts, progress)
    return (
        tuple(GoldenVector(tuple(ids), tuple(it[:KEPT_VALUES].tolist())) for ids, it in zip(texts, alone, strict=True)),
        max(difference(one, other) for one, other in zip(alone, together, strict=True)),
        _similarity(np.stack(alone), np.stack(wanted)),
    )


def run_golden_image(model: Generator, export: Path, progress: Progress = silent) -> tuple[GoldenVector, Similarity]:
    """Run a made-up image through the bundle's tower and the unquantized one; NaN and infinity raise BundleError."""
    progress("running the golden image")
    assert model.manifest.geometry.vision is not None
    image = make_image(model.manifest.geometry.vision)
    rows = model.tower.run(**image)
    _check_finite(model, rows)
    (wanted,) = open_part(read_graph(export, VISION_FILE), export).run(None, image)
    return GoldenVector((), tuple(sample_rows(rows).tolist())), _similarity(rows, wanted)


def _check_finite(model: LoadedBundle, vectors: Iterable[Float]) -> None:
    if not all(np.isfinite(vector).all() for vector in vectors):
        raise BundleError(
            "it computes NaN or infinite values, so nothing can be said about its quality",
            "build the bundle again, with precision fp32 if it stays so",
            path=model.folder,
        )


def _similarity(vectors: Float, wanted: Float) -> Similarity:
    cosines = np.sum(vectors * wanted, axis=1) / np.maximum(
        np.linalg.norm(vectors, axis=1) * np.linalg.norm(wanted, axis=1), np.finfo(np.float32).tiny
    )
    is_vector = vectors.shape[1] > 1
    return Similarity(
        texts=len(vectors),
        mean=float(cosines.mean()) if is_vector else None,
        smallest=float(cosines.min()) if is_vector else None,
        largest_difference=float(np.abs(vectors - wanted).max()),
    )
