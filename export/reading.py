"""From Hugging Face's config keys to :class:`DecoderConfig`: what the families share.

Old checkpoints say ``rope_theta`` and ``rope_scaling``, those of transformers 5 ``rope_parameters``; both are read.
"""

from dataclasses import replace
from math import log
from typing import Any, cast

from llmc.export.config import AttentionConfig, DecoderConfig, Layer, MlpConfig, Rope, RopeType
from llmc.export.keys import Keys

_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_DEFAULT_THETA = 10_000.0  # transformers' default where a config says nothing
MOST_TOKEN_IDS = 1024  # each new token is looked up among those that end a text; models name up to ten


def read_decoder(
    keys: Keys,
    *,
    windows: tuple[int, ...] | None = None,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    default_theta: float = _DEFAULT_THETA,
    default_tied: bool = False,
    rotated: tuple[bool, ...] | None = None,
    scale: float | None = None,
) -> DecoderConfig:
    """Read the keys common to all families; the keywords are what a family differs in.

    ``windows`` and ``rotated`` (whether a layer encodes positions) have an entry per layer, and ``scale`` is that of
    :class:`AttentionConfig`.
    """
    layers, hidden_size, heads = (
        keys.integer(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    vocab_size, max_positions = keys.integer("vocab_size"), _max_positions(keys)
    windows, rotated = windows or (0,) * layers, rotated or (True,) * layers
    keys.choice("hidden_act", ("silu",))
    if keys.raw("quantization_config") is not None:
        raise keys.error("quantization_config", keys.raw("quantization_config"), "an unquantized checkpoint")
    kv_heads, head_dim = _kv_heads(keys, heads, default_kv_heads), _head_dim(keys, hidden_size, heads, default_head_dim)
    attention = AttentionConfig(
        heads, kv_heads, head_dim, scale=scale, qk_norm=qk_norm, qkv_bias=qkv_bias, o_bias=o_bias
    )
    rope = _rope(keys, head_dim, max_positions, default_theta)
    mlp = MlpConfig(keys.integer("intermediate_size"), bias=mlp_bias)
    return DecoderConfig(
        model_type=str(keys.raw("model_type")),
        layers=tuple(
            Layer(replace(attention, window=window, rope=0 if turned else None), mlp)
            for window, turned in zip(windows, rotated, strict=True)
        ),
        ropes=(rope,),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_positions=_extended(keys, rope, max_positions),
        norm_eps=keys.number("rms_norm_eps"),
        tied_head=keys.flag("tie_word_embeddings", default_tied),
        eos_token_ids=token_ids(keys, "eos_token_id", vocab_size),
        bos_token_id=next(iter(token_ids(keys, "bos_token_id", vocab_size)), None),
    )


def windows_from_layer(keys: Keys) -> tuple[int, ...]:
    """``use_sliding_window`` switches windows on: in the layers that ``layer_types`` names, or from
    ``max_window_layers`` on."""
    layers, used = keys.integer("num_hidden_layers"), keys.flag("use_sliding_window")
    window = keys.nullable_integer("sliding_window") if used else 0
    keys.skip("sliding_window")
    first = keys.integer("max_window_layers") if used and window else layers
    keys.skip("max_window_layers")
    return windows_by_type(keys, window, tuple(i >= first for i in range(layers)))


def windows_by_type(keys: Keys, window: int, default: tuple[bool, ...]) -> tuple[int, ...]:
    """``window`` in the layers that ``layer_types`` calls sliding, or in those of ``default`` where it is left out."""
    types, layers = keys.raw("layer_types"), len(default)
    if types is None:
        return tuple(window if windowed else 0 for windowed in default)
    options = ("full_attention", "sliding_attention") if window else ("full_attention",)
    if not isinstance(types, list) or len(types) != layers or any(kind not in options for kind in types):
        raise keys.error("layer_types", types, f"{layers} entries, each one of {', '.join(options)}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def token_ids(keys: Keys, name: str, vocab_size: int) -> tuple[int, ...]:
    """One token id, a list of them or null, each inside the vocabulary."""
    value = keys.raw(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if len(ids) > MOST_TOKEN_IDS or any(type(token) is not int or not 0 <= token < vocab_size for token in ids):
        few = f"a list of at most {MOST_TOKEN_IDS} such"
        raise keys.error(name, value, f"null, a token id below vocab_size={vocab_size} or {few}")
    return tuple(ids)


def _max_positions(keys: Keys) -> int:
    """Positions that plain attention was made for: long texts by dual chunks (arXiv 2402.17463) are not supported."""
    maximum = keys.integer("max_position_embeddings")
    if keys.raw("dual_chunk_attention_config") is None:
        return maximum
    inner = keys.inside("dual_chunk_attention_config")
    original = inner.integer("original_max_position_embeddings")
    inner.skip("chunk_size", "local_size")
    inner.finish()
    if original < maximum:
        keys.note(
            f"dual_chunk_attention_config is not supported and was left out: the context ends at {original} positions "
            f"instead of max_position_embeddings={maximum}"
        )
    return min(original, maximum)


def _kv_heads(keys: Keys, heads: int, default: int | None) -> int:
    kv_heads = keys.integer("num_key_value_heads", default)
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    return kv_heads


def _head_dim(keys: Keys, hidden_size: int, heads: int, default: int | None) -> int:
    if default is None and hidden_size % heads == 0:
        default = hidden_size // heads
    head_dim = keys.integer("head_dim", default)
    if head_dim % 2:
        raise keys.error("head_dim", head_dim, "an even number, since rotary embeddings turn pairs")
    return head_dim


def _rope(keys: Keys, dim: int, max_positions: int, default_theta: float) -> Rope:
    """Rotary parameters, from whichever of the two styles is there."""
    theta = keys.number("rope_theta", default_theta)
    styles = [name for name in ("rope_scaling", "rope_parameters") if keys.raw(name)]
    if len(styles) == 2 and keys.raw(styles[0]) != keys.raw(styles[1]):
        raise keys.error("rope_scaling", keys.raw("rope_scaling"), "the same as rope_parameters, or only one of them")
    if not styles:
        return Rope(dim, theta)
    inner = keys.inside(styles[0])
    kind = inner.choice("rope_type", _ROPE_TYPES, inner.choice("type", _ROPE_TYPES, "default"))
    inner_theta = inner.number("rope_theta", theta)
    if inner_theta != theta and keys.raw("rope_theta") is not None:
        raise keys.error("rope_theta", theta, f"the same as in {styles[0]} ({inner_theta})")
    if kind == "yarn" and inner_theta <= 1:
        raise keys.error("rope_theta", inner_theta, "more than 1, of which yarn takes the logarithm")
    scaling = _scaling(keys, inner, kind, max_positions) if kind != "default" else {}
    inner.finish()
    if kind == "dynamic":  # the base grows with what lies beyond max_position_embeddings, where this context ends
        return Rope(dim, inner_theta)
    return Rope(dim, inner_theta, cast(RopeType, kind), **scaling)


def _scaling(config: Keys, keys: Keys, kind: str, max_positions: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {"factor": keys.number("factor")}
    if kind in ("llama3", "yarn"):
        scaling["original_max_positions"] = keys.integer("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        scaling |= _rising(keys, "low_freq_factor", "high_freq_factor")
    if kind == "yarn":
        scaling |= _rising(keys, "beta_slow", "beta_fast", 1.0, 32.0)
        scaling |= {"truncate": keys.flag("truncate", True), "magnitude": _magnitude(config, keys, scaling["factor"])}
    if kind == "dynamic":
        keys.skip("original_max_position_embeddings")
        config.note(f"dynamic rope scaling begins where this context ends, at {max_positions} positions")
    return scaling


def _rising(
    keys: Keys, low: str, high: str, default_low: float | None = None, default_high: float | None = None
) -> dict[str, float]:
    """Two numbers, the second above the first."""
    found = {low: keys.number(low, default_low), high: keys.number(high, default_high)}
    if found[high] <= found[low]:
        raise keys.error(high, found[high], f"more than {low}={found[low]}")
    return found


def _magnitude(config: Keys, keys: Keys, factor: float) -> float:
    """Factor of yarn's sines and cosines: the one stated, else what the paper advises for ``factor``."""
    stated = keys.optional_number("attention_factor")
    scales = [keys.optional_number(name) for name in ("mscale", "mscale_all_dim")]
    if keys.raw("attn_factor") is not None:
        config.note(f"attn_factor={keys.raw('attn_factor')!r} was left out, as transformers does")
    if stated is not None:
        return stated
    upper, lower = scales if all(scales) else (1.0, 0.0)
    return _advised(factor, upper) / _advised(factor, lower)


def _advised(factor: float, scale: float | None) -> float:
    return 0.1 * (scale or 0.0) * log(factor) + 1.0 if factor > 1 else 1.0


def _extended(keys: Keys, rope: Rope, max_positions: int) -> int:
    """Positions that the model is good for: model cards add yarn to a config and leave the rest of it as it was."""
    if rope.type != "yarn" or rope.original_max_positions != max_positions:
        return max_positions
    positions = int(max_positions * rope.factor)
    keys.note(f"yarn extends max_position_embeddings={max_positions} by {rope.factor:g}, to {positions} positions")
    return positions
