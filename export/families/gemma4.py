"""Gemma 4 as published: the text part sees through a tower, or in the 12B through linears; sound is left out."""

from dataclasses import replace
from typing import Any

from llmc.export.config import DecoderConfig
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys
from llmc.export.vision.axial import STANDARD, AxialTowerConfig

OTHER_PARTS = ("audio_config", "audio_token_id", "boa_token_id", "boa_token_index", "boi_token_id", "eoa_token_id")
MORE = ("eoa_token_index", "eoi_token_id", "video_token_id", "vision_soft_tokens_per_image")
LEFT_OUT = ("audio_tower", "vision_embedder", "embed_vision", "embed_audio")
# Parts of the names of tensors, as they are published and as transformers saves them.
RENAMED = (
    *((f"model.vision_tower.{name}", f"vision.{name}") for name in STANDARD),
    ("model.vision_tower.patch_embedder.input_proj", "vision.patch_embedding"),
    ("model.vision_tower.patch_embedder.position_embedding_table", "vision.position_embedding.weight"),
    ("model.vision_tower.encoder.layers", "vision.layers"),
    ("linear.weight", "weight"),
    *(
        (f"model.{module}.{name}", f"vision.{own}")
        for module in ("vision_embedder", "embed_vision")
        for name, own in (
            *(("patch_ln1", "pixel_norm"), ("patch_dense", "patch_embedding"), ("patch_ln2", "embedding_norm")),
            *(("pos_embedding", "position_embedding.weight"), ("pos_norm", "position_norm")),
        )
    ),
    ("model.embed_vision.embedding_projection", "vision.connector"),
    ("model.embed_vision.multimodal_embedder.embedding_projection", "vision.connector"),
)
SOUND = "sound is not understood: the audio part was left out"


def read(keys: Keys) -> DecoderConfig:
    """``text_config`` is read by the rules of the text part."""
    keys.skip(*OTHER_PARTS, *MORE)
    if keys.raw("audio_config") is not None:
        keys.note(SOUND)
    config = read_text_part(keys, (f"{keys.raw('model_type')}_text",), read_tower=_read_tower)
    return replace(config, left_out=(*config.left_out, *LEFT_OUT))


def _read_tower(outer: Keys, hidden_size: int) -> AxialTowerConfig:
    keys, unified = outer.inside("vision_config"), outer.raw("model_type") == "gemma4_unified"
    keys.choice("model_type", (kind := f"{outer.raw('model_type')}_vision",), kind)
    text = outer.raw("text_config")
    both_ways = text.get("use_bidirectional_attention", "vision" if unified else None) == "vision"
    if both_ways and text.get("num_kv_shared_layers"):
        raise outer.error("use_bidirectional_attention", "vision", "null, where layers share caches")
    tokens = keys.integer("num_soft_tokens" if unified else "default_output_length", 280)
    common: dict[str, Any] = {
        "eps": keys.number("rms_norm_eps", 1e-6),
        "most_tokens": outer.integer("vision_soft_tokens_per_image", tokens),
        "both_ways": both_ways,
        "outputs": hidden_size,
        "token_id": outer.integer("image_token_id", 258_880),
        "renamed": RENAMED,
    }
    patch, merged = keys.integer("patch_size", 16), keys.integer("pooling_kernel_size", 3)
    tower = (_read_linears if unified else _read_layers)(keys, patch, merged, common)
    keys.finish()
    return tower


def _read_linears(keys: Keys, patch: int, merged: int, common: dict[str, Any]) -> AxialTowerConfig:
    """The 12B's: pixels of a square at once."""
    keys.fixed("model_patch_size", patch * merged, ", patch_size times pooling_kernel_size")
    width = keys.integer("mm_embed_dim", 3840)
    keys.fixed("output_proj_dims", width, ", as mm_embed_dim")
    places = keys.integer("mm_posemb_size", 1120)
    sizes: dict[str, Any] = {"layers": 0, "heads": 0, "head_dim": 0, "inner": 0, "theta": 0.0}
    return AxialTowerConfig(patch=patch * merged, merged=1, width=width, places=places, **sizes, **common)


def _read_layers(keys: Keys, patch: int, merged: int, common: dict[str, Any]) -> AxialTowerConfig:
    keys.skip("max_position_embeddings")
    keys.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    theta = 100.0
    if keys.raw("rope_parameters") is not None:
        rope = keys.inside("rope_parameters")
        rope.choice("rope_type", ("axial", "default"), "axial")
        theta = rope.number("rope_theta", theta)
        rope.finish()
    heads, head_dim = keys.integer("num_attention_heads", 12), keys.integer("head_dim", 64)
    keys.fixed("num_key_value_heads", heads, ", as num_attention_heads")
    keys.fixed("global_head_dim", head_dim, ", as head_dim")
    if head_dim % 4:
        raise keys.error("head_dim", head_dim, "a multiple of 4: pairs turn by rows and by columns")
    return AxialTowerConfig(
        patch=patch,
        merged=merged,
        width=keys.integer("hidden_size", 768),
        layers=keys.integer("num_hidden_layers", 16),
        heads=heads,
        head_dim=head_dim,
        inner=keys.integer("intermediate_size", 3072),
        theta=theta,
        places=keys.integer("position_embedding_size", 10_240),
        clipped=keys.flag("use_clipped_linears"),
        standardized=keys.flag("standardize"),
        **common,
    )
