"""Feed-forward parts: MLPs and mixtures of experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from llmc.bundle.model.linear import Codes, Linear
from llmc.bundle.model.ranges import Count, Index, Width

LATENT_INPUT, LATENT_OUTPUT = "fc1_latent_proj", "fc2_latent_proj"

# ``gelu_tanh`` approximates ``gelu``; ``relu2`` is relu(x)²; ``xielu`` has learned scalars (arXiv 2411.13010).
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
ExpertActivation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A feed-forward part: ``down(act(gate x) * up x)`` if gated, else ``down(act(up x))``."""

    name: str = ""  # module path
    layer: Index = -1
    inner: Width
    activation: Activation = "silu"
    gated: bool = True

    @property
    def writer(self) -> str:
        """Name of the linear whose output is added to the residual stream."""
        return f"{self.name}.down_proj"

    @property
    def silus(self) -> int:
        """Number of SiLU activations."""
        return int(self.activation == "silu")

    @property
    def learned(self) -> tuple[str, ...]:
        """Names of the activation's learned scalars, in the module."""
        return ("alpha_p", "alpha_n", "beta") if self.activation == "xielu" else ()


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of feed-forward parts ``down(activation(gate x) * up x)``; a router chooses some for each token."""

    name: str = ""  # module path; ``{name}.router`` is the linear that scores the experts
    layer: Index = -1
    count: Count
    chosen: Count  # experts that each token goes through
    inner: Width  # of each expert
    width: Width = 0  # of a token, or of what the linear ``{name}.fc1_latent_proj`` makes of it
    bias: bool = False  # router and experts add biases, gate and up are clamped, their rows alternate (gpt-oss)
    codes: Codes | None = None  # integers that the checkpoint stores the weights as, None for floats
    activation: ExpertActivation = "silu"

    @property
    def parts(self) -> tuple[Linear, Linear]:
        """The two products of an expert, listed like linears: gate and up together, and down."""
        gate_up = Linear(f"{self.name}.gate_up_proj", 2 * self.inner, self.width, self.bias, self.name, "", self.layer)
        return gate_up, Linear(f"{self.name}.down_proj", self.width, self.inner, self.bias, self.name, "", self.layer)

    @property
    def size(self) -> int:
        """Number of weights, the router's apart."""
        return self.count * sum(part.size for part in self.parts)

    @property
    def spread(self) -> int:
        """Values of all experts of a token together, at their widest."""
        return self.chosen * max(self.inner, self.width)

    def is_sound(self, linears: Mapping[str, Linear]) -> bool:
        """True if the router and the linears around the experts fit."""
        router, down, up = (linears.get(f"{self.name}.{name}") for name in ("router", LATENT_INPUT, LATENT_OUTPUT))
        width = self.width if down is None else down.inputs
        return (
            router is not None
            and (router.outputs, router.inputs, router.exact) == (self.count, width, True)
            and (down and down.outputs) == (up and up.inputs) == (down and self.width)
            and (up is None or up.outputs == width)
        )
