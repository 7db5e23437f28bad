"""The rules that families with recurrent layers share."""

from dataclasses import replace

from llmc.export.config import Layer
from llmc.export.keys import Keys
from llmc.export.parts.recurrent import RecurrentConfig

# A layer's projections of Mamba 2 lie in one tensor.
PACKED = (("recurrent.all_proj", ("recurrent.gate_proj", "recurrent.in_proj", "recurrent.decay_proj")),)
RENAMED = (("mamba.in_proj", "recurrent.all_proj"), ("mamba.conv1d", "recurrent.conv"), ("mamba", "recurrent"))
SIZES = ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "conv_bias", "proj_bias", "chunk_size")
# As transformers writes it into JSON, which has no infinity.
ENDLESS = (None, [0.0, {"__float__": "Infinity"}], [0.0, float("inf")])


def recurrent_layers(
    keys: Keys,
    layers: tuple[Layer, ...],
    mixer: RecurrentConfig | None,
    kinds: tuple[str, ...],
    default: tuple[bool, ...],
    others: tuple[str, ...] = ("full_attention", "attention"),
) -> tuple[Layer, ...]:
    """``layers`` with ``mixer`` in the place of attention where ``layer_types`` says one of ``kinds``, not one of
    ``others``; ``default`` replaces missing ``layer_types``."""
    types, options = keys.raw("layer_types"), (*(kinds if mixer else ()), *others)
    if types is None:
        types = [kinds[0] if recurrent else others[0] for recurrent in default]
    if not isinstance(types, list) or len(types) != len(layers) or any(each not in options for each in types):
        raise keys.error("layer_types", types, f"{len(layers)} entries, each one of {', '.join(options)}")
    return tuple(
        replace(layer, attention=None, recurrent=mixer) if each in kinds else layer
        for each, layer in zip(types, layers, strict=True)
    )


def read_delta(keys: Keys, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> RecurrentConfig:
    """The gated delta rule of so many heads, whose value heads share the keys of a group."""
    if value_heads % key_heads:
        raise keys.error("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads={key_heads}")
    return RecurrentConfig(
        rule="delta",
        channels=2 * key_heads * key_dim + value_heads * value_dim,
        taps=keys.integer("linear_conv_kernel_dim", 4),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def read_mamba(keys: Keys, inner: int, default_groups: int = 1, default_state: int = 256) -> RecurrentConfig:
    """Mamba 2, whose values are ``inner`` wide in all heads; heads of a group share keys and queries."""
    keys.skip("mamba_chunk_size", "mamba_expand")
    keys.choice("hidden_act", ("silu",), "silu")
    heads, groups = keys.integer("mamba_n_heads", 128), keys.integer("mamba_n_groups", default_groups)
    width, stated = inner // heads, keys.raw("mamba_d_head")
    if stated not in (None, "auto", width) or width * heads != inner:
        raise keys.error("mamba_d_head", stated, f"{inner} values in all of mamba_n_heads={heads} heads")
    if heads % groups:
        raise keys.error("mamba_n_groups", groups, f"a divisor of mamba_n_heads={heads}")
    keys.fixed("mamba_proj_bias", False)
    if (limit := keys.raw("time_step_limit")) not in ENDLESS:
        raise keys.error("time_step_limit", limit, "steps without a limit")
    state = keys.integer("mamba_d_state", default_state)
    return RecurrentConfig(
        rule="mamba2",
        channels=inner + 2 * groups * state,
        taps=keys.integer("mamba_d_conv", 4),
        key_heads=groups,
        value_heads=heads,
        key_dim=state,
        value_dim=width,
        bias=keys.flag("mamba_conv_bias", True),
        gate_first=True,
    )
