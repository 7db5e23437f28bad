"""Reads the towers that models of several families have."""

from collections.abc import Mapping
from math import isqrt

from llmc.bundle.model.norm import NormKind
from llmc.export.keys import Keys
from llmc.export.vision.shapes import THETA, PatchTowerConfig, TowerConfig

# transformers' names of the parts of a SigLIP.
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


def name_projector(names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Renamings of a tower and its projector, as transformers writes them and as they are published."""
    tower = [(f"vision_tower{inner}", "vision") for inner in ("", ".vision_model")]
    projector = [(f"multi_modal_projector.{name}", f"vision.{own}") for name, own in names.items()]
    return tuple((f"{outer}{name}", own) for outer in ("", "model.") for name, own in (*tower, *projector))


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
    keys.fixed("num_channels", 3, ", for red, green and blue")
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


# Keys of Qwen's models that see beside those of their text.
QWEN_KEYS = (
    *("vision_config", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "vision_token_id"),
)
# transformers' names of the parts of their towers.
QWEN_TOWER = (
    *(("model.visual", "vision"), ("visual", "vision"), ("blocks", "layers")),
    *(("patch_embed.proj", "patch_embedding"), ("pos_embed", "position_embedding")),
    *(("norm1", "input_layernorm"), ("norm2", "post_attention_layernorm")),
    *(("attn.qkv", "self_attn.qkv"), ("attn.proj", "self_attn.o_proj")),
    *(("mlp.linear_fc1", "mlp.up_proj"), ("mlp.linear_fc2", "mlp.down_proj")),
    *(("merger.ln_q", "merger.norm"), ("merger.mlp.0", "merger.fc1"), ("merger.mlp.2", "merger.fc2")),
    *(("deepstack_merger_list", "deep"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2")),
)


def read_axial_rope(keys: Keys, default: float) -> float:
    """Base of a rope by rows and columns."""
    if keys.raw("rope_parameters") is None:
        return default
    rope = keys.inside("rope_parameters")
    rope.choice("rope_type", ("axial", "default"), "axial")
    theta = rope.number("rope_theta", default)
    rope.finish()
    return theta


def read_qwen_tower(
    outer: Keys,
    keys: Keys,
    hidden_size: int,
    *,
    kinds: tuple[str, ...],
    activation: str,
    default_patch: int,
    norm: NormKind,
    embedding_bias: bool,
    window: int = 0,
    whole: tuple[int, ...] = (),
    places: int = 0,
    deep: tuple[int, ...] = (),
) -> PatchTowerConfig:
    """Read a ``vision_config`` of Qwen's; the keywords are what a family differs in, or read already.

    ``window`` is in pixels, ``places`` of the whole table of positions.
    """
    keys.choice("model_type", kinds, kinds[0])
    keys.skip("in_chans", "spatial_patch_size")  # of Qwen2-VL, which Qwen2.5-VL repeats
    keys.fixed("in_channels", 3, ", for red, green and blue")
    keys.choice("hidden_act", (activation,), activation)
    if (theta := read_axial_rope(keys, THETA)) != THETA:
        raise keys.inside("rope_parameters").error("rope_theta", theta, f"{THETA:g}")
    patch, merged = keys.integer("patch_size", default_patch), keys.integer("spatial_merge_size", 2)
    tower = PatchTowerConfig(
        patch=patch,
        frames=keys.integer("temporal_patch_size", 2),
        merged=merged,
        width=keys.integer("hidden_size"),
        layers=keys.integer("depth"),
        heads=keys.integer("num_heads", 16),
        inner=keys.integer("intermediate_size"),
        norm=norm,
        gated=activation == "silu",
        embedding_bias=embedding_bias,
        window=window // merged // patch,
        whole=whole,
        places=isqrt(places),
        deep=deep,
        outputs=keys.integer("out_hidden_size", 3584),
        token_id=outer.integer("image_token_id", 151_655),
        renamed=QWEN_TOWER,
    )
    keys.finish()
    if tower.width % (4 * tower.heads):
        raise keys.error("num_heads", tower.heads, f"a divisor of a fourth of hidden_size={tower.width}")
    if tower.outputs != hidden_size:
        raise keys.error("out_hidden_size", tower.outputs, f"{hidden_size}, the text part's hidden_size")
    if window and not tower.window:
        raise keys.error("window_size", window, f"at least {merged * patch}, a square of patches")
    if tower.places**2 != places:
        raise keys.error("num_position_embeddings", places, "a square number")
    if deep and deep[-1] >= tower.layers:
        raise keys.error("deepstack_visual_indexes", list(deep), f"layers below depth={tower.layers}")
    return tower
