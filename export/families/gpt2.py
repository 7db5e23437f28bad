"""GPT-2: learned positions, layer norms, a plain MLP, biases everywhere, a tied head; weights lie [inputs, outputs]."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.norm import NormConfig
from llmc.export.reading import read_decoder

KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
}
PACKED = (("self_attn.c_attn", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),)
RENAMED = (
    *(("transformer.wte", "model.embed_tokens"), ("wte", "model.embed_tokens")),
    *(("transformer.wpe", "model.embed_positions"), ("wpe", "model.embed_positions")),
    *(("transformer.h", "model.layers"), ("h", "model.layers")),
    *(("transformer.ln_f", "model.norm"), ("ln_f", "model.norm")),
    *(("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm"), ("attn", "self_attn")),
    *(("attn.c_proj", "self_attn.o_proj"), ("mlp.c_fc", "mlp.up_proj"), ("mlp.c_proj", "mlp.down_proj")),
)


def read(keys: Keys) -> DecoderConfig:
    """``n_ctx`` repeats ``n_positions``; dropouts and ``summary_*`` are for training and classification."""
    keys.rename(KEYS)
    keys.skip("attn_pdrop", "embd_pdrop", "resid_pdrop", "n_ctx", "reorder_and_upcast_attn")
    keys.skip(*(f"summary_{part}" for part in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")))
    layers, heads, hidden_size = map(keys.integer, ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    config = read_decoder(
        keys,
        default_kv_heads=heads,
        bias=True,
        mlp_bias=True,
        norm=NormConfig(keys.number("layer_norm_epsilon", 1e-5), "layer", bias=True),
        inner=keys.integer("intermediate_size", 4 * hidden_size),
        gated=False,
        default_tied=True,
        rotated=(False,) * layers,
    )
    scale = (hidden_size / heads) ** -0.5 if keys.flag("scale_attn_weights", True) else 1.0
    by_layer = keys.flag("scale_attn_by_inverse_layer_idx")
    config = config.change_attentions(lambda i, it: replace(it, scale=scale / (i + 1 if by_layer else 1)))
    return replace(config, learned_positions=True, packed=PACKED, transposed=True, renamed=RENAMED)
