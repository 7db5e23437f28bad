"""Towers that models of several families have."""

from llmc.export.keys import Keys
from llmc.export.vision import TowerConfig

# What transformers calls the parts of a SigLIP.
SIGLIP = (
    ("embeddings.patch_embedding", "patch_embedding"),
    ("embeddings.position_embedding", "position_embedding"),
    ("encoder.layers", "layers"),
    ("self_attn.out_proj", "self_attn.o_proj"),
    ("layer_norm1", "input_layernorm"),
    ("layer_norm2", "post_attention_layernorm"),
    ("mlp.fc1", "mlp.up_proj"),
    ("mlp.fc2", "mlp.down_proj"),
    ("post_layernorm", "norm"),
)

# transformers' defaults of a siglip_vision_model; the others are those of Idefics3 below.
DEFAULTS = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}


def read_siglip(
    keys: Keys,
    kinds: tuple[str, ...],
    *,
    merged: int,
    outputs: int,
    token_id: int,
    renamed: tuple[tuple[str, str], ...],
) -> TowerConfig:
    """Read a ``vision_config`` whose ``model_type`` is one of ``kinds``; defaults are those of transformers."""
    keys.choice("model_type", kinds, kinds[0])
    keys.skip("vision_use_head")  # of what makes one vector of an image, which no decoder reads
    keys.skip("tie_word_embeddings", "max_image_size", "size", "use_base_siglip", "projection_class", "ignore_index")
    if (channels := keys.integer("num_channels", 3)) != 3:
        raise keys.error("num_channels", channels, "3, for red, green and blue")
    keys.choice("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    tower = TowerConfig(
        tile=keys.integer("image_size", 224),
        patch=keys.integer("patch_size", 32),
        width=keys.integer("hidden_size", 1152),
        layers=keys.integer("num_hidden_layers", 12),
        heads=keys.integer("num_attention_heads", 16),
        inner=keys.integer("intermediate_size", 3072),
        eps=keys.number("layer_norm_eps", 1e-6),
        merged=merged,
        outputs=outputs,
        token_id=token_id,
        renamed=(*renamed, *SIGLIP),
    )
    keys.finish()
    if tower.width % tower.heads:
        raise keys.error("num_attention_heads", tower.heads, f"a divisor of hidden_size={tower.width}")
    if tower.tile % (size := tower.patch * merged):
        raise keys.error(
            "image_size", tower.tile, f"a multiple of {size}, for {merged} x {merged} patches become a row"
        )
    return tower
