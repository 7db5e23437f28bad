"""Granite 3 with a mixture of experts in every layer."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import granite
from llmc.export.families.mixtures import put_experts, read_experts
from llmc.export.keys import Keys

RENAMED = (
    *(("block_sparse_moe.input_linear", "experts.gate_up_proj"), ("block_sparse_moe.router.layer", "experts.router")),
    ("block_sparse_moe.output_linear", "experts.down_proj"),
)


def read(keys: Keys) -> DecoderConfig:
    """Experts are ``intermediate_size`` wide."""
    keys.rename({"num_local_experts": "num_experts"})
    experts = read_experts(keys, keys.integer("intermediate_size"), normalized=True, count=8)
    return replace(put_experts(granite.read(keys), experts), renamed=RENAMED)
