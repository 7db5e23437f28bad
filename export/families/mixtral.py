"""Mixtral: Mistral with a mixture of experts in every layer."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import mistral
from llmc.export.families.mixtures import RENAMED, put_experts, read_experts
from llmc.export.keys import Keys

OWN = (
    *(("block_sparse_moe.experts", "experts"), ("block_sparse_moe.gate", "experts.router")),
    *(("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")),
)


def read(keys: Keys) -> DecoderConfig:
    """Experts are ``intermediate_size`` wide."""
    keys.rename({"num_local_experts": "num_experts"})
    experts = read_experts(keys, keys.integer("intermediate_size"), normalized=True, count=8)
    return replace(put_experts(mistral.read(keys, 1_000_000.0), experts), renamed=(*RENAMED, *OWN))
