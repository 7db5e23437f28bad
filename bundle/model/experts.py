"""Feed-forward parts: MLPs and mixtures of experts."""

from dataclasses import dataclass
from typing import Literal

from llmc.bundle.model.linear import Codes, Linear
from llmc.bundle.model.ranges import Count, Index, Width

LATENT_INPUT, LATENT_OUTPUT = "fc1_latent_proj", "fc2_latent_proj"

ExpertActivation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Mlp:
    """A feed-forward part: ``down(act(gate x) * up x)`` if gated, else ``down(act(up x))``, ``inner`` values wide."""

    name: str
    layer: Index
    inner: Width
    activation: str
    gated: bool


@dataclass(frozen=True)
class Experts:
    """A mixture of feed-forward parts, of which a router chooses some for each token.

    Attributes:
        name: module path; ``{name}.router`` is the linear that scores them.
        layer: index of its layer.
        count: of experts.
        chosen: how many of them each token goes through.
        inner: width of each, which computes ``down(activation(gate x) * up x)``.
        width: of a token, or of the vector that the linear ``{name}.fc1_latent_proj`` makes of it.
        bias: whether router and experts add biases, gate and up are clamped and their rows are in turn (gpt-oss).
        codes: what the checkpoint stores their weights as, None of floats.
        activation: of the gate.
    """

    name: str
    layer: Index
    count: Count
    chosen: Count
    inner: Width
    width: Width
    bias: bool = False
    codes: Codes | None = None
    activation: ExpertActivation = "silu"

    @property
    def parts(self) -> tuple[Linear, Linear]:
        """Each expert's two products, as if they were linears of their own: gate and up together, and down."""
        gate_up = Linear(f"{self.name}.gate_up_proj", 2 * self.inner, self.width, self.bias, self.name, "", self.layer)
        return gate_up, Linear(f"{self.name}.down_proj", self.width, self.inner, self.bias, self.name, "", self.layer)

    @property
    def size(self) -> int:
        """Number of weights, the router's apart."""
        return self.count * sum(part.size for part in self.parts)
