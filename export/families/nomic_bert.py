"""Nomic BERT: BERT with a rope instead of learned positions, a gated MLP, and no biases but those of the norms."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.bert import HEAD, TRAINING, attend_both_ways, classify, list_renamed
from llmc.export.keys import Keys
from llmc.export.parts.norm import BEHIND_SUMS, NormConfig
from llmc.export.reading import read_decoder

# Keys of the code that published checkpoints name, which transformers has by other names.
KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "n_positions": "max_position_embeddings",
    "rotary_emb_base": "rope_theta",
}
FIXED = {
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "causal", "prenorm", "parallel_block"), False),
    **dict.fromkeys(("rotary_emb_interleaved", "use_rms_norm", "scale_attn_by_inverse_layer_idx"), False),
    "scale_attn_weights": True,
    "rotary_emb_fraction": 1,
}
UNUSED = """
    attn_pdrop embd_pdrop resid_pdrop dense_seq_output fused_bias_fc fused_dropout_add_ln max_trained_positions
    pad_vocab_size_multiple parallel_block_tied_norm reorder_and_upcast_attn use_flash_attn use_xentropy
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
"""
PACKED = (("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),)
RENAMED = (
    *(("model.emb_ln", "model.layers.0.input_layernorm"), ("attn.out_proj", "self_attn.o_proj")),
    *(("attn.Wqkv", "self_attn.qkv_proj"), ("norm1", "post_attention_layernorm")),
    ("mlp.fc2", "mlp.down_proj"),
    *(("mlp.fc11", "mlp.up_proj"), ("mlp.fc12", "mlp.gate_proj")),
)


def read(keys: Keys) -> DecoderConfig:
    """Of ``n_positions``, ``max_position_embeddings`` are those that the model was trained with."""
    keys.skip(*TRAINING, *UNUSED.split())
    if keys.raw("n_positions") and keys.raw("max_position_embeddings"):
        keys.leave_out("max_position_embeddings", f"is less than n_positions={keys.raw('n_positions')!r:.80}")
    keys.rename(KEYS)
    for name, value in FIXED.items():
        keys.fixed(name, value)
    config = read_decoder(
        keys,
        default_kv_heads=keys.integer("num_attention_heads"),
        norm=NormConfig(keys.number("layer_norm_eps", 1e-12), "layer", bias=True),
        placement=BEHIND_SUMS,
        activations={"silu": "silu", "swiglu": "silu"},
        activation_key="activation_function" if "activation_function" in keys else "hidden_act",
        default_activation="silu",
        default_theta=1000.0,
        default_tied=True,
    )
    return replace(
        attend_both_ways(config),
        stored_types=keys.integer("type_vocab_size", 2),
        classifier=classify(config.hidden_size),
        packed=PACKED,
        renamed=(*list_renamed(len(config.layers), "model.encoder.layers", "norm2"), *RENAMED, *HEAD),
        left_out=("cls", "position_ids"),
    )
