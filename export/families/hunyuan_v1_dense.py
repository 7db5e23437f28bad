"""Hunyuan's dense models: Llama with norms on the heads of q and k after the rotation, and a rope base enlarged by
alpha."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder

RENAMED = (("query_layernorm", "q_norm"), ("key_layernorm", "k_norm"))
# The checkpoints say dynamic but mean static; transformers computes the same.
ROPE_TYPES = {"default": "default", "dynamic": "ntk_alpha"}
# Keys of other models of the same code; transformers ignores them.
UNUSED = (
    *("add_classification_head", "attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id"),
    *("im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "norm_type", "org_vocab_size", "pad_id"),
    *("pool_type", "text_end_id", "text_start_id", "use_rotary_pos_emb"),
)


def read(keys: Keys) -> DecoderConfig:
    """``use_cla`` would share keys and values between layers."""
    keys.skip(*UNUSED)
    for name, value in (("use_cla", False), ("use_qk_norm", True), ("mlp_bias", False)):
        keys.fixed(name, value)
    config = read_decoder(
        keys,
        default_kv_heads=keys.integer("num_attention_heads"),
        bias=keys.flag("attention_bias"),
        qk_norm="head_after_rope",
        rope_types=ROPE_TYPES,
    )
    return replace(config, renamed=RENAMED)
