"""From Hugging Face's config keys to :class:`DecoderConfig`: what the families share.

Old checkpoints say ``rope_theta`` and ``rope_scaling``, those of transformers 5 ``rope_parameters``; both are read.
"""

from dataclasses import replace
from typing import Any, cast

from llmc.export.config import AttentionConfig, DecoderConfig, Layer, MlpConfig, Rope, RopeType
from llmc.export.keys import Keys

_ROPE_TYPES = ("default", "linear", "llama3")
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
) -> DecoderConfig:
    """Read the keys common to all families; the keywords are what a family differs in."""
    layers, hidden_size, heads = (
        keys.integer(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    vocab_size, max_positions = keys.integer("vocab_size"), _max_positions(keys)
    keys.choice("hidden_act", ("silu",))
    if keys.raw("quantization_config") is not None:
        raise keys.error("quantization_config", keys.raw("quantization_config"), "an unquantized checkpoint")
    kv_heads, head_dim = _kv_heads(keys, heads, default_kv_heads), _head_dim(keys, hidden_size, heads, default_head_dim)
    attention = AttentionConfig(heads, kv_heads, head_dim, qk_norm=qk_norm, qkv_bias=qkv_bias, o_bias=o_bias)
    mlp = MlpConfig(keys.integer("intermediate_size"), bias=mlp_bias)
    return DecoderConfig(
        model_type=str(keys.raw("model_type")),
        layers=tuple(Layer(replace(attention, window=window), mlp) for window in windows or (0,) * layers),
        ropes=(_rope(keys, head_dim, max_positions),),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_positions=max_positions,
        norm_eps=keys.number("rms_norm_eps"),
        tied_head=keys.flag("tie_word_embeddings"),
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
    types = keys.raw("layer_types")
    if types is None:
        return tuple(window if i >= first else 0 for i in range(layers))
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


def _rope(keys: Keys, dim: int, max_positions: int) -> Rope:
    """Rotary parameters, from whichever of the two styles is there."""
    theta = keys.number("rope_theta", _DEFAULT_THETA)
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
    scaling = _scaling(inner, kind, max_positions) if kind != "default" else {}
    inner.finish()
    return Rope(dim, inner_theta, cast(RopeType, kind), **scaling)


def _scaling(keys: Keys, kind: str, max_positions: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {"factor": keys.number("factor")}
    if kind == "llama3":
        low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
        if high <= low:
            raise keys.error("high_freq_factor", high, f"more than low_freq_factor={low}")
        scaling |= {"low_freq_factor": low, "high_freq_factor": high}
        scaling["original_max_positions"] = keys.integer("original_max_position_embeddings", max_positions)
    return scaling
