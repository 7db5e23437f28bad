"""StarCoder 2: layer norms, a plain MLP, biases everywhere, a tied head, and a window for all layers, or none."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.norm import NormConfig
from llmc.export.reading import read_decoder

LEFT_OVER = (  # from its predecessor, gpt_bigcode; transformers ignores them
    *("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "scale_attention_softmax_in_fp32"),
    "scale_attn_weights",
)


def read(keys: Keys) -> DecoderConfig:
    """``norm_type`` and ``mlp_type`` predate transformers' support. Dropouts are for training."""
    keys.skip("residual_dropout", "embedding_dropout", *LEFT_OVER)
    keys.choice("norm_type", ("layer_norm",), "layer_norm")
    keys.choice("mlp_type", ("default",), "default")
    bias = keys.flag("use_bias", True)
    window = keys.optional_integer("sliding_window") or 0
    config = read_decoder(
        keys,
        windows=(window,) * keys.integer("num_hidden_layers"),
        bias=bias,
        mlp_bias=bias,
        norm=NormConfig(keys.number("norm_epsilon", 1e-5), "layer", bias=True),
        gated=False,
        default_tied=True,
    )
    return replace(config, renamed=(("mlp.c_fc", "mlp.up_proj"), ("mlp.c_proj", "mlp.down_proj")))
