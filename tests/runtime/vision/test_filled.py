"""Images become the patches and positions that transformers' processor of Gemma 4 makes of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from doubles import filled
from doubles.images import MARKERS, MODES, draw
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from llmc.bundle.model.vision import Patching, Vision
from llmc.runtime.vision.decode import open_image
from llmc.runtime.vision.patches import cut_patches, make_feeds
from llmc.runtime.vision.tiles import count_rows

SIZES = [(1, 1), (1, 200), (200, 1), (48, 48), (29, 27), (960, 672), (640, 481), (37, 211), (1300, 299), (7, 1000)]
SIZES += [tuple(map(int, size)) for size in np.random.default_rng(1).integers(4, 900, (14, 2))]
IMAGES = [(MODES[number % len(MODES)], *size) for number, size in enumerate(SIZES)]
# Gemma 4's with its smallest budget, and with pixels as its processor leaves them.
PATCHING = Patching(*(48 * 48, 70 * 48 * 48, "bicubic", 1 / 255, (0.0,) * 3, (1.0,) * 3), *(1, 0, 0), filled=True)
VISION = Vision(48, 16, 1, 90, None, MARKERS, 1, (), PATCHING)


def process(image: Image.Image, tokens: int) -> Any:
    return Gemma4ImageProcessorPil(max_soft_tokens=tokens)(image, return_tensors="np")


def order(feeds: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Patches row by row, and columns and rows of each, as transformers has them."""
    positions = feeds["positions"][:, ::-1]
    rank = np.lexsort(positions.T)
    return feeds["pixel_values"][rank], positions[rank]


@pytest.mark.parametrize("tokens", [70, 280])
@pytest.mark.parametrize(("mode", "width", "height"), IMAGES)
def test_patches_are_those_of_the_processor_to_the_bit(mode, width, height, tokens):
    image = draw(mode, width, height)
    expected = process(open_image(image), tokens)
    patching = replace(PATCHING, most_pixels=tokens * 48 * 48)
    vision = replace(VISION, patching=patching)
    tiles = cut_patches(open_image(image), vision, patching)
    patches, positions = order(make_feeds(tiles.pixels[0], vision))
    count = len(patches)
    assert patches.dtype == np.float32 and count <= 9 * tokens
    assert count_rows(tiles, vision) == expected["num_soft_tokens_per_image"][0] <= vision.most_tokens
    assert np.array_equal(patches, expected["pixel_values"][0, :count])
    assert np.array_equal(positions, expected["image_position_ids"][0, :count])
    assert (expected["image_position_ids"][0, count:] == -1).all()


def test_squares_of_pixels_are_those_that_the_patches_of_a_square_make():
    """Of the model without a tower, whose processor merges the patches of the other's."""
    image = draw("RGB", 75, 26)
    side = filled.PATCH * filled.POOLED
    patching = replace(PATCHING, least_pixels=side**2, most_pixels=filled.TOKENS * side**2)
    vision = Vision(side, side, 1, 90, None, MARKERS, 0, (), patching)
    processor = Gemma4ImageProcessorPil(
        max_soft_tokens=filled.TOKENS, patch_size=filled.PATCH, pooling_kernel_size=filled.POOLED
    )
    given = processor(image, return_tensors="pt")
    expected = filled.merge(given["pixel_values"], given["image_position_ids"])
    patches, positions = order(make_feeds(cut_patches(image, vision, patching).pixels[0], vision))
    assert np.array_equal(patches, expected["pixel_values"][0, : len(patches)].numpy())
    assert np.array_equal(positions, expected["image_position_ids"][0, : len(patches)].numpy())


def test_values_of_a_tower_are_those_of_the_processor_scaled_as_its_model_scales_them():
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(3, 0).repeat(3, 1).repeat(3, 2)
    plain = make_feeds(pixels, VISION)["pixel_values"]
    scaled = make_feeds(pixels, replace(VISION, patching=replace(PATCHING, mean=(0.5,) * 3, std=(0.5,) * 3)))
    assert np.array_equal(scaled["pixel_values"], 2 * (plain - np.float32(0.5)))
