"""Mixtures of experts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmc.export import expert_ops
from llmc.export.blocks.linear import as_float
from llmc.export.blocks.part import PartModule
from llmc.export.blocks.scale import Scale
from llmc.export.parts.experts import ExpertsConfig
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.site import Site

# Taken off the scores of experts that cannot be chosen; shares of one, with corrections that trained models keep small.
FAR = 1e6


class Stacked(nn.Module):
    """The weights [E, out, in] of the same linear of all experts, and their biases [E, out]."""

    def __init__(self, count: int, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(count, outputs), requires_grad=False) if bias else None


class Experts(PartModule):
    """x and the residual stream (B, S, N) -> the sum (B, S, N) of what the experts chosen for each token make of x, by
    their weights."""

    def __init__(self, config: ExpertsConfig, site: Site, norm: NormConfig) -> None:
        super().__init__(config, site, norm)
        self.config, normalized = config, config.normalized and not config.routed_apart
        self.knobs = expert_ops.Knobs(config.chosen, normalized, config.alpha, config.limit, config.activation)
        self.router_scale = Scale(site.hidden**-0.5 if config.routed_apart else 1.0)
        width = config.latent or site.hidden
        self.gate_up_proj = Stacked(config.count, width, 2 * config.inner, bias=config.bias)
        self.down_proj = Stacked(config.count, config.inner, width, bias=config.bias)
        self.scale = Scale(config.scale)
        self.watch: Callable[[int, Tensor, Tensor], None] | None = None  # see expert_ops.experts

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        apart = self.config.routed_apart
        logits = self.router_scale(self.router(self.normalize("router_norm", stream if apart else x)))
        weights = torch.softmax(logits, -1) if self.config.score == "softmax" else torch.sigmoid(logits)
        scores = weights + as_float(self.correction) if self.config.corrected else weights
        if self.config.chosen_groups < self.config.groups:
            groups = scores.view(*scores.shape[:-1], self.config.groups, -1)
            best = groups.topk(self.config.best, -1).values.sum(-1, keepdim=True)
            least = best.topk(self.config.chosen_groups, -2).values[..., -1:, :]
            scores = torch.where(best >= least, groups, groups - FAR).flatten(-2)
        if apart:
            total = scores.topk(self.config.chosen, -1).values.sum(-1, keepdim=True)
            weights = weights / total * as_float(self.per_expert_scale)
        parts = self.gate_up_proj, self.down_proj
        biases = [part.bias for part in parts if part.bias is not None]
        stacks = [part.weight for part in parts]
        read = self.fc1_latent_proj(x) if self.config.latent else x
        y: Tensor = self.scale(expert_ops.experts(read, scores, weights, stacks, biases, self.knobs, self.watch))
        return self.fc2_latent_proj(y) if self.config.latent else y
