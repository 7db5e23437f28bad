"""ModernBERT: a gated MLP, windows in two layers of three, two ropes, and a norm of embeddings as the first norm."""

from dataclasses import replace

from llmc.bundle.model.encoder import Pooling
from llmc.export.config import DecoderConfig
from llmc.export.families.bert import attend_both_ways, classify
from llmc.export.keys import Keys
from llmc.export.parts.norm import PRE, NormConfig
from llmc.export.reading import ACTIVATIONS, read_decoder, windows_by_type

PACKED = (
    ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
)
RENAMED = (
    *(("model.embeddings.tok_embeddings", "model.embed_tokens"), ("model.final_norm", "model.norm")),
    *(("model.embeddings.norm", "model.layers.0.input_layernorm"), ("attn_norm", "input_layernorm")),
    *(("mlp_norm", "post_attention_layernorm"), ("attn.Wqkv", "self_attn.qkv_proj"), ("attn.Wo", "self_attn.o_proj")),
    *(("mlp.Wi", "mlp.gate_up_proj"), ("mlp.Wo", "mlp.down_proj")),
    *(("head.dense", "dense.0"), ("head.norm", "dense_norm.0"), ("classifier", "score.0")),
)
POOLINGS: dict[str, Pooling] = {"cls": "first", "mean": "mean"}
# For training, for masked tokens, or unused in transformers.
UNUSED = """
    cls_token_id decoder_bias deterministic_flash_attn embedding_dropout gradient_checkpointing
    initializer_cutoff_factor layer_norm_eps mask_token_id mlp_dropout position_embedding_type reference_compile
    repad_logits_with_grad sparse_pred_ignore_index sparse_prediction
"""


def read(keys: Keys) -> DecoderConfig:
    """A window is the number of positions on both sides together."""
    keys.skip(*UNUSED.split())
    keys.rename({"global_rope_theta": "rope_theta", "norm_eps": "layer_norm_epsilon"})
    every, layers = keys.integer("global_attn_every_n_layers", 3), keys.integer("num_hidden_layers")
    windowed = tuple(i % every != 0 for i in range(layers))
    config = read_decoder(
        keys,
        windows=windows_by_type(keys, keys.integer("local_attention", 128) // 2 + 1, windowed),
        default_kv_heads=keys.integer("num_attention_heads"),
        bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
        norm=NormConfig(keys.number("layer_norm_epsilon", 1e-5), "layer", bias=keys.flag("norm_bias")),
        activation_key="hidden_activation",
        default_activation="gelu",
        default_theta=160_000.0,
        local_theta=("local_rope_theta", 10_000.0),
        default_tied=True,
    )
    first, *others = attend_both_ways(config).layers
    first = replace(first, placement=replace(PRE, carried=(PRE.before_attention,)))
    head = classify(
        config.hidden_size,
        pooling=POOLINGS[keys.choice("classifier_pooling", tuple(POOLINGS), "cls")],
        bias=keys.flag("classifier_bias"),
        activation=ACTIVATIONS[keys.choice("classifier_activation", tuple(ACTIVATIONS), "gelu")],
        normed=True,
    )
    return replace(
        config, layers=(first, *others), packed=PACKED, renamed=RENAMED, left_out=("decoder",), classifier=head
    )
