"""Qwen3.5 with a mixture of experts, and beside it an MLP for every token, which a gate of one value weighs."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import qwen3_5_text
from llmc.export.families.mixtures import RENAMED, put_experts, read_experts
from llmc.export.keys import Keys
from llmc.export.parts.mlp import MlpConfig

SHARED = (("mlp.shared_expert", "mlp"), ("mlp.shared_expert_gate", "mlp.weight_proj"))


def read(keys: Keys) -> DecoderConfig:
    """Weights of experts are always normalized."""
    keys.rename({"num_local_experts": "num_experts"})
    keys.skip("norm_topk_prob", "decoder_sparse_step", "intermediate_size")
    inner = keys.integer("moe_intermediate_size", 512)
    experts = read_experts(keys, inner, normalized=True, count=256)
    shared = MlpConfig(inner=keys.integer("shared_expert_intermediate_size", 512), weighed=True)
    config = qwen3_5_text.read(keys, inner)
    return replace(put_experts(config, experts, shared=shared), renamed=(*config.renamed, *RENAMED, *SHARED))
