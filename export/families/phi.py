"""Phi-1, Phi-1.5 and Phi-2: attention and a plain MLP side by side behind one layer norm, biases everywhere."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.norm import PARALLEL, NormConfig
from llmc.export.reading import read_decoder

RENAMED = (
    ("self_attn.dense", "self_attn.o_proj"),
    ("mlp.fc1", "mlp.up_proj"),
    ("mlp.fc2", "mlp.down_proj"),
    ("model.final_layernorm", "model.norm"),
)


def read(keys: Keys) -> DecoderConfig:
    """No published checkpoint has ``qk_layernorm``. Dropouts are for training; ``partial_rotary_factor`` came after
    ``rotary_dim``, which transformers does not read."""
    keys.skip("embd_pdrop", "resid_pdrop", "rotary_dim")
    keys.fixed("qk_layernorm", False)
    keys.fixed("tie_word_embeddings", False, ", since the head adds a bias")
    config = read_decoder(
        keys,
        default_kv_heads=keys.integer("num_attention_heads"),
        bias=True,
        mlp_bias=True,
        norm=NormConfig(keys.number("layer_norm_eps", 1e-5), "layer", bias=True),
        placement=PARALLEL,
        gated=False,
        partial=0.5,
    )
    return replace(config, head_bias=True, renamed=RENAMED)
