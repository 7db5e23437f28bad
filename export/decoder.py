"""The decoder: one torch module for every family, named like Hugging Face's so that checkpoint tensors fit by name.

Weights keep the dtype in which the checkpoint stores them; arithmetic is float32.
"""

from collections.abc import Sequence

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from llmc.export import ops
from llmc.export.checkpoint import Checkpoint
from llmc.export.config import DecoderConfig, inverse_frequencies

Cache = tuple[Tensor, Tensor]


class Linear(nn.Module):
    """x (..., in) -> x W^T + b (..., out)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ _float(self.weight).t()
        return y if self.bias is None else y + _float(self.bias)


class TiedHead(nn.Module):
    """hidden (B, O, N) -> logits (B, O, V) with the embedding's weight."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ _float(weight).t()


class TakePositions(nn.Module):
    """A module only so that its node in the graph has a name."""

    def forward(self, hidden: Tensor, indices: Tensor) -> Tensor:
        return ops.take_positions(hidden, indices)


class Embedding(nn.Module):
    """ids (B, S) -> vectors (B, S, hidden). Rows are gathered before they are converted."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return _float(functional.embedding(ids, self.weight))


class RMSNorm(nn.Module):
    """Normalise runs of ``size`` values of the last dimension: the whole of it, or each head (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.shape[0]
        runs = x if x.shape[-1] == size else x.view(*x.shape[:-1], -1, size)
        normed = functional.rms_norm(runs, (size,), _float(self.weight), self.eps)
        return normed if runs is x else normed.flatten(-2)


class Attention(nn.Module):
    """Grouped-query attention over a cache that the caller owns."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__()
        hidden, queries, keys = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.num_heads, self.kv_heads, self.window = config.heads, config.kv_heads, window
        self.q_proj = Linear(hidden, queries, bias=config.qkv_bias)
        self.k_proj = Linear(hidden, keys, bias=config.qkv_bias)
        self.v_proj = Linear(hidden, keys, bias=config.qkv_bias)
        self.o_proj = Linear(queries, hidden, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, past: Cache, past_lengths: Tensor, inv_freq: Tensor) -> tuple[Tensor, Cache]:
        attn, keys, values = ops.cached_attention(
            self.q_norm(self.q_proj(x)),
            self.k_norm(self.k_proj(x)),
            self.v_proj(x),
            past,
            past_lengths,
            inv_freq,
            num_heads=self.num_heads,
            kv_heads=self.kv_heads,
            window=self.window,
        )
        return self.o_proj(attn), (keys, values)


class SiLU(nn.Module):
    """x * sigmoid(x), spelt out so that the graph holds two plain nodes of known shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class MLP(nn.Module):
    """Gated feed-forward: down(silu(gate x) * up x)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.act_fn = SiLU()

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down


class DecoderLayer(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, past: Cache, past_lengths: Tensor, inv_freq: Tensor) -> tuple[Tensor, Cache]:
        attn, present = self.self_attn(self.input_layernorm(x), past, past_lengths, inv_freq)
        x = x + attn
        return x + self.mlp(self.post_attention_layernorm(x)), present


class Stack(nn.Module):
    """What Hugging Face calls ``model``: all but the head. It is a namespace; :class:`Decoder` runs it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, window) for window in config.windows)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Decoder(nn.Module):
    """Contract 1: new tokens and a cache in; logits, what they are made of, and the updated cache out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Stack(config)
        self.logit_rows = TakePositions()
        self.lm_head = TiedHead() if config.tied_head else Linear(config.hidden_size, config.vocab_size)
        self.rotary_emb = nn.Module()
        self.rotary_emb.register_buffer("inv_freq", torch.tensor(inverse_frequencies(config)), persistent=False)

    def forward(
        self, input_ids: Tensor, past_lengths: Tensor, logit_indices: Tensor, pasts: Sequence[Cache]
    ) -> tuple[Tensor, Tensor, list[Cache]]:
        """ids (B, S), lengths (B), indices (B, O), caches (B, KV, C, D) -> logits (B, O, V), (B, O, N), caches."""
        x = self.model.embed_tokens(input_ids)  # (B, S, N)
        presents = []
        for layer, past in zip(self.model.layers, pasts, strict=True):
            x, present = layer(x, past, past_lengths, self.rotary_emb.inv_freq)
            presents.append(present)
        x = self.model.norm(self.logit_rows(x, logit_indices))  # (B, O, N)
        tied_weight = (self.model.embed_tokens.weight,) if self.config.tied_head else ()
        return self.lm_head(x, *tied_weight), x, presents


def load_decoder(checkpoint: Checkpoint) -> Decoder:
    """The decoder with a checkpoint's weights, to compute with torch."""
    decoder = Decoder(checkpoint.config)
    weights: dict[str, Tensor] = {}
    for shard in checkpoint.shards:
        with safe_open(shard.path, framework="pt") as file:
            weights |= {name: file.get_tensor(name) for name in shard.tensors.keys() & checkpoint.tensors.keys()}
    decoder.load_state_dict(weights, assign=True)
    return decoder.eval()


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else x.float()
