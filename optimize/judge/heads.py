"""Records what a draft head computes; no text judges it, for all that it guesses is verified."""

from dataclasses import replace
from pathlib import Path

from llmc.bundle import GoldenVector, Manifest, write_manifest
from llmc.optimize.order import Order
from llmc.optimize.weights.store import Calibrated
from llmc.runtime import load
from llmc.runtime.selftest.heads import run_head


def judge_values(order: Order, folder: Path, manifest: Manifest, _: Calibrated) -> Manifest:
    """Run the head on made-up hidden states, and write the manifest with its results."""
    write_manifest(manifest, folder)
    order.progress("recording what the head computes")
    with load(folder, self_test=False) as model:
        computed = run_head(model.runner.session, manifest)
    finished = replace(manifest, vectors=tuple(GoldenVector((), tuple(values.tolist())) for values in computed))
    write_manifest(finished, folder)
    return finished
