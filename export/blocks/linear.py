"""Linears, heads and embeddings."""

from collections.abc import Iterable
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.bundle.model import linear as inventory


class Linear(nn.Module):
    """x (..., in) -> x W^T + b (..., out)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ as_float(self.weight).t()
        return y if self.bias is None else y + as_float(self.bias)


def add_linears(module: nn.Module, listed: Iterable[inventory.Linear]) -> None:
    """Add a module for each listed linear, under the last part of its name."""
    for item in listed:
        module.add_module(item.name.rpartition(".")[2], Linear(item.inputs, item.outputs, bias=item.bias))


class TiedHead(nn.Module):
    """hidden (B, O, N) -> logits (B, O, V) with the embedding's weight."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ as_float(weight).t()


class Embedding(nn.Module):
    """ids (B, S) -> vectors (B, S, hidden). Rows are gathered before they are converted."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return as_float(functional.embedding(ids, self.weight))


class PositionEmbedding(nn.Module):
    """ids (B, S), lengths (B) before them (default none) -> the vectors (B, S, hidden) of their positions."""

    def __init__(self, positions: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, hidden_size), requires_grad=False)

    def forward(self, ids: Tensor, past_lengths: Tensor | None = None) -> Tensor:
        counted = (ids <= ids).long().cumsum(1)  # 1 ... S without a Shape node, which GPU kernels lack
        positions = counted if past_lengths is None else past_lengths.unsqueeze(1) + counted
        return as_float(functional.embedding(positions - 1, self.weight))


def cut(x: Tensor, *widths: int) -> list[Tensor]:
    """Parts of the last axis of these widths, and what is left: a Slice each, where torch's own make a sequence."""
    ends = [0, *accumulate(widths), x.shape[-1]]
    return [x[..., start:end] for start, end in pairwise(ends)]


def as_float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else x.float()
