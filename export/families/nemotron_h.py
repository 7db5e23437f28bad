"""Nemotron-H, Nemotron Nano 2 and 3: layers of one part each: Mamba 2, attention, a plain MLP, or plain experts."""

from dataclasses import replace

from llmc.export.config import DecoderConfig, Layer
from llmc.export.families import hybrids
from llmc.export.families.mixtures import read_experts, read_groups
from llmc.export.keys import Keys
from llmc.export.parts.experts import STEEP
from llmc.export.parts.norm import NormConfig, Placement
from llmc.export.reading import read_decoder

KEYS = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "mamba_num_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "mamba_state_dim": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "attention_head_dim": "head_dim",
    "layers_block_type": "layer_types",
}
# Keys of training, of kernels, and of layers that predict further tokens.
UNREAD = (
    *("chunk_size", "expand", "mamba_ssm_cache_dtype", "num_logits_to_keep", "rescale_prenorm_residual"),
    *("residual_in_fp32", "rms_norm_eps", "time_step_floor", "time_step_max", "time_step_rank", "use_mamba_kernels"),
    *("mtp_hybrid_override_pattern", "mtp_layers_block_type", "num_nextn_predict_layers"),
)
RENAMED = (
    *(("backbone", "model"), ("embeddings", "embed_tokens"), ("norm_f", "norm"), ("mixer", "recurrent")),
    *(("mixer.in_proj", "recurrent.all_proj"), ("mixer.conv1d", "recurrent.conv")),
    *((f"mixer.{part}_proj", f"self_attn.{part}_proj") for part in "qkvo"),
    *((f"mixer.{part}_proj", f"mlp.{part}_proj") for part in ("up", "down")),
    *(("mixer.experts", "experts"), ("mixer.shared_experts", "mlp"), ("mixer.gate", "experts.router")),
    ("mixer.gate.e_score_correction_bias", "experts.correction"),
    *((f"mixer.{name}_latent_proj", f"experts.{name}_latent_proj") for name in ("fc1", "fc2")),
)
MIXTURE = (
    *("moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"),
    *("n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok"),
    *("output_router_logits", "routed_scaling_factor", "topk_group"),
)
KINDS: dict[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
NEW_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def read(keys: Keys) -> DecoderConfig:
    """Positions are not encoded. No step is below ``time_step_min``: transformers ignores that one where it computes
    a single token."""
    keys.rename(KEYS)
    keys.skip(*UNREAD)
    keys.choice("mamba_hidden_act", ("silu",), "silu")
    kinds = _read_kinds(keys)
    if keys.flag("attention_bias"):
        keys.leave_out("attention_bias", "is not applied by transformers")
    inner = keys.integer("mamba_n_heads", 128) * keys.integer("mamba_d_head", 64)
    config = read_decoder(
        keys,
        default_kv_heads=8,
        default_head_dim=128,
        mlp_bias=keys.flag("mlp_bias"),
        norm=NormConfig(keys.number("layer_norm_epsilon", 1e-5)),
        placement=Placement("norm", "", "norm", ""),
        gated=False,
        activation_key="mlp_hidden_act",
        default_activation="relu2",
        rotated=(False,) * len(kinds),
    )
    mixer = hybrids.read_mamba(keys, inner, default_groups=8, default_state=128)
    mixer, whole = replace(mixer, least_step=keys.number("time_step_min", 0.001)), config.layers[0]
    layers = {
        "mamba": replace(whole, attention=None, mlp=None, recurrent=mixer),
        "attention": replace(whole, mlp=None),
        "mlp": replace(whole, attention=None),
    }
    if "moe" in kinds:
        layers["moe"] = _read_mixture(keys, layers["mlp"])
    keys.skip(*MIXTURE)
    return replace(
        config, layers=tuple(layers[kind] for kind in kinds), packed=hybrids.PACKED, renamed=RENAMED, left_out=("mtp",)
    )


def _read_kinds(keys: Keys) -> list[str]:
    """The kind of each layer, from a list or from a string of one letter for each."""
    types, pattern = keys.raw("layer_types"), keys.raw("hybrid_override_pattern")
    if not isinstance(types, list | None):
        raise keys.error("layer_types", types, "a list of the kinds of layers")
    named = [NEW_NAMES.get(str(it), str(it)) for it in types] if isinstance(types, list) else []
    letters = [KINDS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else list(named)
    name, stated = ("layer_types", types) if named else ("hybrid_override_pattern", pattern)
    if named and named != letters:
        raise keys.error(name, types, f"the layers of hybrid_override_pattern={pattern!r}")
    for kind in letters or ["nothing"]:
        if kind not in KINDS.values():
            raise keys.error(name, stated, f"layers of {', '.join(KINDS.values())}, and not {kind}")
    if keys.integer("num_hidden_layers", len(letters)) != len(letters):
        raise keys.error("num_hidden_layers", keys.raw("num_hidden_layers"), f"{len(letters)}, the layers of {name}")
    return letters


def _read_mixture(keys: Keys, plain: Layer) -> Layer:
    """``plain`` with experts like its MLP, chosen by the sigmoid of their scores and a bias, and a shared MLP."""
    keys.choice("mlp_hidden_act", ("relu2",), "relu2")
    keys.rename({"n_routed_experts": "num_experts"})
    inner, normalized = keys.integer("moe_intermediate_size", 7688), keys.flag("norm_topk_prob", True)
    experts = replace(
        read_experts(keys, inner, normalized=normalized, count=8),
        score="sigmoid",
        corrected=True,
        squared=True,
        latent=keys.optional_integer("moe_latent_size") or 0,
        latent_bias=keys.flag("mlp_bias"),
        scale=keys.number("routed_scaling_factor", 1.0) / STEEP,
    )
    assert plain.mlp is not None
    shared = replace(plain.mlp, inner=keys.integer("moe_shared_expert_intermediate_size", 7688))
    return replace(plain, mlp=shared, experts=read_groups(keys, experts, best=2))
