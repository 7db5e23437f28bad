"""Qwen3 with a mixture of experts: Qwen3-30B-A3B and its like."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import qwen3
from llmc.export.families.mixtures import RENAMED, dense_layers, put_experts, read_experts
from llmc.export.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    """Weights of experts are normalized only if ``norm_topk_prob`` says so."""
    keys.rename({"num_local_experts": "num_experts"})
    keys.fixed("use_sliding_window", False)  # transformers has it in all layers, whatever max_window_layers says
    experts = read_experts(
        keys, keys.integer("moe_intermediate_size", 768), normalized=keys.flag("norm_topk_prob"), count=128
    )
    return replace(put_experts(qwen3.read(keys), experts, dense_layers(keys)), renamed=RENAMED)
