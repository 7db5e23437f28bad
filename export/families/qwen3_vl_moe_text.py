"""The text part of Qwen3-VL with experts, stored as published ([experts, in, out]) or as transformers 5 saves them."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import qwen3_vl
from llmc.export.families.mixtures import RENAMED, dense_layers, put_experts, read_experts
from llmc.export.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    """Weights of experts are always normalized. The default head is tied."""
    keys.rename({"num_local_experts": "num_experts"})
    keys.fill(num_key_value_heads=16, tie_word_embeddings=True)
    keys.skip("norm_topk_prob")
    experts = read_experts(keys, keys.integer("moe_intermediate_size", 1408), normalized=True, count=60)
    experts, config = replace(experts, transposed="some"), qwen3_vl.read_text(keys, None)
    return replace(put_experts(config, experts, dense_layers(keys)), renamed=RENAMED)
