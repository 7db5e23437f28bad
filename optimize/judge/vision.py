"""Judges a vision tower: one made-up image, beside the unquantized tower."""

from dataclasses import replace
from pathlib import Path

from llmc.bundle import VISION_FILE, GoldenVector, Manifest
from llmc.optimize.judge.reference import open_part
from llmc.optimize.judge.vectors import check_finite, compare_vectors
from llmc.optimize.lower.rewrite import read_graph
from llmc.optimize.progress import Progress
from llmc.runtime import Generator
from llmc.runtime.selftest.images import make_image
from llmc.runtime.selftest.values import sample_rows


def judge_tower(model: Generator, export: Path, manifest: Manifest, progress: Progress) -> Manifest:
    """The manifest with what the bundle's tower computes, if it has one; NaN and infinity raise BundleError."""
    if manifest.geometry.vision is None:
        return manifest
    progress("running the golden image")
    image = make_image(manifest.geometry.vision)
    rows = model.tower.run(**image)
    check_finite(model, rows)
    (wanted,) = open_part(read_graph(export, VISION_FILE), export).run(None, image)
    case = GoldenVector((), tuple(sample_rows(rows).tolist()))
    return replace(manifest, vectors=(case,), similarity=compare_vectors(rows, wanted))
