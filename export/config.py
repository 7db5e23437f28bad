"""A decoder in llmc's own words: its layers, and the inventory of linears, norms, attentions and caches that follows.

A family fills in a :class:`DecoderConfig`; everything else asks it, so that no checkpoint's config is read twice.
"""

from dataclasses import dataclass
from typing import Literal

from llmc.inventory import EMBEDDING, HEAD, Attention, Cache, Geometry, Linear, Mlp, Norm

RopeType = Literal["default", "linear", "llama3", "yarn"]
Activation = Literal["silu"]


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding.

    Attributes:
        dim: values of a head that are rotated, pairs of them together.
        theta: base of the frequencies.
        factor: divides all frequencies (linear), or the low ones (llama3 and yarn, which also read what follows).
        low_freq_factor, high_freq_factor: turns within the original positions between which llama3 blends.
        original_max_positions: positions that the model was trained with.
        beta_slow, beta_fast: as low_freq_factor and high_freq_factor, of yarn; ``truncate`` widens to whole pairs.
        magnitude: of the rotated vectors, 1 where turning leaves their length as it is.
    """

    dim: int
    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    magnitude: float = 1.0


@dataclass(frozen=True)
class AttentionConfig:
    """An attention.

    Attributes:
        heads, kv_heads, head_dim: of queries, of keys and values, and the width of each.
        window: positions that a query sees, itself included; 0 for all.
        rope: index of its rope, None where positions are not encoded.
        scale: of the products of queries and keys; None is head_dim ** -0.5.
        qk_norm: whether each head of the queries and keys is normalised before it is rotated.
        qkv_bias, o_bias: whether the projections add a bias.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    rope: int | None = 0
    scale: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False


@dataclass(frozen=True)
class MlpConfig:
    """A feed-forward part, ``inner`` values wide."""

    inner: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Layer:
    """A residual block. ``mlp`` is None where attention is all that it has."""

    mixer: AttentionConfig
    mlp: MlpConfig | None


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape and switches.

    Attributes:
        embedding_scale: multiplies embeddings.
        residual_scale: multiplies what an attention or an MLP adds to the residual stream.
        logit_scale: multiplies logits.
        packed: weights of a layer that are stored as the rows of one tensor: its module, and theirs in order.
    """

    model_type: str
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied_head: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    packed: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def attention_scale(self, mixer: AttentionConfig) -> float:
        """Factor of the products of queries and keys.

        A rope's magnitude m makes both longer by m and so their products by m², as long as all of a head is rotated.
        """
        magnitude = 1.0 if mixer.rope is None else self.ropes[mixer.rope].magnitude
        return (mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale) * magnitude**2

    @property
    def geometry(self) -> Geometry:
        """The part that every later stage needs."""
        return Geometry(
            model_type=self.model_type,
            layers=len(self.layers),
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            tied_head=self.tied_head,
            linears=linears(self),
            norms=norms(self),
            attentions=attentions(self),
            mlps=mlps(self),
            caches=caches(self),
        )


FINAL_NORM = "model.norm"


def linears(config: DecoderConfig) -> tuple[Linear, ...]:
    """Every linear in the order of the computation, the head last."""
    found = [linear for index, _ in enumerate(config.layers) for linear in _layer_linears(config, index)]
    return (*found, Linear(HEAD, config.vocab_size, config.hidden_size, False, FINAL_NORM, FINAL_NORM, None))


def _layer_linears(config: DecoderConfig, index: int) -> list[Linear]:
    hidden, mixer, mlp = config.hidden_size, config.layers[index].mixer, config.layers[index].mlp
    queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    norm, attention = f"{_path(index)}.input_layernorm", f"{_path(index)}.self_attn"
    rows = [
        (f"{attention}.q_proj", queries, hidden, mixer.qkv_bias, norm, norm),
        (f"{attention}.k_proj", keys, hidden, mixer.qkv_bias, norm, norm),
        (f"{attention}.v_proj", keys, hidden, mixer.qkv_bias, norm, norm),
        (f"{attention}.o_proj", hidden, queries, mixer.o_bias, attention, f"{attention}.v_proj"),
    ]
    if mlp is not None:
        norm, at, inner, bias = f"{_path(index)}.post_attention_layernorm", f"{_path(index)}.mlp", mlp.inner, mlp.bias
        producer = f"{at}.up_proj" if mlp.gated else ""  # no factor passes through an activation
        rows += [(f"{at}.gate_proj", inner, hidden, bias, norm, norm)] if mlp.gated else []
        rows.append((f"{at}.up_proj", inner, hidden, bias, norm, norm))
        rows.append((f"{at}.down_proj", hidden, inner, bias, at, producer))
    return [Linear(*row, index) for row in rows]


def norms(config: DecoderConfig) -> tuple[Norm, ...]:
    """Every norm in the order of the computation, the one before the head last."""
    found: list[Norm] = []
    for index, layer in enumerate(config.layers):
        at = _path(index)
        found.append(Norm(f"{at}.input_layernorm", config.hidden_size, index > 0, index))
        if layer.mixer.qk_norm:
            found += [Norm(f"{at}.self_attn.{part}_norm", layer.mixer.head_dim, False, index) for part in "qk"]
        if layer.mlp is not None:
            found.append(Norm(f"{at}.post_attention_layernorm", config.hidden_size, True, index))
    return (*found, Norm(FINAL_NORM, config.hidden_size, False, None))


def attentions(config: DecoderConfig) -> tuple[Attention, ...]:
    """Every attention in the order of the layers."""
    return tuple(
        Attention(
            name=f"{_path(index)}.self_attn",
            layer=index,
            heads=layer.mixer.heads,
            kv_heads=layer.mixer.kv_heads,
            head_dim=layer.mixer.head_dim,
            window=layer.mixer.window,
            rope=layer.mixer.rope,
            projections=tuple(f"{_path(index)}.self_attn.{part}_proj" for part in "qkv"),
            cache=str(index),
        )
        for index, layer in enumerate(config.layers)
    )


def mlps(config: DecoderConfig) -> tuple[Mlp, ...]:
    """Every feed-forward part in the order of the layers."""
    return tuple(
        Mlp(f"{_path(index)}.mlp", index, layer.mlp.inner, layer.mlp.activation, layer.mlp.gated)
        for index, layer in enumerate(config.layers)
        if layer.mlp is not None
    )


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


def packed_parameters(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """Name of every tensor that holds the rows of several parameters, and theirs in order."""
    return {
        f"{_path(index)}.{module}.weight": tuple(f"{_path(index)}.{part}.weight" for part in parts)
        for index, _ in enumerate(config.layers)
        for module, parts in config.packed
    }


def _path(index: int) -> str:
    """Module path of a layer."""
    return f"model.layers.{index}"
