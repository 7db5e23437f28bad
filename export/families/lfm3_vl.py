"""LFM3-VL: an LFM3 that sees images of any size; its tower mixes patches by convolutions and by attention."""

from llmc.export.config import DecoderConfig
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys
from llmc.export.vision.llama import LlamaTowerConfig
from llmc.export.vision.reading import name_projector, read_axial_rope

PROJECTOR = {"layer_norm": "merger.norm", "linear_1": "merger.fc1", "linear_2": "merger.fc2"}
# Parts of the tower, by transformers' names and as they are stored.
RENAMED = (
    *name_projector(PROJECTOR),
    *(("patchifier", "patch_embedding"), ("patch_embed", "patch_embedding")),
    *(("operator_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")),
    *(("q_layernorm", "q_norm"), ("k_layernorm", "k_norm"), ("self_attn.out_proj", "self_attn.o_proj")),
    ("conv.spatial_conv", "conv"),
    *(("feed_forward.w1", "mlp.gate_proj"), ("feed_forward.w3", "mlp.up_proj"), ("feed_forward.w2", "mlp.down_proj")),
)
KINDS = ("conv", "full_attention")


def read(keys: Keys) -> DecoderConfig:
    """Positions of the decoder are plain."""
    keys.skip("video_token_id", "vision_start_token_id", "vision_end_token_id")
    return read_text_part(keys, ("lfm3",), read_tower=_read_tower)


def _read_tower(outer: Keys, hidden_size: int) -> LlamaTowerConfig:
    keys = outer.inside("vision_config")
    keys.rename({"norm_eps": "rms_norm_eps"})
    keys.choice("model_type", ("lfm3_vl_vision",), "lfm3_vl_vision")
    keys.fixed("in_channels", 3, ", for red, green and blue")
    layers, kernel = keys.integer("num_hidden_layers", 14), keys.integer("conv_kernel_size", 3)
    types = keys.raw("layer_types") or [KINDS[index > 1 and index % 2 == 0] for index in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in KINDS for kind in types):
        raise keys.error("layer_types", types, f"{layers} entries, each one of {', '.join(KINDS)}")
    if kernel % 2 == 0:
        raise keys.error("conv_kernel_size", kernel, "an odd number, so that a patch has as many on either side")
    heads, kv_heads = keys.integer("num_attention_heads", 16), keys.integer("num_key_value_heads", 8)
    width = keys.integer("hidden_size", 1024)
    if width % (4 * heads):
        raise keys.error("num_attention_heads", heads, f"a divisor of a fourth of hidden_size={width}")
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    outer.choice("projector_hidden_act", ("gelu",), "gelu")
    convolved = tuple(index for index, kind in enumerate(types) if kind == "conv")
    tower = LlamaTowerConfig(
        patch=keys.integer("patch_size", 16),
        frames=keys.integer("temporal_patch_size", 2),
        merged=keys.integer("spatial_merge_size", 2),
        width=width,
        layers=layers,
        heads=heads,
        inner=keys.integer("intermediate_size", 2560),
        outputs=hidden_size,
        token_id=outer.integer("image_token_id", 125_030),
        renamed=RENAMED,
        eps=keys.number("rms_norm_eps", 1e-5),
        theta=read_axial_rope(keys, 1_000_000.0),
        kv_heads=kv_heads,
        qk_norm=True,
        kernel=kernel if convolved else 0,
        convolved=convolved,
        merger_norm="layer",
        merger_eps=1e-6,
        merger_inner=outer.integer("projector_hidden_size", 4096),
        merger_bias=outer.flag("projector_bias", True),
    )
    keys.finish()
    return tower
