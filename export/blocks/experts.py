"""Mixtures of experts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmc.export import expert_ops
from llmc.export.blocks.linear import Linear, as_float
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.scale import Scale
from llmc.export.config import ExpertsConfig, NormConfig

# Taken off the scores of experts that cannot be chosen; shares of one, with corrections that trained models keep small.
FAR = 1e6


class Stacked(nn.Module):
    """The weights [E, out, in] of the same linear of all experts, and their biases [E, out]."""

    def __init__(self, count: int, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(count, outputs), requires_grad=False) if bias else None


class Experts(nn.Module):
    """x and the residual stream (B, S, N) -> the sum (B, S, N) of what the experts chosen for each token make of x, by
    their weights."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, norm: NormConfig) -> None:
        super().__init__()
        self.config, normalized = config, config.normalized and not config.routed_apart
        self.knobs = expert_ops.Knobs(config.chosen, normalized, config.alpha, config.limit, config.activation)
        if config.routed_apart:
            self.router_norm, self.router_scale = Norm(hidden_size, norm), Scale(hidden_size**-0.5)
            self.per_expert_scale = nn.Parameter(torch.empty(config.count), requires_grad=False)
        self.router = Linear(hidden_size, config.count, bias=config.clamped)
        self.correction = nn.Parameter(torch.empty(config.count), requires_grad=False) if config.corrected else None
        width, self.fc1_latent_proj, self.fc2_latent_proj = config.latent or hidden_size, None, None
        if config.latent:
            self.fc1_latent_proj = Linear(hidden_size, width, bias=config.latent_bias)
            self.fc2_latent_proj = Linear(width, hidden_size, bias=config.latent_bias)
        self.gate_up_proj = Stacked(config.count, width, 2 * config.inner, bias=config.clamped)
        self.down_proj = Stacked(config.count, config.inner, width, bias=config.clamped)
        self.scale = Scale(config.scale)
        self.watch: Callable[[int, Tensor, Tensor], None] | None = None  # see expert_ops.experts

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        apart = self.config.routed_apart
        logits = self.router_scale(self.router(self.router_norm(stream))) if apart else self.router(x)
        weights = torch.softmax(logits, -1) if self.config.score == "softmax" else torch.sigmoid(logits)
        scores = weights if self.correction is None else weights + as_float(self.correction)
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
        read = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        y: Tensor = self.scale(expert_ops.experts(read, scores, weights, stacks, biases, self.knobs, self.watch))
        return y if self.fc2_latent_proj is None else self.fc2_latent_proj(y)
