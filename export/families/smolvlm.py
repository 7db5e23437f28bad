"""SmolVLM, SmolVLM2 and Idefics3: a Llama that sees through a SigLIP, of whose patches squares become one row."""

from llmc.export.config import DecoderConfig
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys
from llmc.export.vision.reading import read_siglip
from llmc.export.vision.shapes import TowerConfig

KINDS = ("smolvlm_vision", "idefics3_vision", "siglip_vision_model", "idefics3")
# Patches of a side of a tile for which transformers gives each the position where it lies: it finds positions by
# fractions in float32, which are rounded to a neighbour for 19, 25 and others. Published are 26, 27 and 32.
SIDES = (*range(1, 19), 26, 27, 32)
RENAMED = (("model.vision_model", "vision"), ("model.connector.modality_projection.proj", "vision.connector"))


def read(keys: Keys) -> DecoderConfig:
    """Published configs repeat the text part's numbers, and say how training saved memory."""
    keys.skip("vocab_size", "_pad_token_id", "use_reentrant_checkpointing")
    return read_text_part(keys, ("llama",), default_tied=False, read_tower=_read_tower)


def _read_tower(keys: Keys, hidden_size: int) -> TowerConfig:
    tower = read_siglip(
        *(keys.inside("vision_config"), KINDS),
        merged=keys.integer("scale_factor", 2),
        outputs=hidden_size,
        token_id=keys.integer("image_token_id", 128_257),
        renamed=RENAMED,
    )
    if tower.side not in SIDES:
        tiles = f"image_size / patch_size to be one of {', '.join(map(str, SIDES))}"
        raise keys.error("vision_config", keys.raw("vision_config"), tiles)
    return tower
