"""Torch modules of a decoder that sees: rows of embeddings in the places of tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class EmbeddingRows(nn.Module):
    """x (B, S, N), rows (R, N or more), indices (B, S) -> x with the first part of a row wherever its index is not -1.
    That is the last row to a Gather, so at least one must be there."""

    def forward(self, x: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
        own = rows if rows.shape[1] == x.shape[2] else rows[:, : x.shape[2]]
        return torch.where((indices >= 0).unsqueeze(-1), functional.embedding(indices, own), x)


class DeepRows(nn.Module):
    """x (B, S, N), rows (R, M), indices (B, S) -> x with a part of a row added wherever its index is not -1."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__()
        self.part = slice(start, end)

    def forward(self, x: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
        return torch.where((indices >= 0).unsqueeze(-1), x + functional.embedding(indices, rows[:, self.part]), x)


class TokensOfTable(nn.Module):
    """ids (B, S), indices (B, S) of rows -> ids with ``filler`` wherever an index is not -1."""

    def __init__(self, filler: int) -> None:
        super().__init__()
        self.filler = filler

    def forward(self, ids: Tensor, indices: Tensor) -> Tensor:
        return torch.where(indices >= 0, self.filler, ids)


class RowsAhead(nn.Module):
    """indices (B, S) of rows, -1 for none -> of how many tokens after it, up to the end of an image, each sees."""

    def forward(self, indices: Tensor) -> Tensor:
        is_row = indices >= 0
        # The same number for the rows of an image and the token of text before it.
        numbers = (~is_row).long().cumsum(1)
        counted = (indices == indices).long().cumsum(1)  # 1 ... S
        ends = (numbers.unsqueeze(1) <= numbers.unsqueeze(2)).long().sum(2)
        return torch.where(is_row, ends - counted, 0)
