"""Qwen2.5-VL: a Qwen2 that sees images of any size through a tower with windows; positions have three axes."""

from llmc.export.config import DecoderConfig
from llmc.export.families import read_text_part
from llmc.export.families.towers import QWEN_KEYS, QWEN_ROPES, place_by_axes, read_qwen_tower
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder, windows_from_layer
from llmc.export.vision import PatchTowerConfig


def read(keys: Keys) -> DecoderConfig:
    """Published configs have the text part's keys beside those of images."""
    keys.nest(
        "text_config", (*QWEN_KEYS, "model_type", "tie_word_embeddings", "quantization_config"), "qwen2_5_vl_text"
    )
    keys.skip(*QWEN_KEYS)
    config = read_text_part(keys, ("qwen2_5_vl_text",), default_tied=False, read_tower=_read_tower)
    return place_by_axes(keys, config, (16, 24, 24))


def read_text(keys: Keys) -> DecoderConfig:
    """The text part: Qwen2 with another default base of the rope."""
    return read_decoder(keys, windows=windows_from_layer(keys), qkv_bias=True, default_theta=1e6, **QWEN_ROPES)


def _read_tower(keys: Keys, hidden_size: int) -> PatchTowerConfig:
    inner = keys.inside("vision_config")
    inner.skip("tokens_per_second")  # of videos
    window = inner.integer("window_size", 112)
    return read_qwen_tower(
        keys,
        inner,
        hidden_size,
        kinds=("qwen2_5_vl_vision", "qwen2_5_vl"),
        activation="silu",
        default_patch=14,
        norm="rms",
        embedding_bias=False,
        window=window,
        whole=inner.layer_numbers("fullatt_block_indexes", (7, 15, 23, 31)),
    )
