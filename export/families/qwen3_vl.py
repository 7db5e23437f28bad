"""Qwen3-VL, dense or with experts, sees images of any size; parts of each row are added behind the first layers."""

from llmc.export.config import DecoderConfig
from llmc.export.families.qwen2_5_vl import QWEN_ROPES, place_by_axes
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder
from llmc.export.vision.reading import QWEN_KEYS, read_qwen_tower
from llmc.export.vision.shapes import PatchTowerConfig


def read(keys: Keys) -> DecoderConfig:
    """``text_config`` is read by :func:`read_text`, or by the rules of its mixture."""
    keys.skip(*QWEN_KEYS)
    own, tied = str(keys.raw("model_type")), bool((keys.raw("text_config") or {}).get("tie_word_embeddings"))
    tied = tied and own == "qwen3_vl"  # the text part's own default says nothing in transformers' mixture
    config = read_text_part(keys, (f"{own}_text",), default_tied=tied, read_tower=read_tower)
    return place_by_axes(keys, config, (24, 20, 20), interleaved=True)


def read_text(keys: Keys, head_dim: int | None = 128) -> DecoderConfig:
    """The text part: Qwen3 without windows. None is the width of heads that fill ``hidden_size``."""
    bias = keys.flag("attention_bias")
    return read_decoder(keys, default_head_dim=head_dim, bias=bias, qk_norm="head", default_theta=5e5, **QWEN_ROPES)


def read_tower(keys: Keys, hidden_size: int) -> PatchTowerConfig:
    """The tower of Qwen3-VL, and of Qwen3.5, which has no deep layers."""
    inner = keys.inside("vision_config")
    own = str(keys.raw("model_type"))
    deep = inner.layer_numbers("deepstack_visual_indexes", (8, 16, 24)) if own.startswith("qwen3_vl") else ()
    inner.skip("deepstack_visual_indexes")
    return read_qwen_tower(
        keys,
        inner,
        hidden_size,
        kinds=(f"{own}_vision", own),
        activation="gelu_pytorch_tanh",
        default_patch=16,
        norm="layer",
        embedding_bias=True,
        places=inner.integer("num_position_embeddings", 2304),
        deep=deep,
    )
