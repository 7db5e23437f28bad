"""Mixtures of experts."""

from dataclasses import dataclass, replace
from typing import Literal

from llmc.bundle.model.experts import LATENT_INPUT, LATENT_OUTPUT, Experts
from llmc.bundle.model.linear import Linear
from llmc.export.parts.site import Part, Shapes, Site, place

Score = Literal["softmax", "sigmoid"]
# Turns silu into a step: x * silu(STEEP * x) / STEEP differs from relu(x) ** 2 by less than 4e-8.
STEEP = 4096.0


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Experts, Part):
    """A mixture of experts and its arithmetic.

    With ``bias`` experts compute ``(up + 1) * gate * sigmoid(alpha * gate)`` with gate and up bounded by ``limit``.
    """

    score: Score = "softmax"  # makes an expert's weight of the router's output
    corrected: bool = False  # a bias of each expert is added for the choice, not for the weight
    normalized: bool = True  # the weights of the chosen experts are divided by their sum
    scale: float = 1.0  # factor of the experts' sum
    limit: float = 0.0
    alpha: float = 1.0
    # Whether checkpoints store stacks of floats as [experts, inputs, outputs]; "some": those of another shape are.
    transposed: Literal["none", "some", "all"] = "none"
    groups: int = 1  # neighbouring experts form so many groups;
    chosen_groups: int = 1  # experts are chosen from the best of these,
    best: int = 1  # which are compared by the sum of so many best scores
    # Checkpoints have experts relu(x) ** 2 without a gate: their ``up_proj`` times STEEP is the gate too here, and
    # ``scale`` has the factor.
    squared: bool = False
    latent: int = 0  # width of the vector that experts read and make, between two linears; 0 without one
    latent_bias: bool = False  # of these linears
    # The router reads the residual stream through a norm of its own, and a factor of each expert multiplies its weight.
    routed_apart: bool = False

    def list_linears(self, site: Site) -> list[Linear]:
        source = f"{site.path}.router_norm" if self.routed_apart else site.reads
        router = replace(site.read("router", self.count, self.bias, exact=True), reads=source, producer="")
        if not self.latent:
            return [router]
        down = site.read(LATENT_INPUT, self.latent, self.latent_bias)
        return [router, down, site.write(LATENT_OUTPUT, self.latent, self.latent_bias)]

    def list_norms(self, hidden: int) -> list[tuple[str, int]]:
        return [("router_norm", hidden)] if self.routed_apart else []

    def list_shapes(self, hidden: int) -> Shapes:
        shapes: Shapes = {"correction": (self.count,)} if self.corrected else {}
        return shapes | ({"per_expert_scale": (self.count,)} if self.routed_apart else {})

    def entry(self, site: Site) -> Experts:
        """The inventory's entry."""
        return place(Experts, self, name=site.path, layer=site.layer, width=self.latent or site.hidden)
