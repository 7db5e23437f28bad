"""Ways to compute attention, tried one after the other until an engine is judged to be right on its GPU.

NVIDIA measured masked float16 attention of TensorRT 11.2 wrong at 1,290 positions (Model-Connect 785); with query, keys
and values in float32 at its border it was right. Never run on a GPU.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir

from llmc.bundle import EngineConfig
from llmc.errors import LlmcError
from llmc.optimize.lower.context import ARRAY_TYPES
from llmc.optimize.lower.rewrite import read_graph, write_part
from llmc.optimize.lower.tensorrt.native import widen_attention
from llmc.optimize.tensorrt.builder import BASIC

log = logging.getLogger(__name__)
T = TypeVar("T")

# Rewrites of a lowered graph, by what :attr:`llmc.bundle.EngineConfig.border` says of them, in the order of trial.
BORDERS: dict[str, Callable[[ir.Graph, ir.DataType], int] | None] = {"": None, "float32": widen_attention}


def try_borders(engine: EngineConfig, attempt: Callable[[str], T], wrong: tuple[type[LlmcError], ...]) -> T:
    """The result of ``attempt`` with the first border that does not raise ``wrong``, from the engine's own border on.

    The last border's error is raised.
    """
    names = list(BORDERS)
    alike = engine.compute == "float32" or engine.attention == BASIC
    left = [engine.border] if alike else names[names.index(engine.border) :]
    for border in left[:-1]:
        try:
            return attempt(border)
        except wrong as error:
            log.warning("%s; trying again with attention in another way", error)
    return attempt(left[-1])


def rewrite_border(graph: Path, border: str, compute: str) -> None:
    """Write a lowered graph anew with ``border``; a hard link to the old file stays as it is."""
    if (rewrite := BORDERS[border]) is None:
        return
    model = read_graph(graph.parent, graph.name)
    rewrite(model.graph, ir.DataType.from_numpy(ARRAY_TYPES[compute]))
    staged = graph.with_name(f".{graph.name}.part")
    write_part(model.graph, model, staged)
    os.replace(staged, graph)
