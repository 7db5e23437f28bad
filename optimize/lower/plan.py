"""What a lowering is asked to make: the model's shapes, its limits, and how each kind of weight is to be stored."""

from collections.abc import Callable
from dataclasses import dataclass

from llmc.bundle import GRAPH_CONTRACT_VERSION, Geometry, Limits
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.weights import WeightFile


@dataclass(frozen=True)
class Float32:
    """Keep weights as float32."""


@dataclass(frozen=True)
class WeightOnly:
    """Integer weights in blocks, float activations (the engine may quantize them per block inside its kernel)."""

    grid: Grid


@dataclass(frozen=True)
class PerToken:
    """int8 weights with a scale per output, int8 activations with a scale per token (W8A8)."""

    grid: Grid = Grid(8)


Form = Float32 | WeightOnly | PerToken


@dataclass(frozen=True)
class Plan:
    """One graph to make. ``head`` is also the form of a tied embedding, so that both share their bytes.

    ``linear_done`` is called after each linear, for progress.
    """

    phase: str
    geometry: Geometry
    limits: Limits
    body: Form
    head: Form
    weights: WeightFile
    linear_done: Callable[[], None] = lambda: None
    contract: int = GRAPH_CONTRACT_VERSION

    @property
    def embedding(self) -> Form:
        """Rows of an untied embedding cost nothing per step, so they keep 8 bits."""
        if self.geometry.tied_head or isinstance(self.head, Float32):
            return self.head
        return WeightOnly(Grid(8, 128))
