"""Tests on the golden prompts that every value of the lowered graph fits float16.

ONNX Runtime's CPU kernels compute float16 operators in float32, so running the graph alone does not show an overflow.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from llmc.bundle import Manifest
from llmc.errors import BuildError
from llmc.optimize.judge.reference import complete_feeds, empty_caches, open_part

SHOWN = 3


def check_range(folder: Path, manifest: Manifest, prompts: Sequence[Sequence[int]]) -> None:
    """Raise BuildError, with the nodes, if values of a float16 graph leave +-65,504 on any of ``prompts``."""
    if manifest.recipe.compute != "float16":
        return
    model = ir.load(folder / manifest.graphs["decode"].file)
    names = _expose(model.graph)
    session = open_part(model, folder)
    overflowing: dict[str, None] = {}
    for prompt in prompts:
        count = len(prompt)
        call = {"input_ids": np.array([prompt]), "past_lengths": np.zeros(1), "logit_indices": np.arange(count)[None]}
        caches = empty_caches(manifest.geometry.caches, 1, count, manifest.cache)
        values = session.run(names, complete_feeds(model.graph, call, count) | caches)
        halves = ((name, value) for name, value in zip(names, values, strict=True) if value.dtype == np.float16)
        overflowing |= {name: None for name, value in halves if not np.isfinite(value).all()}
    if overflowing:
        remedy = "build with --bf16 or --fp32, or for integers with compute = 'bfloat16' in the recipe"
        if manifest.engine is None:
            remedy = "build with --fp32, or for TensorRT with --bf16"
        nodes = ", ".join(name.removesuffix(".0") for name in list(overflowing)[:SHOWN])
        raise BuildError(
            f"float16 overflows in {len(overflowing)} values of this model, beginning with {nodes}: a GPU would "
            f"compute infinities; {remedy}"
        )


def _expose(graph: ir.Graph) -> list[str]:
    """Make every value that may be float16 an output, except caches and values computed from weights; return their
    names."""
    names = []
    fed: set[ir.Value | None] = set(graph.inputs)
    for node in graph:
        if fed.isdisjoint(node.inputs):
            continue
        fed.update(node.outputs)
        for value in node.outputs:
            if value.dtype in (ir.DataType.FLOAT16, None) and value.name and not value.name.startswith("present."):
                names.append(value.name)
                if not value.is_graph_output():
                    graph.outputs.append(value)
    return names
