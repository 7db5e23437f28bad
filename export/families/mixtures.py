"""The common part of families with mixtures of experts."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.experts import ExpertsConfig
from llmc.export.parts.mlp import MlpConfig

# Learning alone reads these.
TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef")
# As transformers has them in its first mixture, Qwen2: a tensor for each expert, or one of all.
RENAMED = (
    *(("mlp.experts", "experts"), ("mlp.gate", "experts.router")),
    *((f"mlp.experts.{part}_proj", f"experts.{part}_proj.weight") for part in ("gate_up", "down")),
)


def read_experts(keys: Keys, inner: int, *, normalized: bool, count: int | None = None) -> ExpertsConfig:
    """The number of experts, and of those that each token goes through."""
    keys.skip(*TRAINING)
    keys.choice("hidden_act", ("silu",), "silu")
    experts, chosen = keys.integer("num_experts", count), keys.integer("num_experts_per_tok")
    if chosen > experts:
        raise keys.error("num_experts_per_tok", chosen, f"at most num_experts={experts}")
    return ExpertsConfig(count=experts, chosen=chosen, inner=inner, normalized=normalized)


def read_groups(keys: Keys, experts: ExpertsConfig, best: int) -> ExpertsConfig:
    """``experts``, chosen from the ``topk_group`` of ``n_group`` groups whose ``best`` experts have most together."""
    groups, chosen = keys.integer("n_group", 1), keys.integer("topk_group", 1)
    if experts.count % groups:
        raise keys.error("n_group", groups, f"a divisor of num_experts={experts.count}")
    size = experts.count // groups
    if chosen > groups or chosen * size < experts.chosen or (groups > 1 and size < best):
        raise keys.error(
            "topk_group", chosen, f"at most n_group={groups}, with {experts.chosen} experts or more in all"
        )
    return replace(experts, groups=groups, chosen_groups=chosen, best=best)


def put_experts(
    config: DecoderConfig, experts: ExpertsConfig, dense: tuple[bool, ...] = (), shared: MlpConfig | None = None
) -> DecoderConfig:
    """The decoder with experts, and beside them a ``shared`` MLP, in the place of MLPs but in layers that are
    ``dense``."""
    layers = tuple(
        layer if index < len(dense) and dense[index] else replace(layer, mlp=shared, experts=experts)
        for index, layer in enumerate(config.layers)
    )
    return replace(config, layers=layers)


def dense_layers(keys: Keys) -> tuple[bool, ...]:
    """The layers that ``mlp_only_layers`` lists, and all but every ``decoder_sparse_step``th."""
    layers, listed = keys.integer("num_hidden_layers"), keys.raw("mlp_only_layers") or []
    every = keys.integer("decoder_sparse_step", 1)
    if not isinstance(listed, list) or any(type(it) is not int or it not in range(layers) for it in listed):
        raise keys.error("mlp_only_layers", listed, f"indices of the {layers} layers")
    return tuple(index in listed or (index + 1) % every != 0 for index in range(layers))


def first_dense(keys: Keys) -> tuple[bool, ...]:
    """The layers that ``mlp_layer_types`` calls dense, or else the first ``first_k_dense_replace``."""
    layers, types = keys.integer("num_hidden_layers"), keys.raw("mlp_layer_types")
    dense = keys.integer("first_k_dense_replace", 0)
    if types is None:
        return (True,) * min(dense, layers)
    if not isinstance(types, list) or len(types) != layers or any(kind not in ("dense", "sparse") for kind in types):
        raise keys.error("mlp_layer_types", types, f"{layers} entries, each one of dense, sparse")
    return tuple(kind == "dense" for kind in types)
