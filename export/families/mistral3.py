"""Mistral Small from 3.1 on, Ministral 3 and Devstral 2: a Mistral that sees through Pixtral's tower."""

from llmc.export.config import DecoderConfig
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys
from llmc.export.reading import ACTIVATIONS
from llmc.export.vision.llama import LlamaTowerConfig
from llmc.export.vision.reading import name_projector, read_axial_rope
from llmc.export.vision.shapes import THETA

PROJECTOR = {
    "norm": "merger.norm",
    "patch_merger.merging_layer": "merger.merging",
    "linear_1": "merger.fc1",
    "linear_2": "merger.fc2",
}
RENAMED = (
    *name_projector(PROJECTOR),
    *(("patch_conv", "patch_embedding"), ("ln_pre", "embedding_norm"), ("transformer.layers", "layers")),
    *(("attention_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")),
    *(("attention", "self_attn"), ("feed_forward", "mlp")),
)
EPS = 1e-5  # of the tower's norms. Source: transformers, pixtral


def read(keys: Keys) -> DecoderConfig:
    """``text_config`` names the family of the text part."""
    return read_text_part(keys, ("mistral", "ministral3", "mistral4"), read_tower=_read_tower)


def _read_tower(outer: Keys, hidden_size: int) -> LlamaTowerConfig:
    keys = outer.inside("vision_config")
    keys.choice("model_type", ("pixtral",), "pixtral")
    keys.skip("image_size")  # the processor decides
    keys.fixed("num_channels", 3, ", for red, green and blue")
    heads, width = keys.integer("num_attention_heads", 16), keys.integer("hidden_size", 1024)
    if width % (4 * heads):
        raise keys.error("num_attention_heads", heads, f"a divisor of a fourth of hidden_size={width}")
    keys.fixed("head_dim", width // heads, ", hidden_size / num_attention_heads")
    theta = read_axial_rope(keys, keys.number("rope_theta", THETA))
    outer.choice("projector_hidden_act", ("gelu",), "gelu")
    outer.fixed("vision_feature_layer", -1, ", the last one")
    tower = LlamaTowerConfig(
        patch=keys.integer("patch_size", 16),
        frames=1,
        merged=outer.integer("spatial_merge_size", 2),
        width=width,
        layers=keys.integer("num_hidden_layers", 24),
        heads=heads,
        inner=keys.integer("intermediate_size", 4096),
        outputs=hidden_size,
        token_id=outer.integer("image_token_id", outer.integer("image_token_index", 10)),
        renamed=RENAMED,
        eps=EPS,
        activation=ACTIVATIONS[keys.choice("hidden_act", tuple(ACTIVATIONS), "gelu")],
        theta=theta,
        kv_heads=heads,
        takes_turns=True,
        lines=True,
        merging=True,
        merger_norm="rms",
        merger_eps=outer.inside("text_config").number("rms_norm_eps", 1e-5),
        merger_inner=hidden_size,
        merger_bias=outer.flag("multimodal_projector_bias"),
    )
    keys.finish()
    return tower
