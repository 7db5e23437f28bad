"""Phi-3 and Phi-4 of contexts up to 16k: Llama with packed projections, and a window for all layers, or none."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder

PACKED = (
    ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
)


def read(keys: Keys) -> DecoderConfig:
    """``original_max_position_embeddings`` belongs to longrope, which is refused; dropout is for training."""
    keys.skip("embd_pdrop", "resid_pdrop", "original_max_position_embeddings")
    if keys.flag("attention_bias"):
        raise keys.error("attention_bias", True, "false, for transformers has no biases in a phi3 decoder")
    heads = keys.integer("num_attention_heads")
    window = 0 if keys.raw("sliding_window") is None else keys.integer("sliding_window")
    config = read_decoder(keys, windows=(window,) * keys.integer("num_hidden_layers"), default_kv_heads=heads)
    if config.ropes[0].type != "default":  # transformers takes yarn for longrope here, and refuses all others
        raise keys.error("rope_scaling", config.ropes[0].type, "none")
    return replace(config, packed=PACKED)
