"""The decoder: one torch module for every family, named like Hugging Face's so that checkpoint tensors fit by name."""

from collections.abc import Sequence

from torch import Tensor, nn

from llmc.export import ops
from llmc.export.blocks.attention import Attention, Cache
from llmc.export.blocks.linear import Embedding, Linear, PositionEmbedding, TiedHead
from llmc.export.blocks.mlp import MLP
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.rope import RotaryEmbedding, inverse_frequencies
from llmc.export.blocks.scale import Scale, Softcap
from llmc.export.config import DecoderConfig


class TakePositions(nn.Module):
    """A module only so that its node in the graph has a name."""

    def forward(self, hidden: Tensor, indices: Tensor) -> Tensor:
        return ops.take_positions(hidden, indices)


class DecoderLayer(nn.Module):
    """Residual block: attention and, if the layer has one, an MLP, with norms at the places of :class:`Placement`."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        layer, hidden_size = config.layers[index], config.hidden_size
        self.placement = place = layer.placement
        rope = None if layer.mixer.rope is None else config.ropes[layer.mixer.rope]
        self.self_attn = Attention(layer.mixer, rope, hidden_size, config.norm)
        self.residual_scale = Scale(config.residual_scale)
        self.mlp = None if layer.mlp is None else MLP(layer.mlp, hidden_size)
        of_mlp = (place.before_mlp, place.after_mlp) if layer.mlp else ()
        for name in filter(None, {place.before_attention, place.after_attention, *of_mlp}):
            self.add_module(name, Norm(hidden_size, config.norm))

    def forward(
        self, x: Tensor, past: Cache | None, lengths: Tensor, ropes: Sequence[Tensor]
    ) -> tuple[Tensor, Cache | None]:
        """Values (B, S, N), this layer's cache, lengths (B) and the frequencies of every rope -> values, cache; see
        :class:`llmc.export.blocks.attention.Attention` for a layer without a cache."""
        place = self.placement
        read = self._normalize(place.before_attention, x)
        attn, present = self.self_attn(read, past, lengths, ropes)
        y = x + self.residual_scale(self._normalize(place.after_attention, attn))
        if self.mlp is not None:
            if not place.parallel or place.before_mlp != place.before_attention:
                read = self._normalize(place.before_mlp, x if place.parallel else y)
            y = y + self.residual_scale(self._normalize(place.after_mlp, self.mlp(read)))
        return y, present

    def _normalize(self, name: str, x: Tensor) -> Tensor:
        return self.get_submodule(name)(x) if name else x


class Stack(nn.Module):
    """All but the head; Hugging Face calls it ``model``. Only a namespace: :class:`Decoder` runs it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if config.learned_positions:
            self.embed_positions = PositionEmbedding(config.max_positions, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(len(config.layers)))
        self.norm = Norm(config.hidden_size, config.norm)


class Decoder(nn.Module):
    """Contract 1: new tokens and a cache in; logits and the updated cache out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Stack(config)
        self.embedding_scale, self.logit_scale = Scale(config.embedding_scale), Scale(config.logit_scale)
        self.logit_rows = TakePositions()
        self.logit_softcap = Softcap(config.logit_softcap)
        self.lm_head = (
            TiedHead() if config.tied_head else Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        )
        self.rotary_emb = nn.ModuleList(RotaryEmbedding(inverse_frequencies(rope)) for rope in config.ropes)

    def forward(
        self, input_ids: Tensor, past_lengths: Tensor, logit_indices: Tensor, pasts: Sequence[Cache]
    ) -> tuple[Tensor, list[Cache], list[Tensor]]:
        """ids (B, S), lengths (B), indices (B, O), caches (B, KV, C, D) -> logits (B, O, V), caches, and the values (B,
        S, N) before the first layer and after each. They are outputs so that the graph can be cut there."""
        ropes = [rope.inv_freq for rope in self.rotary_emb]
        borders, presents = [self.embed(input_ids, past_lengths)], []
        for layer, past in zip(self.model.layers, pasts, strict=True):
            x, present = layer(borders[-1], past, past_lengths, ropes)
            borders.append(x)
            presents.append(present)
        x = self.model.norm(self.logit_rows(borders[-1], logit_indices))
        tied_weight = (self.model.embed_tokens.weight,) if self.config.tied_head else ()
        logits = self.logit_softcap(self.logit_scale(self.lm_head(x, *tied_weight)))
        return logits, presents, borders

    def embed(self, input_ids: Tensor, past_lengths: Tensor) -> Tensor:
        """ids (B, S), lengths (B) -> input of the first layer (B, S, N)."""
        x: Tensor = self.embedding_scale(self.model.embed_tokens(input_ids))
        return x if self.model.embed_positions is None else x + self.model.embed_positions(input_ids, past_lengths)
