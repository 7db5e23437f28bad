"""Phi-3 and Phi-4: Llama with packed projections, a part of each head rotated, and a window for all layers, or none."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder

PACKED = (
    ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
)
# The first checkpoints have another name for longrope; transformers refuses all other types.
ROPE_TYPES = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


def read(keys: Keys) -> DecoderConfig:
    """Dropout is for training; the other skipped keys are unused in Phi-4-mini's own code."""
    keys.skip("embd_pdrop", "resid_pdrop", "original_max_position_embeddings")
    keys.skip("full_attn_mod", "interpolate_factor")
    for name in ("attention_bias", "lm_head_bias", "mlp_bias"):
        keys.fixed(name, False, ", for transformers has no biases in a phi3 decoder")
    window = keys.optional_integer("sliding_window") or 0
    config = read_decoder(
        keys,
        windows=(window,) * keys.integer("num_hidden_layers"),
        default_kv_heads=keys.integer("num_attention_heads"),
        partial=1.0,
        rope_types=ROPE_TYPES,
    )
    return replace(config, packed=PACKED)
