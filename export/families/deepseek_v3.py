"""DeepSeek-V3 and Moonlight: as V2, with experts chosen by the sigmoid of their scores and a bias."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import deepseek_v2
from llmc.export.families.mixtures import read_experts, read_groups
from llmc.export.keys import Keys
from llmc.export.parts.experts import ExpertsConfig

OWN = (("mlp.gate.e_score_correction_bias", "experts.correction"),)


def read(keys: Keys) -> DecoderConfig:
    """Layers behind the last one, which predict further tokens, are left out."""
    keys.fill(n_group=8, topk_group=4, n_shared_experts=1, first_k_dense_replace=3)
    further = keys.integer("num_nextn_predict_layers", keys.integer("num_mtp_layers", 1))
    config = deepseek_v2.read_mixture(keys, _read_experts)
    if further:
        keys.note("layers behind the last one, which predict further tokens, are left out")
    left_out = tuple(f"layers.{len(config.layers) + index}" for index in range(further))
    return replace(config, renamed=(*config.renamed, *OWN), left_out=left_out)


def _read_experts(keys: Keys, inner: int) -> ExpertsConfig:
    keys.choice("scoring_func", ("sigmoid",), "sigmoid")
    keys.choice("topk_method", ("noaux_tc",), "noaux_tc")
    keys.fixed("moe_layer_freq", 1)
    experts = read_experts(keys, inner, normalized=keys.flag("norm_topk_prob", True), count=256)
    experts = replace(experts, score="sigmoid", corrected=True, scale=keys.number("routed_scaling_factor", 2.5))
    return read_groups(keys, experts, best=2)
