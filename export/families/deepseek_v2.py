"""DeepSeek-V2: keys and values from one vector of each token, and experts beside an MLP for every token."""

from collections.abc import Callable
from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.mixtures import RENAMED, put_experts, read_experts, read_groups
from llmc.export.keys import Keys
from llmc.export.parts.experts import ExpertsConfig
from llmc.export.parts.mlp import MlpConfig
from llmc.export.reading import read_decoder
from llmc.export.rope_keys import compute_attention_factor

OWN = (
    *(("mlp.shared_experts", "mlp"), ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_proj")),
    *(("kv_a_layernorm", "kv_a_norm"), ("q_a_layernorm", "q_a_norm"), ("q_b_proj", "q_proj")),
)


def read(keys: Keys) -> DecoderConfig:
    keys.skip("aux_loss_alpha", "seq_aux")
    return read_latent(keys, _read_experts)


def read_latent(
    keys: Keys, experts: Callable[[Keys, int], ExpertsConfig], *, interleaved: bool = True
) -> DecoderConfig:
    """``head_dim`` is the rotated part of a head; the other one comes from the vector. The first
    ``first_k_dense_replace`` layers have an MLP alone. With ``q_lora_rank`` queries come from a vector, too."""
    keys.rename({"n_routed_experts": "num_experts", "qk_rope_head_dim": "head_dim"})
    keys.skip("ep_size", "qk_head_dim")
    heads, bias = keys.integer("num_attention_heads"), keys.flag("mlp_bias")
    config = read_decoder(keys, default_kv_heads=heads, default_head_dim=64, mlp_bias=bias, interleaved=interleaved)
    if (kv_heads := keys.integer("num_key_value_heads", heads)) != heads:
        raise keys.error("num_key_value_heads", kv_heads, f"num_attention_heads={heads}")
    turned, value_dim = keys.integer("head_dim", 64), keys.integer("v_head_dim", 128)
    head_dim = keys.integer("qk_nope_head_dim", 128) + turned
    if value_dim > head_dim:
        raise keys.error("v_head_dim", value_dim, f"at most {head_dim}, the width of keys")
    scale, latent = head_dim**-0.5 * _magnify(keys, config) ** 2, keys.integer("kv_lora_rank", 512)
    queries = keys.optional_integer("q_lora_rank") or 0
    config = config.change_attentions(
        lambda _, it: replace(
            it, head_dim=head_dim, scale=scale, latent=latent, value_dim=value_dim, query_latent=queries
        )
    )
    inner = keys.integer("moe_intermediate_size", 1407)
    shared = MlpConfig(inner=inner * keys.integer("n_shared_experts", 2), bias=bias)
    dense = keys.integer("first_k_dense_replace", 0)
    if dense >= len(config.layers):
        raise keys.error("first_k_dense_replace", dense, f"less than num_hidden_layers={len(config.layers)}")
    config = put_experts(config, experts(keys, inner), (True,) * dense, shared)
    return replace(config, renamed=(*RENAMED, *OWN))


def _magnify(keys: Keys, config: DecoderConfig) -> float:
    """The magnitude that yarn gives queries and keys whole, where ``mscale_all_dim`` says so."""
    stated = keys.raw("rope_parameters") or keys.raw("rope_scaling") or {}
    return compute_attention_factor(config.ropes[0].factor, stated.get("mscale_all_dim"))


def _read_experts(keys: Keys, inner: int) -> ExpertsConfig:
    """Weights are never normalised; ``group_limited_greedy`` chooses from the groups that have the best experts."""
    keys.choice("scoring_func", ("softmax",), "softmax")
    limited = keys.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy"
    keys.fixed("norm_topk_prob", False)
    keys.fixed("moe_layer_freq", 1)
    experts = read_experts(keys, inner, normalized=False, count=64)
    experts = replace(experts, scale=keys.number("routed_scaling_factor", 1.0))
    if limited:
        return read_groups(keys, experts, best=1)
    keys.skip("n_group", "topk_group")
    return experts
