"""What a decoder is, in llmc's own words: every question about a checkpoint's config is answered here once."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from llmc.bundle import Geometry

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
        )


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the decoder needs: what :mod:`llmc.export.decoder` has, without torch."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * head_dim, config.kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, outputs, inputs, bias in (
        ("self_attn.q_proj", queries, hidden, config.qkv_bias),
        ("self_attn.k_proj", keys, hidden, config.qkv_bias),
        ("self_attn.v_proj", keys, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, queries, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ):
        layer |= {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (hidden,)}
    return shapes if config.tied_head else shapes | {"lm_head.weight": (config.vocab_size, hidden)}


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
