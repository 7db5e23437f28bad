"""DeepSeek-V2: keys and values from one vector of each token, and experts beside an MLP for every token."""

from collections.abc import Callable
from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.mixtures import RENAMED, first_dense, put_experts, read_experts, read_groups
from llmc.export.keys import Keys
from llmc.export.parts.experts import ExpertsConfig
from llmc.export.parts.mlp import MlpConfig
from llmc.export.reading import read_decoder
from llmc.export.rope_keys import compute_attention_factor

LATENT = (
    ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_proj"),
    *(("kv_a_layernorm", "kv_a_norm"), ("q_a_layernorm", "q_a_norm"), ("q_b_proj", "q_proj")),
)


def read(keys: Keys) -> DecoderConfig:
    keys.fixed("rope_interleave", True)
    return read_mixture(keys, _read_experts)


def read_latent(keys: Keys, rope_own: tuple[str, ...] = ()) -> DecoderConfig:
    """A dense decoder. ``head_dim`` is the rotated part of a head; the other one comes from the vector. With
    ``q_lora_rank`` queries come from a vector, too. The family reads ``rope_own`` keys of the rope itself."""
    keys.rename({"qk_rope_head_dim": "head_dim"})
    keys.skip("qk_head_dim")
    heads, bias = keys.integer("num_attention_heads"), keys.flag("mlp_bias")
    config = read_decoder(
        keys,
        default_kv_heads=heads,
        default_head_dim=64,
        mlp_bias=bias,
        interleaved=keys.flag("rope_interleave", True),
        rope_own=rope_own,
    )
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
    return replace(config, renamed=LATENT)


def read_mixture(
    keys: Keys, experts: Callable[[Keys, int], ExpertsConfig], rope_own: tuple[str, ...] = ()
) -> DecoderConfig:
    """The decoder of :func:`read_latent` with experts beside a shared MLP behind its first dense layers."""
    keys.rename({"n_routed_experts": "num_experts"})
    keys.skip("aux_loss_alpha", "seq_aux", "ep_size")
    config, inner = read_latent(keys, rope_own), keys.integer("moe_intermediate_size", 1407)
    shared = MlpConfig(inner=inner * keys.integer("n_shared_experts", 2), bias=keys.flag("mlp_bias"))
    config = put_experts(config, experts(keys, inner), first_dense(keys), shared)
    return replace(config, renamed=(*config.renamed, *RENAMED, ("mlp.shared_experts", "mlp")))


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
