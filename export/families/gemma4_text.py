"""Gemma 4 text: Gemma 3 with unscaled attention, value norms, a scalar and inputs for each layer, and shared caches."""

from dataclasses import replace

from llmc.export.config import DecoderConfig, Layer
from llmc.export.families.gemma3_text import read_sandwich
from llmc.export.families.mixtures import read_experts
from llmc.export.keys import Keys
from llmc.export.parts.attention import AttentionConfig
from llmc.export.parts.norm import SANDWICH
from llmc.export.reading import windows_by_pattern
from llmc.export.rope_keys import require_both_ropes

# Keys of the layers that see all positions: in published configs, and for each layer as transformers saves them.
OWN = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}

# Norms of layers with experts beside the MLP: both read the residual stream, and the router through a norm of its own.
BESIDE = replace(
    SANDWICH,
    before_experts="pre_feedforward_layernorm_2",
    after_experts="post_feedforward_layernorm_2",
    after_dense="post_feedforward_layernorm_1",
)
RENAMED = (
    *(("router.proj", "experts.router"), ("router.scale", "experts.router_norm.weight")),
    ("router.per_expert_scale", "experts.per_expert_scale"),
    # With the last word in GGUF files alone; the longest name counts.
    *(
        (f"experts.{part}_proj{end}", f"experts.{part}_proj.weight")
        for part in ("gate_up", "down")
        for end in ("", ".weight")
    ),
)


def read(keys: Keys, default_per_layer: int = 256) -> DecoderConfig:
    """The last ``num_kv_shared_layers`` read the cache of the last layer before them with the same kind of window."""
    require_both_ropes(keys)
    if keys.raw("use_bidirectional_attention") not in (None, "vision"):  # over images, which the outer config reads
        raise keys.error("use_bidirectional_attention", keys.raw("use_bidirectional_attention"), "null or 'vision'")
    keys.skip(*OWN, "per_layer_config")
    windows = windows_by_pattern(keys, default=6)
    config = read_sandwich(
        keys, windows=(*windows[:-1], 0), offset=False, default_activation="gelu_pytorch_tanh", scale=1.0
    )
    full = [index for index, layer in enumerate(config.layers) if layer.attention and not layer.attention.window]
    head_dim, kv_heads = _read_own(keys, full)
    alike = keys.flag("attention_k_eq_v")
    config = config.change_attentions(
        lambda _, it: replace(
            it,
            value_norm=True,
            head_dim=it.head_dim if it.window else head_dim,
            kv_heads=kv_heads if alike and kv_heads and not it.window else it.kv_heads,
            keys_are_values=alike and not it.window,
            sees_rows_ahead=it.window > 0,
        )
    )
    per_layer = keys.integer("hidden_size_per_layer_input", default_per_layer)
    rows = keys.integer("vocab_size_per_layer_input", config.vocab_size)
    if per_layer and rows != config.vocab_size:
        raise keys.error("vocab_size_per_layer_input", rows, f"vocab_size={config.vocab_size}")
    filler = keys.integer("pad_token_id", 0) if per_layer else 0
    if filler >= rows:
        raise keys.error("pad_token_id", filler, f"less than vocab_size={rows}")
    config = _add_experts(keys, config)
    # Some checkpoints store keys and values that these layers do not have.
    shared = [index for index, it in enumerate(config.layers) if it.attention and it.attention.source is not None]
    return replace(
        config,
        ropes=(replace(config.ropes[0], dim=head_dim), *config.ropes[1:]),
        per_layer=per_layer,
        per_layer_filler=filler,
        left_out=tuple(f"layers.{i}.self_attn.{name}" for i in shared for name in ("k_proj", "v_proj", "k_norm")),
        layer_scalars=True,
    )


def read_unified(keys: Keys) -> DecoderConfig:
    """Gemma 4 12B, by default without inputs for each layer."""
    return read(keys, default_per_layer=0)


def _add_experts(keys: Keys, config: DecoderConfig) -> DecoderConfig:
    config = replace(config, layers=_share(keys, config.layers))
    if not keys.flag("enable_moe_block"):
        keys.skip("num_experts", "top_k_experts", "moe_intermediate_size")
        return config
    keys.rename({"top_k_experts": "num_experts_per_tok"})
    keys.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    experts = read_experts(keys, keys.integer("moe_intermediate_size"), normalized=True)
    experts = replace(experts, activation="gelu_tanh", routed_apart=True)
    layers = tuple(replace(layer, placement=BESIDE, experts=experts) for layer in config.layers)
    return replace(config, layers=layers, renamed=RENAMED)


def _read_own(keys: Keys, full: list[int]) -> tuple[int, int | None]:
    """Head size of the layers that see all, and their heads of keys where they differ."""
    stated = keys.raw("per_layer_config")
    if stated is None:
        return keys.integer("global_head_dim", 512), keys.optional_integer("num_global_key_value_heads")
    sizes = list(stated.values()) if isinstance(stated, dict) else []
    alike = all(isinstance(it, dict) and it == sizes[0] and set(it) <= set(OWN.values()) for it in sizes)
    if not sizes or not alike or [name.lstrip("0") or "0" for name in stated] != [*map(str, full)]:
        raise keys.error("per_layer_config", stated, f"the same sizes for each of the layers {full}, and for no other")
    own = Keys({name: sizes[0].get(inner) for name, inner in OWN.items()}, f"{keys.where}: per_layer_config")
    return own.integer("global_head_dim", 512), own.optional_integer("num_global_key_value_heads")


def _share(keys: Keys, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    shared, wide = keys.integer("num_kv_shared_layers", 0), keys.flag("use_double_wide_mlp")
    first = len(layers) - shared
    sources = {_window(layer): index for index, layer in enumerate(layers[:first])}
    if any(_window(layer) not in sources for layer in layers):
        raise keys.error("num_kv_shared_layers", shared, "a layer of each kind before those that share caches")

    def change(layer: Layer) -> Layer:
        assert layer.attention is not None and layer.mlp is not None
        mlp = replace(layer.mlp, inner=2 * layer.mlp.inner) if wide else layer.mlp
        return replace(layer, mlp=mlp, attention=replace(layer.attention, source=sources[_window(layer)]))

    return (*layers[:first], *map(change, layers[first:]))


def _window(layer: Layer) -> int:
    assert isinstance(layer.attention, AttentionConfig)
    return layer.attention.window
