"""LFM2 with a mixture of experts in all but the first layers, chosen by the sigmoid of their scores and a bias."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import lfm2
from llmc.export.families.mixtures import put_experts, read_experts
from llmc.export.keys import Keys

EXPERTS = (
    *(("feed_forward.gate", "experts.router"), ("feed_forward.expert_bias", "experts.correction")),
    *(("feed_forward.experts", "experts"), ("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")),
    *((f"feed_forward.experts.{part}_proj", f"experts.{part}_proj.weight") for part in ("gate_up", "down")),
)


def read(keys: Keys) -> DecoderConfig:
    """``num_dense_layers`` have an MLP, ``intermediate_size`` wide."""
    keys.rename(lfm2.KEYS)
    config = lfm2.read(keys, keys.integer("intermediate_size"))
    inner, normalized = keys.integer("moe_intermediate_size", 1792), keys.flag("norm_topk_prob", True)
    experts = replace(
        read_experts(keys, inner, normalized=normalized, count=32),
        score="sigmoid",
        corrected=keys.flag("use_expert_bias", True),
        scale=keys.number("routed_scaling_factor", 1.0),
    )
    dense = (True,) * keys.integer("num_dense_layers", 2)
    return replace(put_experts(config, experts, dense), renamed=(*config.renamed, *EXPERTS))
