"""GPT-NeoX and Pythia: attention and a plain MLP side by side, each behind its layer norm; q, k and v head by head."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.norm import PARALLEL_TWO_NORMS, PRE, NormConfig
from llmc.export.reading import read_decoder

PACKED = (("self_attn.query_key_value", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),)
RENAMED = (
    ("gpt_neox", "model"),
    ("embed_in", "embed_tokens"),
    ("attention", "self_attn"),
    ("attention.dense", "self_attn.o_proj"),
    ("mlp.dense_h_to_4h", "mlp.up_proj"),
    ("mlp.dense_4h_to_h", "mlp.down_proj"),
    ("final_layer_norm", "norm"),
    ("embed_out", "lm_head"),
)


def read(keys: Keys) -> DecoderConfig:
    """``hidden_dropout`` is for training."""
    keys.rename({"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})
    bias = keys.flag("attention_bias", True)
    config = read_decoder(
        keys,
        default_kv_heads=keys.integer("num_attention_heads"),
        bias=bias,
        mlp_bias=True,
        norm=NormConfig(keys.number("layer_norm_eps", 1e-5), "layer", bias=True),
        placement=PARALLEL_TWO_NORMS if keys.flag("use_parallel_residual", True) else PRE,
        gated=False,
        partial=0.25,
    )
    return replace(config, packed=PACKED, packed_groups=keys.integer("num_attention_heads"), renamed=RENAMED)
