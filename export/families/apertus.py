"""Apertus: plain MLPs with the activation xIELU, whose scalars are learned, and norms on the heads of q and k."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.norm import Placement
from llmc.export.reading import read_decoder

# The stored ``eps`` bounds the derivative at zero.
RENAMED = tuple((f"act_fn.{name}", name) for name in ("alpha_p", "alpha_n", "beta"))


def read(keys: Keys) -> DecoderConfig:
    if not (keys.raw("rope_scaling") or keys.raw("rope_parameters")):
        raise keys.error("rope_scaling", None, "llama3's settings, which no published Apertus leaves out")
    keys.fixed("qk_norm", True)
    keys.fixed("post_norm", False)
    config = read_decoder(
        keys,
        default_kv_heads=keys.integer("num_attention_heads"),
        bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
        qk_norm="head",
        placement=Placement("attention_layernorm", "", "feedforward_layernorm", ""),
        gated=False,
        activations={"xielu": "xielu"},
        default_activation="xielu",
        default_theta=12_000_000.0,
    )
    return replace(config, renamed=RENAMED, left_out=("act_fn.eps",))
