"""What a decoder is, in llmc's own words: every question about a checkpoint's config is answered here once."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from llmc.inventory import Attention, Cache, Geometry, Linear, Mlp, Norm

RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. ``factor`` divides all frequencies (linear) or the low ones (llama3, as the rest)."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape and switches. ``windows`` has one entry per layer: 0 attends to everything, W to the last W."""

    model_type: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_head: bool
    windows: tuple[int, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def geometry(self) -> Geometry:
        """The part that every later stage needs."""
        return Geometry(
            model_type=self.model_type,
            layers=self.layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            tied_head=self.tied_head,
            windows=self.windows,
            linears=linears(self),
            norms=norms(self),
            attentions=attentions(self),
            mlps=mlps(self),
            caches=caches(self),
        )


EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


def linears(config: DecoderConfig) -> tuple[Linear, ...]:
    """Every linear in the order of the computation, the head last."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * head_dim, config.kv_heads * head_dim
    rows = (
        ("self_attn.q_proj", queries, hidden, config.qkv_bias, "input_layernorm", "input_layernorm"),
        ("self_attn.k_proj", keys, hidden, config.qkv_bias, "input_layernorm", "input_layernorm"),
        ("self_attn.v_proj", keys, hidden, config.qkv_bias, "input_layernorm", "input_layernorm"),
        ("self_attn.o_proj", hidden, queries, config.o_bias, "self_attn", "self_attn.v_proj"),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias, "post_attention_layernorm", "post_attention_layernorm"),
        ("mlp.up_proj", inner, hidden, config.mlp_bias, "post_attention_layernorm", "post_attention_layernorm"),
        ("mlp.down_proj", hidden, inner, config.mlp_bias, "mlp", "mlp.up_proj"),
    )
    return (
        *(
            Linear(f"{at}.{name}", outputs, inputs, bias, f"{at}.{reads}", f"{at}.{producer}", layer)
            for layer, at in _layers(config)
            for name, outputs, inputs, bias, reads, producer in rows
        ),
        Linear(HEAD, config.vocab_size, hidden, False, FINAL_NORM, FINAL_NORM, None),
    )


def norms(config: DecoderConfig) -> tuple[Norm, ...]:
    """Every norm in the order of the computation, the one before the head last."""
    found: list[Norm] = []
    for layer, at in _layers(config):
        found.append(Norm(f"{at}.input_layernorm", config.hidden_size, layer > 0, layer))
        if config.qk_norm:
            found += [Norm(f"{at}.self_attn.{part}_norm", config.head_dim, False, layer) for part in "qk"]
        found.append(Norm(f"{at}.post_attention_layernorm", config.hidden_size, True, layer))
    return (*found, Norm(FINAL_NORM, config.hidden_size, False, None))


def attentions(config: DecoderConfig) -> tuple[Attention, ...]:
    """Every attention in the order of the layers."""
    return tuple(
        Attention(
            name=f"{at}.self_attn",
            layer=layer,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            window=config.windows[layer],
            rope=0,
            projections=tuple(f"{at}.self_attn.{part}_proj" for part in "qkv"),
            cache=str(layer),
        )
        for layer, at in _layers(config)
    )


def mlps(config: DecoderConfig) -> tuple[Mlp, ...]:
    """Every feed-forward part in the order of the layers."""
    return tuple(Mlp(f"{at}.mlp", layer, config.intermediate_size, "silu", True) for layer, at in _layers(config))


def caches(config: DecoderConfig) -> tuple[Cache, ...]:
    """Every cache in the order of the graph's inputs."""
    return tuple(Cache(item.cache, "kv", (item.kv_heads, item.head_dim), item.window) for item in attentions(config))


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the decoder needs: what :mod:`llmc.export.decoder` has, without torch."""
    shapes: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (config.vocab_size, config.hidden_size)}
    for linear in linears(config):
        if linear.name != HEAD or not config.tied_head:
            shapes[f"{linear.name}.weight"] = (linear.outputs, linear.inputs)
            shapes |= {f"{linear.name}.bias": (linear.outputs,)} if linear.bias else {}
    return shapes | {f"{norm.name}.weight": (norm.size,) for norm in norms(config)}


def _layers(config: DecoderConfig) -> list[tuple[int, str]]:
    """Index and module path of every layer."""
    return [(layer, f"model.layers.{layer}") for layer in range(config.layers)]


def inverse_frequencies(config: DecoderConfig) -> npt.NDArray[np.float32]:
    """Angle per position of each rotated pair, float32 [head_dim / 2].

    Source: RoFormer (arXiv 2104.09864); position interpolation (arXiv 2306.15595) for ``linear``; for ``llama3`` the
    ``apply_scaling`` of Meta's llama-models repository. Computed in float32, as transformers does.
    """
    rope = config.rope
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1) / np.power(np.float32(rope.theta), exponents)
    if rope.type == "linear":
        frequencies = frequencies / np.float32(rope.factor)
    if rope.type == "llama3":
        frequencies = _llama3(frequencies, rope)
    return np.asarray(frequencies, np.float32)


def _llama3(frequencies: npt.NDArray[np.float32], rope: Rope) -> npt.NDArray[np.float32]:
    """Keep short wavelengths, divide long ones by ``factor``, and blend linearly between."""
    turns = np.float32(rope.original_max_positions) * frequencies / np.float32(2 * np.pi)
    blend = (turns - np.float32(rope.low_freq_factor)) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, np.float32(0), np.float32(1))
    return np.asarray((1 - blend) * frequencies / np.float32(rope.factor) + blend * frequencies, np.float32)
