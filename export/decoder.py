"""The decoder: one torch module for every family, named like Hugging Face's so that checkpoint tensors fit by name."""

from collections.abc import Sequence

from torch import Tensor, nn

from llmc.export import ops
from llmc.export.blocks.attention import Attention, Cache
from llmc.export.blocks.linear import Embedding, Linear, TiedHead
from llmc.export.blocks.mlp import MLP
from llmc.export.blocks.norm import RMSNorm
from llmc.export.blocks.rope import RotaryEmbedding, inverse_frequencies
from llmc.export.blocks.scale import Scale
from llmc.export.config import DecoderConfig


class TakePositions(nn.Module):
    """A module only so that its node in the graph has a name."""

    def forward(self, hidden: Tensor, indices: Tensor) -> Tensor:
        return ops.take_positions(hidden, indices)


class DecoderLayer(nn.Module):
    """Pre-norm residual block: attention, and an MLP where the layer has one."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        layer, hidden_size = config.layers[index], config.hidden_size
        self.input_layernorm = RMSNorm(hidden_size, config.norm_eps)
        self.self_attn = Attention(layer.mixer, hidden_size, config.norm_eps, config.attention_scale(layer.mixer))
        self.residual_scale = Scale(config.residual_scale)
        self.mlp = None
        if layer.mlp is not None:
            self.post_attention_layernorm = RMSNorm(hidden_size, config.norm_eps)
            self.mlp = MLP(layer.mlp, hidden_size)

    def forward(self, x: Tensor, past: Cache, past_lengths: Tensor, ropes: Sequence[Tensor]) -> tuple[Tensor, Cache]:
        """Values (B, S, N), this layer's cache, lengths (B) and the frequencies of every rope -> values, cache."""
        attn, present = self.self_attn(self.input_layernorm(x), past, past_lengths, ropes)
        x = x + self.residual_scale(attn)
        if self.mlp is not None:
            x = x + self.residual_scale(self.mlp(self.post_attention_layernorm(x)))
        return x, present


class Stack(nn.Module):
    """All but the head, ``model`` to Hugging Face. It is a namespace; :class:`Decoder` runs it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(len(config.layers)))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Decoder(nn.Module):
    """Contract 1: new tokens and a cache in; logits, what they are made of, and the updated cache out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Stack(config)
        self.embedding_scale, self.logit_scale = Scale(config.embedding_scale), Scale(config.logit_scale)
        self.logit_rows = TakePositions()
        self.lm_head = TiedHead() if config.tied_head else Linear(config.hidden_size, config.vocab_size)
        self.rotary_emb = nn.ModuleList(RotaryEmbedding(inverse_frequencies(rope)) for rope in config.ropes)

    def forward(
        self, input_ids: Tensor, past_lengths: Tensor, logit_indices: Tensor, pasts: Sequence[Cache]
    ) -> tuple[Tensor, Tensor, list[Cache], list[Tensor]]:
        """ids (B, S), lengths (B), indices (B, O), caches (B, KV, C, D) -> logits (B, O, V), (B, O, N), caches, and the
        values (B, S, N) before the first layer and after each: to be outputs is how the tracer marks them."""
        ropes = [rope.inv_freq for rope in self.rotary_emb]
        borders, presents = [self.embedding_scale(self.model.embed_tokens(input_ids))], []
        for layer, past in zip(self.model.layers, pasts, strict=True):
            x, present = layer(borders[-1], past, past_lengths, ropes)
            borders.append(x)
            presents.append(present)
        x = self.model.norm(self.logit_rows(borders[-1], logit_indices))
        tied_weight = (self.model.embed_tokens.weight,) if self.config.tied_head else ()
        return self.logit_scale(self.lm_head(x, *tied_weight)), x, presents, borders
