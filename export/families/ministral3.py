"""Ministral 3: Mistral with yarn; queries are scaled up after each multiple of the original positions."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder

# Keys of the rope: the growth of queries and its period, which any type may have, and a repetition of the config's key.
OWN = "llama_4_scaling_beta", "original_max_position_embeddings", "max_position_embeddings"


def read(keys: Keys) -> DecoderConfig:
    window = keys.optional_integer("sliding_window") or 0
    config = read_decoder(
        keys,
        windows=(window,) * keys.integer("num_hidden_layers"),
        default_kv_heads=8,
        default_head_dim=128,
        rope_own=OWN,
    )
    return grow_queries(keys, config)


def grow_queries(keys: Keys, config: DecoderConfig) -> DecoderConfig:
    """The decoder whose queries grow as ``llama_4_scaling_beta`` of the rope says."""
    rope = inside_rope(keys)
    if rope.raw("llama_4_scaling_beta") is None:
        return config
    growth, period = rope.number("llama_4_scaling_beta"), rope.integer("original_max_position_embeddings")
    return config.change_attentions(lambda _, it: replace(it, query_growth=growth, grows_after=period))


def inside_rope(keys: Keys) -> Keys:
    """The object of the rope, by its new name or its old one. It must be there: transformers' default is a yarn."""
    return keys.inside("rope_scaling" if keys.raw("rope_scaling") else "rope_parameters")
