"""OLMoE: norms over all heads of q and k together, and experts whose weights are published unnormalized."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.mixtures import RENAMED, put_experts, read_experts
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder


def read(keys: Keys) -> DecoderConfig:
    """Every layer has experts, ``intermediate_size`` wide."""
    keys.rename({"num_local_experts": "num_experts"})
    config = read_decoder(
        keys, default_kv_heads=keys.integer("num_attention_heads"), bias=keys.flag("attention_bias"), qk_norm="whole"
    )
    experts = read_experts(keys, keys.integer("intermediate_size"), normalized=keys.flag("norm_topk_prob"), count=64)
    return replace(put_experts(config, experts), renamed=RENAMED)
