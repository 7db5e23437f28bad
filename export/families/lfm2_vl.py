"""LFM2-VL: an LFM2 that sees through a SigLIP 2 of grids of any shape, of whose patches squares become one row."""

import math
from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys
from llmc.export.vision.reading import DEFAULTS, name_projector, read_siglip
from llmc.export.vision.shapes import TowerConfig

RENAMED = name_projector({"layer_norm": "connector_norm", "linear_1": "connector_hidden", "linear_2": "connector"})
# Keys of the processor that published configs repeat.
PROCESSORS = (
    *("do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_num_patches", "max_pixels_tolerance"),
    *("max_tiles", "min_image_tokens", "min_tiles", "tile_size", "use_image_special_tokens", "use_thumbnail"),
)


def read(keys: Keys) -> DecoderConfig:
    """The default head is tied."""
    keys.skip(*PROCESSORS, "image_token_index")
    keys.rename({"tie_embedding": "tie_word_embeddings"})
    return read_text_part(keys, ("lfm2",), read_tower=_read_tower)


def _read_tower(keys: Keys, hidden_size: int) -> TowerConfig:
    stated, vision = keys.inside("vision_config"), dict(keys.raw("vision_config"))
    patches, patch = vision.pop("num_patches", 256), vision.get("patch_size", DEFAULTS["patch_size"])
    side = math.isqrt(patches) if type(patches) is int and 0 < patches < 1 << 20 else 0
    if side * side != patches:
        raise stated.error("num_patches", patches, "the square of a whole number, for positions lie in a square")
    factor = keys.integer("downsample_factor", 2)
    tower = read_siglip(
        Keys({**DEFAULTS, **vision, "image_size": side * patch}, stated.where),
        ("siglip2_vision_model",),
        merged=1,
        outputs=hidden_size,
        token_id=keys.integer("image_token_id", 396),
        renamed=RENAMED,
    )
    keys.choice("projector_hidden_act", ("gelu",), "gelu")
    return replace(
        tower,
        merged=factor,
        projector="mlp",
        projector_inner=keys.integer("projector_hidden_size", 2560),
        projector_bias=keys.flag("projector_bias", True),
        projector_norm=keys.flag("projector_use_layernorm", True),
    )
