"""Products with a weight, and the integers that a checkpoint stores a weight as."""

from dataclasses import dataclass
from typing import Annotated, Literal

from llmc.bundle.model.ranges import Index, Vocabulary, Width


@dataclass(frozen=True)
class Codes:
    """Integers that a checkpoint stores a weight as.

    Attributes:
        bits: of each; 4 or 8 of linears and experts, of tables the fewest that hold every code.
        block: inputs that share a scale.
        zero_points: whether each block has one.
        offsets: whether each block has a float that is added to what its integers stand for.
        kind: ``mxfp4`` are floats of 4 bits (E2M1), with powers of two for scales, which experts alone have.
        half: whether scales are numbers of float16; told of tables alone.
    """

    bits: Annotated[int, range(1, 9)]
    block: Width
    zero_points: bool
    offsets: bool = False
    kind: Literal["integer", "mxfp4"] = "integer"
    half: bool = False


@dataclass(frozen=True)
class Linear:
    """A product with a weight [outputs, inputs].

    Attributes:
        name: module path.
        outputs, inputs: shape of the weight.
        bias: whether a bias [outputs] is added.
        reads: the module whose output it multiplies, or where a residual stream as it stands: ``model.layers.{i}`` for
            what goes into layer i, ``model.layers.{i}.residual`` for what its MLP adds to, ``.residual_1`` for that
            sum. Linears that read the same read the same tensor.
        producer: the norm or linear whose output channels scale the inputs one by one, so that a factor per input can
            be moved into its weight; empty where there is none.
        layer: index of its layer, None for the head.
        codes: the integers that the checkpoint stores its weight as, None of a float weight.
        exact: whether it stays in floats whatever a recipe says: few weights, on which much depends.
    """

    name: str
    outputs: Vocabulary
    inputs: Width
    bias: bool
    reads: str
    producer: str
    layer: Index | None
    codes: Codes | None = None
    exact: bool = False

    @property
    def size(self) -> int:
        """Number of weights, the bias apart."""
        return self.outputs * self.inputs

    @property
    def is_open(self) -> bool:
        """True if adapters may change it beside a loaded model."""
        return self.layer is not None and not self.exact
