"""Images become the tiles, the values and the prompt that transformers' own processors make of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from doubles.images import MODES, draw, make_vision
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from llmc.bundle.model.vision import Vision
from llmc.runtime.vision.decode import MOST_STRETCHED, open_image
from llmc.runtime.vision.tiles import Tiles, cut_tiles, normalize, write_markers

SIZES = [(1, 1), (1, 200), (200, 1), (24, 24), (25, 23), (96, 96), (97, 95), (640, 481), (37, 211), (300, 299)]
SIZES += [tuple(map(int, size)) for size in np.random.default_rng(1).integers(2, 700, (14, 2))]
IMAGES = [(MODES[number % len(MODES)], *size) for number, size in enumerate(SIZES)]


def processed(kind: Any, image: Image.Image, vision: Vision) -> tuple[Any, int, int]:
    """Values float32 [tiles, 3, side, side], rows and columns, as transformers has them."""
    tiling = vision.tiling
    processor = kind(
        do_image_splitting=tiling.cut,
        size={"longest_edge": tiling.longest_edge},
        max_image_size={"longest_edge": vision.tile},
        resample=Image.Resampling[tiling.filter.upper()],
        rescale_factor=tiling.rescale,
        image_mean=list(tiling.mean),
        image_std=list(tiling.std),
    )
    found = processor(image, return_row_col_info=True, return_tensors="np")
    assert found["pixel_attention_mask"].all()  # no tile is padded, so no tower needs a mask
    return found["pixel_values"][0], found["rows"][0][0], found["cols"][0][0]


def assert_equal(image: Image.Image, vision: Vision, kind: Any = SmolVLMImageProcessorPil) -> None:
    expected, rows, columns = processed(kind, image, vision)
    tiles = cut_tiles(open_image(image), vision)
    assert (tiles.rows, tiles.columns) == (rows, columns)
    values = normalize(tiles.pixels, vision.tiling)
    assert values.dtype == np.float32
    assert np.array_equal(values, expected)
    text = get_image_prompt_string(rows, columns, vision.tokens, "<fake_token_around_image>", "<image>", "<global-img>")
    assert write_markers(tiles, vision) == text


@pytest.mark.parametrize(("mode", "width", "height"), IMAGES)
def test_tiles_and_values_are_those_of_the_processor_to_the_bit(mode, width, height):
    assert_equal(draw(mode, width, height), make_vision())


@pytest.mark.parametrize(
    ("kind", "tile", "longest"),
    [
        (SmolVLMImageProcessorPil, 512, 2048),
        (Idefics3ImageProcessorPil, 364, 1456),
        (SmolVLMImageProcessorPil, 500, 999),
    ],
)
def test_so_they_are_with_the_sizes_of_real_models(kind, tile, longest):
    assert_equal(draw("RGB", 733, 1021), make_vision(tile, longest), kind)


@pytest.mark.parametrize("size", [(90, 31), (31, 90), (24, 24)])
def test_so_is_an_image_that_is_not_cut(size):
    assert_equal(draw("RGB", *size), make_vision(cut=False))


def assert_square(image: Image.Image, tile: int) -> None:
    """As Gemma 3 sees it."""
    vision = make_vision(tile, 0, cut=False)
    tiling = replace(vision.tiling, filter="bilinear")
    processor = Gemma3ImageProcessorPil(
        size={"height": tile, "width": tile}, image_mean=list(tiling.mean), image_std=list(tiling.std)
    )
    (expected,) = processor(image, return_tensors="np")["pixel_values"]
    tiles = cut_tiles(open_image(image), replace(vision, tiling=tiling))
    assert np.array_equal(normalize(tiles.pixels, tiling)[0], expected)


@pytest.mark.parametrize(("mode", "width", "height"), IMAGES)
def test_an_image_that_is_resized_at_once_is_that_of_the_processor(mode, width, height):
    assert_square(draw(mode, width, height), 24)


@pytest.mark.parametrize("transparency", [7, bytes(range(256))])
def test_transparent_colours_of_a_palette_lie_on_white(transparency):
    image = draw("P", 50, 40)
    image.info["transparency"] = transparency
    assert_equal(image, make_vision())


@pytest.mark.threat("image-cost")
def test_the_longest_strip_becomes_few_tiles():
    vision = make_vision(24, 96)
    for size in ((MOST_STRETCHED * 100, 100), (100, MOST_STRETCHED * 100)):
        assert len(cut_tiles(open_image(draw("L", *size)), vision).pixels) == 5 <= vision.most_tiles


def test_a_pixel_or_a_place_that_differs_makes_another_digest():
    pixels = np.zeros((3, 3, 4, 4), np.uint8)
    other = pixels.copy()
    other[2, 1, 3, 3] = 1
    found = [Tiles(pixels, 1, 2), Tiles(pixels, 2, 1), Tiles(other, 1, 2)]
    assert len({tiles.digest for tiles in found}) == 3
    assert Tiles(pixels.copy(), 1, 2).digest == found[0].digest
