"""GLM-4.7-Flash: DeepSeek-V3 with other sizes, whose dense layers ``mlp_layer_types`` names."""

from llmc.export.config import DecoderConfig
from llmc.export.families import deepseek_v3
from llmc.export.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    """By default the first layer is dense."""
    keys.fill(n_routed_experts=64, routed_scaling_factor=1.8, n_shared_experts=1, moe_intermediate_size=1536)
    keys.fill(q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, first_k_dense_replace=1, n_group=1, topk_group=1)
    return deepseek_v3.read(keys)
