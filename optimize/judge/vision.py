"""Judges a tower: one made-up image or audio, beside the unquantized tower."""

from dataclasses import replace
from pathlib import Path

from llmc.bundle import GoldenVector, Manifest
from llmc.optimize.judge.reference import open_part
from llmc.optimize.judge.vectors import check_finite, compare_vectors
from llmc.optimize.lower.rewrite import read_graph
from llmc.optimize.progress import Progress
from llmc.runtime import Generator
from llmc.runtime.selftest.images import make_golden
from llmc.runtime.selftest.values import sample_rows


def judge_tower(model: Generator, export: Path, manifest: Manifest, progress: Progress) -> Manifest:
    """The manifest with what the bundle's tower computes, if it has one; NaN and infinity raise BundleError."""
    if (part := manifest.geometry.tower) is None:
        return manifest
    progress(f"running the golden {part.kind}")
    feeds = make_golden(part)
    rows = model.tower.run(**feeds)
    check_finite(model, rows)
    (wanted,) = open_part(read_graph(export, f"{part.graph}.onnx"), export).run(None, feeds)
    case = GoldenVector((), tuple(sample_rows(rows).tolist()))
    return replace(manifest, vectors=(case,), similarity=compare_vectors(rows, wanted))
