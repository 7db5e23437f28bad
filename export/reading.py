"""From Hugging Face's config keys to :class:`DecoderConfig`: what the families share."""

from collections.abc import Mapping
from dataclasses import replace

from llmc.bundle.model.experts import Activation
from llmc.export.config import DecoderConfig, Layer
from llmc.export.keys import Keys
from llmc.export.parts.attention import AttentionConfig, QkNorm
from llmc.export.parts.mlp import MlpConfig
from llmc.export.parts.norm import PRE, NormConfig, Placement
from llmc.export.parts.rope import Rope
from llmc.export.rope_keys import DEFAULT_THETA, TYPES, RopeRules, read_ropes

# By transformers' names; it has several for the approximation by tanh.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "swish": "silu",
}
MOST_TOKEN_IDS = 1024  # every new token is compared with all of them; models name up to ten


def read_decoder(
    keys: Keys,
    *,
    windows: tuple[int, ...] | None = None,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    bias: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QkNorm = "none",
    norm: NormConfig | None = None,
    placement: Placement = PRE,
    inner: int | None = None,
    gated: bool = True,
    activations: Mapping[str, Activation] = ACTIVATIONS,
    activation_key: str = "hidden_act",
    default_activation: str | None = None,
    default_theta: float = DEFAULT_THETA,
    default_tied: bool = False,
    rotated: tuple[bool, ...] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    partial: float | None = None,
    interleaved: bool = False,
    local_theta: tuple[str, float] | None = None,
    rope_types: Mapping[str, str] = TYPES,
    rope_own: tuple[str, ...] = (),
) -> DecoderConfig:
    """Read the keys common to all families; the keywords are what a family differs in.

    ``windows`` and ``rotated`` (whether a layer encodes positions) have an entry per layer, ``bias`` is that of all
    projections of attention, ``scale`` and ``softcap``
    are those of :class:`AttentionConfig`, and :class:`RopeRules` explains the ropes. By default ``norm`` is RMS with
    the config's ``rms_norm_eps`` and ``inner`` is its ``intermediate_size``. ``activations`` maps the values of
    ``activation_key``.
    """
    layers = keys.integer("num_hidden_layers", len(rotated) if rotated else None)
    hidden_size, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    vocab_size, max_positions = keys.integer("vocab_size"), _max_positions(keys)
    windows, rotated = windows or (0,) * layers, rotated or (True,) * layers
    activation = activations[keys.choice(activation_key, tuple(activations), default_activation)]
    kv_heads, head_dim = _kv_heads(keys, heads, default_kv_heads), _head_dim(keys, hidden_size, heads, default_head_dim)
    attention = AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale,
        softcap=softcap,
        qk_norm=qk_norm,
        qkv_bias=bias or qkv_bias,
        o_bias=bias or o_bias,
    )
    rules = RopeRules(default_theta, partial, interleaved, rope_types, local_theta, rope_own)
    ropes = read_ropes(keys, rules, head_dim, max_positions)
    inner = inner or keys.integer("intermediate_size")
    mlp = MlpConfig(inner=inner, activation=activation, gated=gated, bias=mlp_bias)
    return DecoderConfig(
        model_type=str(keys.raw("model_type")),
        layers=tuple(
            Layer(replace(attention, window=window, rope=_rope_of(window, turned, ropes)), mlp, placement)
            for window, turned in zip(windows, rotated, strict=True)
        ),
        ropes=ropes if any(rotated) else (),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_positions=_read_positions(keys, ropes[0], max_positions),
        norm=norm or NormConfig(keys.number("rms_norm_eps")),
        tied_head=keys.flag("tie_word_embeddings", default_tied),
        eos_token_ids=token_ids(keys, "eos_token_id", vocab_size),
        bos_token_id=next(iter(token_ids(keys, "bos_token_id", vocab_size)), None),
    )


def _rope_of(window: int, rotated: bool, ropes: tuple[Rope, ...]) -> int | None:
    return (len(ropes) - 1 if window else 0) if rotated else None


def windows_from_layer(keys: Keys) -> tuple[int, ...]:
    """If ``use_sliding_window``, windows in the layers that ``layer_types`` names, or from layer ``max_window_layers``
    on."""
    layers, used = keys.integer("num_hidden_layers"), keys.flag("use_sliding_window")
    window = keys.sliding_window() if used else 0
    keys.skip("sliding_window")
    first = keys.integer("max_window_layers") if used and window else layers
    keys.skip("max_window_layers")
    return windows_by_type(keys, window, tuple(i >= first for i in range(layers)))


def windows_by_type(keys: Keys, window: int, default: tuple[bool, ...]) -> tuple[int, ...]:
    """``window`` in the layers that ``layer_types`` calls sliding; ``default`` replaces missing ``layer_types``."""
    types, layers = keys.raw("layer_types"), len(default)
    if types is None:
        return tuple(window if windowed else 0 for windowed in default)
    options = ("full_attention", "sliding_attention") if window else ("full_attention",)
    if not isinstance(types, list) or len(types) != layers or any(kind not in options for kind in types):
        raise keys.error("layer_types", types, f"{layers} entries, each one of {', '.join(options)}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def windows_by_pattern(keys: Keys, default: int) -> tuple[int, ...]:
    """Windows in the layers that ``layer_types`` names, or in all but every nth, ``sliding_window_pattern``."""
    layers, every = keys.integer("num_hidden_layers"), keys.integer("sliding_window_pattern", default)
    window = keys.sliding_window()
    return windows_by_type(keys, window, tuple((i + 1) % every != 0 for i in range(layers)))


def token_ids(keys: Keys, name: str, vocab_size: int) -> tuple[int, ...]:
    """The ids under ``name`` that the model has rows for; a note names the others, which it neither reads nor makes."""
    value = keys.raw(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if len(ids) > MOST_TOKEN_IDS or any(type(token) is not int or token < 0 for token in ids):
        raise keys.error(name, value, f"null, a token id, or a list of at most {MOST_TOKEN_IDS} token ids")
    if beyond := [token for token in ids if token >= vocab_size]:
        keys.note(f"{name} names {str(beyond)[1:-1]:.80}, but vocab_size={vocab_size}: left out")
    return tuple(token for token in ids if token < vocab_size)


def _max_positions(keys: Keys) -> int:
    """Positions of plain attention; dual chunk attention, for longer texts (arXiv 2402.17463), is not supported."""
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


def _read_positions(keys: Keys, rope: Rope, max_positions: int) -> int:
    """Positions that the model supports. Model cards tell users to add yarn to a config and change nothing else."""
    if rope.type != "yarn" or rope.original_max_positions != max_positions:
        return max_positions
    positions = int(max_positions * rope.factor)
    keys.note(f"yarn extends max_position_embeddings={max_positions} by {rope.factor:g}, to {positions} positions")
    return positions
