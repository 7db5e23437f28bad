"""Mistral Small 4: DeepSeek's attention, whose queries grow as Ministral 3's do, and experts chosen by a softmax."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.deepseek_v2 import read_mixture
from llmc.export.families.ministral3 import OWN, grow_queries
from llmc.export.families.mixtures import read_experts, read_groups
from llmc.export.keys import Keys
from llmc.export.parts.experts import ExpertsConfig


def read(keys: Keys) -> DecoderConfig:
    """``head_dim`` is the whole width of a key, of which the rope's ``partial_rotary_factor`` is rotated."""
    keys.fill(n_shared_experts=1, moe_intermediate_size=2048, q_lora_rank=1024, kv_lora_rank=256)
    keys.fill(qk_nope_head_dim=64, qk_rope_head_dim=64)
    keys.rename({"head_dim": "qk_head_dim", "qk_rope_head_dim": "head_dim"})
    rope, turned = keys.inside("rope_parameters"), keys.integer("head_dim")
    rope.fixed("partial_rotary_factor", turned / (turned + keys.integer("qk_nope_head_dim")))
    keys.fixed("rope_interleave", True)
    config = grow_queries(keys, read_mixture(keys, _read_experts, (*OWN, "partial_rotary_factor")))
    if (magnitude := config.ropes[0].magnitude) != 1:
        raise rope.error("mscale", rope.raw("mscale"), f"mscale_all_dim: heads are rotated in part, by {magnitude:g}")
    return replace(config, ropes=(replace(config.ropes[0], still=keys.integer("qk_nope_head_dim")),))


def _read_experts(keys: Keys, inner: int) -> ExpertsConfig:
    experts = read_experts(keys, inner, normalized=keys.flag("norm_topk_prob", True), count=128)
    return read_groups(keys, replace(experts, scale=keys.number("routed_scaling_factor", 1.0)), best=2)
