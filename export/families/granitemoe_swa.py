"""Granite swash with a mixture of experts in every layer, and beside it an MLP for every token, if any."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import granitemoehybrid
from llmc.export.families.granite_swa import read_swash
from llmc.export.families.mixtures import put_experts, read_experts
from llmc.export.keys import Keys
from llmc.export.parts.mlp import MlpConfig

PACKED = granitemoehybrid.PACKED[:1]
RENAMED = (
    *(("shared_mlp.output_linear", "mlp.down_proj"), ("block_sparse_moe.router", "experts.router")),
    *((f"block_sparse_moe.experts.{part}_proj", f"experts.{part}_proj.weight") for part in ("gate_up", "down")),
)


def read(keys: Keys) -> DecoderConfig:
    """Experts are ``intermediate_size`` wide."""
    keys.rename({"num_local_experts": "num_experts"})
    experts = read_experts(keys, keys.integer("intermediate_size"), normalized=True, count=8)
    shared = MlpConfig(inner=keys.integer("shared_intermediate_size")) if keys.raw("shared_intermediate_size") else None
    config = put_experts(read_swash(keys), experts, shared=shared)
    return replace(config, packed=PACKED, renamed=RENAMED)
