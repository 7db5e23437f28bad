"""Adapters at each level of determinism."""

from llmc.bundle import Graph, Manifest
from llmc.errors import UsageError
from llmc.runtime.api.options import Determinism


def list_step_graphs(manifest: Manifest) -> list[Graph]:
    """The graphs that steps of decode run: that of rows with adapters is the last, if there is one."""
    return [graph for graph in (manifest.graphs["decode"], manifest.adapter_graph) if graph is not None]


def check_adapters(manifest: Manifest, level: Determinism) -> None:
    """Refuse adapters at a level of determinism that their graph did not keep in the build."""
    graph, rows = manifest.adapter_graph, manifest.graphs["decode"].invariance.rows
    if graph is None:  # the bundle has no room for adapters
        return
    seen = graph.invariance
    if level is Determinism.BATCH:
        kept = 0 < seen.rows <= max(rows, 1) and seen.tokens > 0
    else:
        kept = level is Determinism.FAST or (seen.tokens > 0 and seen.outputs > 0)
    if not kept:
        raise UsageError(
            "determinism",
            f"is {level.value!r}, which calls with adapters did not keep in the build",
            "use 'fast', or merge the adapter at export",
        )
