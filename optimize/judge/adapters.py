"""Measures which calls with adapters compute the same bits for a token."""

from dataclasses import replace

import numpy as np

from llmc.bundle import Manifest
from llmc.optimize.judge.invariance import SIZES, Probe, can_measure
from llmc.runtime.sessions import Batch, Phase, Session
from llmc.runtime.sessions.adapters import Adapter, AdapterInfo

# Standard deviation of the random factors: their products are about as large as the values that they are added to.
DEVIATION = 0.1


def measure_opened(session: Session, manifest: Manifest) -> Manifest:
    """The manifest with the measured invariance of the graph for adapters, if it has one; overwrites the cache."""
    graph = manifest.adapter_graph
    if graph is None or not can_measure(manifest):
        return manifest
    session.open_adapters()
    drawn = _draw(manifest)

    def change(call: Batch) -> Batch:
        return replace(call, adapters=drawn[call.first_row : call.first_row + len(call.input_ids)])

    measured = Probe(session, manifest, change).invariance(Phase.DECODE)
    return replace(manifest, adapter_graph=replace(graph, invariance=measured))


def _draw(manifest: Manifest) -> tuple[Adapter, ...]:
    """A random adapter for each row, which changes every linear that adapters can change."""
    draw, adapters, rank = np.random.default_rng(1).standard_normal, [], manifest.limits.rank
    for row in range(min(manifest.limits.max_batch, max(SIZES))):
        factors = {
            it.name: (draw((rank, it.inputs), np.float32) * DEVIATION, draw((rank, it.outputs), np.float32) * DEVIATION)
            for it in manifest.geometry.linears
            if it.is_open
        }
        adapters.append(Adapter(AdapterInfo(str(row), str(row), rank), factors))
    return tuple(adapters)
