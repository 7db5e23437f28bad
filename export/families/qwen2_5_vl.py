"""Qwen2.5-VL: a Qwen2 that sees images of any size through a tower with windows; positions have three axes."""

from dataclasses import replace
from typing import Any

from llmc.export.config import DecoderConfig
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder, windows_from_layer
from llmc.export.rope_keys import TYPES
from llmc.export.vision.reading import QWEN_KEYS, read_qwen_tower
from llmc.export.vision.shapes import PatchTowerConfig

# Names of the ropes of Qwen's models that see, and keys of these that :func:`place_by_axes` reads.
SECTIONS, INTERLEAVED = "mrope_section", "mrope_interleaved"
QWEN_ROPES: dict[str, Any] = {"rope_types": {**TYPES, "mrope": "default"}, "rope_own": (SECTIONS, INTERLEAVED)}


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


def place_by_axes(
    keys: Keys, config: DecoderConfig, default: tuple[int, ...], *, interleaved: bool = False
) -> DecoderConfig:
    """The decoder whose pairs turn by time, row or column of a position, as ``mrope_section`` says; without a tower all
    of these are the same number.

    Pairs of an axis stand side by side, or, if interleaved, in turn with those of the others.
    """
    if config.tower is None:
        return config
    text = keys.raw("text_config")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections, pairs = rope.get(SECTIONS, list(default)), config.ropes[0].dim // 2
    if not isinstance(sections, list) or len(sections) != 3 or any(type(it) is not int or it < 0 for it in sections):
        raise keys.error(SECTIONS, sections, "three whole numbers")
    if sum(sections) != pairs:
        raise keys.error(SECTIONS, sections, f"three numbers that add up to {pairs}, the pairs of a head that turn")
    if (stated := rope.get(INTERLEAVED, interleaved)) is not interleaved:
        raise keys.error(INTERLEAVED, stated, str(interleaved).lower())
    if interleaved:
        axes = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs)]
    else:
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    return replace(config, pair_axes=tuple(axes))


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
