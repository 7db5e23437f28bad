"""Torch modules of a draft head's start and end."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.export.blocks.linear import add_linears, cut
from llmc.export.blocks.norm import Norm
from llmc.export.heads.shapes import HeadConfig
from llmc.export.parts.norm import NormConfig


class HeadInput(nn.Module):
    """embeddings (B, S, N), rows (R, W), indices (B, S) -> the first values of a draft head's stream, and what its
    attention reads beside them. A row is another model's hidden states or the head's own; the other part is zeros."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, embedded: Tensor, rows: tuple[Tensor, Tensor], stack: Any) -> tuple[Tensor, Tensor | None]:
        """``stack`` has the modules of :func:`add_ends`."""
        given, own = cut(functional.embedding(*rows), self.config.given)
        if self.config.input_norm:
            given = stack.input_norm(given)
        if self.config.beside:
            return stack.fc(given) + own, embedded
        hidden = stack.target_norm(given) + own
        if self.config.lent:
            return stack.fc(torch.cat((embedded, hidden), -1)), None
        both = stack.pre_fc_norm_embedding(embedded), stack.pre_fc_norm_hidden(hidden)
        return stack.fc(torch.cat(both, -1)), None


class TokenRows(nn.Module):
    """logits (B, O, D) of some tokens -> of all (B, O, V)."""

    index: Tensor  # (V)

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("index", torch.tensor(tokens), persistent=False)

    def forward(self, logits: Tensor) -> Tensor:
        return functional.pad(logits, (0, 1), value=-torch.inf).index_select(2, self.index)


class BestClusters(nn.Module):
    """logits (B, O, V), scores of clusters (B, O, C) -> the logits of the best clusters' tokens."""

    cluster: Tensor  # (V)

    def __init__(self, clusters: Sequence[int], best: int) -> None:
        super().__init__()
        self.best = best
        self.register_buffer("cluster", torch.tensor(clusters), persistent=False)

    def forward(self, logits: Tensor, scores: Tensor) -> Tensor:
        chosen = scores >= scores.topk(self.best).values[..., -1:]
        return torch.where(chosen.index_select(2, self.cluster), logits, -torch.inf)


def add_ends(stack: nn.Module, config: HeadConfig, hidden_size: int, norm: NormConfig) -> None:
    """Add the linears and norms before the first layer and after the last one."""
    add_linears(stack, chain(*config.list_linears(hidden_size, 0, "")))
    for name, size in config.norms:
        stack.add_module(name, Norm(size, norm))
