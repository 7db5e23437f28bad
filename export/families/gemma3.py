"""Gemma 3 from 4B on: gemma3_text that sees through a SigLIP, of whose patches squares are pooled into a row."""

import math
from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys
from llmc.export.vision.reading import DEFAULTS as TOWER_DEFAULTS
from llmc.export.vision.reading import name_projector, read_siglip
from llmc.export.vision.shapes import TowerConfig

# transformers' defaults: published configs leave these keys out.
DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
RENAMED = name_projector({"mm_soft_emb_norm": "connector_norm", "mm_input_projection_weight": "connector.weight"})


def read(keys: Keys) -> DecoderConfig:
    """Text is read as in the smaller models; the rows of an image see one another."""
    keys.skip("boi_token_id", "eoi_token_id", "image_token_id")  # other names of the three indices
    return read_text_part(keys, ("gemma3_text",), DEFAULTS, read_tower=_read_tower)


def _read_tower(keys: Keys, hidden_size: int) -> TowerConfig:
    tokens = keys.integer("mm_tokens_per_image", 256)
    stated = keys.inside("vision_config")
    tower = read_siglip(
        Keys({**TOWER_DEFAULTS, **keys.raw("vision_config")}, stated.where),
        ("siglip_vision_model",),
        merged=1,
        outputs=hidden_size,
        token_id=keys.integer("image_token_index", 262_144),
        renamed=RENAMED,
    )
    side = math.isqrt(tokens)
    if side * side != tokens or tower.side % side:
        squares = f"the square of a divisor of the {tower.side} patches of a side"
        raise keys.error("mm_tokens_per_image", tokens, squares)
    return replace(tower, merged=tower.side // side, projector="pool")
