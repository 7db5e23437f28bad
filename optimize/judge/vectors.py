"""Vectors of a bundle beside those of the unquantized model."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Similarity
from llmc.errors import BundleError
from llmc.runtime import LoadedBundle

Float = NDArray[np.float32]


def check_finite(model: LoadedBundle, vectors: Iterable[Float]) -> None:
    """Raise BundleError for NaN and infinity."""
    if not all(np.isfinite(vector).all() for vector in vectors):
        raise BundleError(
            "it computes NaN or infinite values, so nothing can be said about its quality",
            "build the bundle again, with precision fp32 if it stays so",
            path=model.folder,
        )


def compare_vectors(vectors: Float, wanted: Float) -> Similarity:
    """The similarity of vectors [n, W] to ``wanted``; scores are vectors of one value."""
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
