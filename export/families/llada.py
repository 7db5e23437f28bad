"""LLaDA: Llama as a diffusion language model, with names of its own for keys and tensors (arXiv 2502.09992)."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.diffusion import fill_masks
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder

KEYS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "activation_type": "hidden_act",
    "max_sequence_length": "max_position_embeddings",
    "embedding_size": "vocab_size",
    "weight_tying": "tie_word_embeddings",
}
# Keys that would change the result, at the values that published checkpoints have.
OFF = ("alibi", "attention_layer_norm", "bias_for_layer_norm", "include_bias", "include_qkv_bias", "input_emb_norm")
PLAIN = dict[str, object](dict.fromkeys((*OFF, "multi_query_attention", "scale_logits"), False))
PLAIN |= dict.fromkeys(("layer_norm_with_affine", "rope", "rope_full_precision"), True)
PLAIN |= {"block_group_size": 1, "block_type": "llama", "layer_norm_type": "rms"}
# Keys of training, and of parts that the keys above turn off.
SKIPPED = (
    *("alibi_bias_max", "attention_layer_norm_with_affine", "embedding_dropout", "flash_attention"),
    *("init_cutoff_factor", "init_device", "init_fn", "init_std", "mlp_ratio", "precision", "residual_dropout"),
)
RENAMED = (
    *(("model.transformer.wte", "model.embed_tokens"), ("model.transformer.blocks", "model.layers")),
    *(("model.transformer.ln_f", "model.norm"), ("model.transformer.ff_out", "lm_head")),
    *(("attn_norm", "input_layernorm"), ("ff_norm", "post_attention_layernorm")),
    *((f"{part}_proj", f"self_attn.{part}_proj") for part in "qkv"),
    *(("attn_out", "self_attn.o_proj"), ("ff_proj", "mlp.gate_proj")),
    *(("up_proj", "mlp.up_proj"), ("ff_out", "mlp.down_proj")),
)


def read(keys: Keys) -> DecoderConfig:
    """``mlp_ratio`` counts where there is no ``mlp_hidden_size``, which all published checkpoints have."""
    renamed = RENAMED if "d_model" in keys else ()  # from a GGUF file all has Llama's names
    keys.rename(KEYS)
    keys.skip(*SKIPPED)
    for name, plain in PLAIN.items():
        keys.fixed(name, plain)
    config = read_decoder(keys, default_kv_heads=keys.integer("num_attention_heads"))
    return fill_masks(keys, replace(config, renamed=renamed), shift=0)
