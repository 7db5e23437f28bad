"""Products with a weight, and the integers that a checkpoint stores a weight as."""

from dataclasses import dataclass
from typing import Annotated, Literal

from llmc.bundle.model.ranges import Index, Vocabulary, Width


@dataclass(frozen=True)
class Codes:
    """Integers that a checkpoint stores a weight as."""

    bits: Annotated[int, range(1, 9)]  # of each; 2, 4 or 8 of linears and experts, of tables the fewest that hold all
    block: Width  # inputs that share a scale
    zero_points: bool  # each block has one
    offsets: bool = False  # each block has a float that is added after scaling
    kind: Literal["integer", "mxfp4"] = (
        "integer"  # mxfp4: 4-bit floats (E2M1) with powers of two as scales; experts only
    )
    half: bool = False  # scales are float16 numbers; set for tables only


@dataclass(frozen=True)
class Linear:
    """A product with a weight [outputs, inputs].

    ``reads`` is the module whose output is multiplied, or a residual stream: ``model.layers.{i}`` is the input of layer
    i, ``model.layers.{i}.residual`` what its MLP adds to, ``.residual_1`` that sum. Linears with the same ``reads``
    read the same tensor.
    """

    name: str  # module path
    outputs: Vocabulary
    inputs: Width
    bias: bool  # a bias [outputs] is added
    reads: str
    producer: str  # norm or linear whose output channels scale the inputs one by one; empty if there is none
    layer: Index | None  # None for the head
    codes: Codes | None = None  # integers that the checkpoint stores the weight as, None for floats
    exact: bool = False  # stays in floats whatever a recipe says: few weights, on which much depends

    @property
    def size(self) -> int:
        """Number of weights, the bias apart."""
        return self.outputs * self.inputs

    @property
    def is_open(self) -> bool:
        """True if adapters may change it beside a loaded model."""
        return self.layer is not None and not self.exact
