"""Qwen3-Next and Qwen3-Coder-Next: Qwen3.5's layers with experts, whose projections are packed by heads of keys."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import qwen3_5_text
from llmc.export.families.mixtures import RENAMED, dense_layers, put_experts, read_experts
from llmc.export.families.qwen3_5_moe_text import SHARED
from llmc.export.keys import Keys
from llmc.export.parts.mlp import MlpConfig

PACKED = (
    ("recurrent.in_proj_qkvz", ("recurrent.in_proj", "recurrent.gate_proj")),
    ("recurrent.in_proj_ba", ("recurrent.beta_proj", "recurrent.decay_proj")),
)


def read(keys: Keys) -> DecoderConfig:
    """Layers that predict further tokens (``mtp``) are left out."""
    keys.rename({"num_local_experts": "num_experts"})
    keys.fill(num_key_value_heads=2, num_experts=512, moe_intermediate_size=512, shared_expert_intermediate_size=512)
    inner, normalized = keys.integer("moe_intermediate_size"), keys.flag("norm_topk_prob", True)
    experts = read_experts(keys, inner, normalized=normalized)
    shared = MlpConfig(inner=keys.integer("shared_expert_intermediate_size"), weighed=True)
    config = put_experts(qwen3_5_text.read(keys), experts, dense_layers(keys), shared)
    renamed = (*config.renamed, *RENAMED, *SHARED)
    return replace(config, renamed=renamed, packed=PACKED, packed_groups=keys.integer("linear_num_key_heads", 16))
