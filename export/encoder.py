"""The encoder: a decoder's layers run once over whole texts, then pooling to a vector or a score for each text."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.bundle.model.encoder import DENSE, SCORE
from llmc.export.blocks.linear import Embedding, Linear, as_float
from llmc.export.blocks.mlp import ACTIVATIONS
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.part import Call
from llmc.export.blocks.rope import RotaryEmbedding, inverse_frequencies
from llmc.export.blocks.scale import Scale
from llmc.export.config import DecoderConfig
from llmc.export.decoder import Stack, TakePositions

# Least length that vectors are divided by, as in torch's normalize: zero vectors stay zero.
SHORTEST = 1e-12
_PLAIN: dict[str, Callable[[], nn.Module]] = {"identity": nn.Identity, "tanh": nn.Tanh}
BEHIND_DENSE = _PLAIN | dict(ACTIVATIONS.items())


class MeanPooling(nn.Module):
    """hidden (B, S, N), lengths (B) -> the mean over each row's positions (B, N)."""

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        rows = lengths.unsqueeze(1)
        # The length is taken from the values, so that this part of the graph can be run alone.
        inside = (torch.ones_like(hidden.select(2, 0)).cumsum(1) <= rows).unsqueeze(2)  # (B, S, 1)
        return torch.where(inside, hidden, 0.0).sum(1) / rows.float()


class DistanceBias(nn.Module):
    """ids (B, S) -> biases (1, H, S, S) of queries and keys, by how far the key comes before the query."""

    def __init__(self, positions: int, heads: int) -> None:
        super().__init__()
        self.last = positions - 1
        self.weight = nn.Parameter(torch.empty(2 * positions - 1, heads), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        counted = (ids[:1] <= ids[:1]).long().cumsum(1)  # (1, S)
        distance = counted.transpose(0, 1) - counted + self.last  # (S, S)
        return as_float(functional.embedding(distance, self.weight)).permute(2, 0, 1).unsqueeze(0)


class Normalize(nn.Module):
    """x (B, N) -> vectors of length one."""

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True)).clamp_min(SHORTEST)


class Encoder(nn.Module):
    """The contract of encoders: whole texts in; a vector or a score of each out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.encoder is not None
        self.end = config.encoder
        self.model = Stack(config)
        self.embedding_scale = Scale(config.embedding_scale)
        if self.end.types:
            self.model.embed_types = Embedding(self.end.types, config.hidden_size)
        if self.end.biased:
            self.model.distance_bias = DistanceBias(config.max_positions, config.geometry.most_heads)
        self.row, self.mean, self.normalize = TakePositions(), MeanPooling(), Normalize()
        self.rotary_emb = nn.ModuleList(RotaryEmbedding(inverse_frequencies(rope)) for rope in config.ropes)
        self.dense, self.score = (
            nn.ModuleList(
                Linear(it.inputs, it.outputs, bias=it.bias)
                for it in config.geometry.linears
                if it.name.startswith(f"{kind}.")
            )
            for kind in (DENSE, SCORE)
        )
        self.activations = nn.ModuleList(BEHIND_DENSE[it.activation]() for it in self.end.dense)
        self.dense_norm = nn.ModuleList(
            Norm(it.outputs, config.norm) if it.normed else nn.Identity() for it in self.end.dense
        )

    def forward(
        self, input_ids: Tensor, lengths: Tensor, token_types: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """ids (B, S), lengths (B) and, if the model has them, types of tokens (B, S) -> vectors (B, W) or scores (B),
        and the values (B, S, N) before the first layer and after each, so that the graph can be cut there."""
        ropes: list[Any] = [rope.inv_freq for rope in self.rotary_emb]
        bias = self.model.distance_bias(input_ids) if self.end.biased else None
        call = Call(lengths, ropes, bias=bias)
        borders = [self._embed(input_ids, token_types)]
        for layer in self.model.layers:
            borders.append(layer(borders[-1], None, call)[0])
        if self.end.pooling == "mean":
            pooled = self.mean(self.model.norm(borders[-1]), lengths)
        else:
            last = lengths.unsqueeze(1) - 1
            places = last if self.end.pooling == "last" else last - last
            pooled = self.model.norm(self.row(borders[-1], places)).squeeze(1)
        for dense, activation, norm in zip(self.dense, self.activations, self.dense_norm, strict=True):
            pooled = norm(activation(dense(pooled)))
        if self.score:
            return self._score(pooled), borders
        return (self.normalize(pooled) if self.end.normalized else pooled), borders

    def _embed(self, input_ids: Tensor, token_types: Tensor | None) -> Tensor:
        x: Tensor = self.embedding_scale(self.model.embed_tokens(input_ids))
        x = x if self.model.embed_positions is None else x + self.model.embed_positions(input_ids)
        return x if token_types is None else x + self.model.embed_types(token_types)

    def _score(self, x: Tensor) -> Tensor:
        first, *others = (row(x).squeeze(1) for row in self.score)
        difference = first - others[0] if others else first
        return torch.sigmoid(difference) if self.end.sigmoid else difference
