"""Images become the patches, positions and windows that transformers' own code for Qwen's models makes of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from doubles.images import MARKERS, MODES, draw
from PIL import Image
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from llmc.bundle.model.vision import Patching, Vision
from llmc.errors import RequestError
from llmc.runtime.sessions import Batch, Phase
from llmc.runtime.vision.decode import open_image
from llmc.runtime.vision.patches import cut_patches, make_feeds
from llmc.runtime.vision.rows import ImageRows, place_tokens
from llmc.runtime.vision.tiles import normalize

SIZES = [(1, 1), (1, 200), (200, 1), (14, 14), (28, 28), (29, 27), (96, 96), (640, 481), (37, 211), (300, 299)]
SIZES += [tuple(map(int, size)) for size in np.random.default_rng(1).integers(4, 700, (14, 2))]
IMAGES = [(MODES[number % len(MODES)], *size) for number, size in enumerate(SIZES)]
# Qwen2.5-VL's, with uneven means, and bounds that some of the images are beyond on either side.
PATCHING = Patching(56 * 56, 200_000, "bicubic", 1 / 255, (0.5, 0.4, 0.3), (0.5, 0.25, 0.3), 2, 4, 0)
VISION = Vision(28, 14, 1, 90, None, MARKERS, 1, (), PATCHING, 3)
# And Qwen3-VL's.
WIDER = replace(VISION, tile=32, patch=16, patching=replace(PATCHING, window=0, places=48))


def process(image: Image.Image, vision: Vision) -> Any:
    patching = vision.patching
    assert patching is not None
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": patching.least_pixels, "longest_edge": patching.most_pixels},
        patch_size=vision.patch,
        temporal_patch_size=patching.frames,
        merge_size=vision.tile // vision.patch,
        resample=Image.Resampling[patching.filter.upper()],
        rescale_factor=patching.rescale,
        image_mean=list(patching.mean),
        image_std=list(patching.std),
    )
    return processor(image, return_tensors="np")


def see(width: int, height: int, vision: Vision) -> np.ndarray:
    """An image of so many squares of patches."""
    return np.zeros((3, height * vision.tile, width * vision.tile), np.uint8)


def cut(image: Image.Image, vision: Vision = VISION) -> np.ndarray:
    assert vision.patching is not None
    (whole,) = cut_patches(image, vision, vision.patching).pixels
    return whole


@pytest.mark.parametrize("vision", [VISION, WIDER], ids=["14", "16"])
@pytest.mark.parametrize(("mode", "width", "height"), IMAGES)
def test_patches_are_those_of_the_processor_to_the_bit(mode, width, height, vision):
    image = draw(mode, width, height)
    expected, patches = process(image, vision), cut(open_image(image), vision)
    values = make_feeds(patches, vision)["pixel_values"]
    assert values.dtype == np.float32
    assert np.array_equal(values, expected["pixel_values"])
    assert [1, *(2 * side for side in vision.grid(*patches.shape[1:]))] == expected["image_grid_thw"][0].tolist()


@pytest.mark.parametrize(("mode", "width", "height"), IMAGES)
def test_pixtrals_pixels_are_those_of_its_processor_to_the_bit(mode, width, height):
    image, patching = draw(mode, width, height), replace(PATCHING, longest_edge=300)
    processor = PixtralImageProcessorPil(
        size={"longest_edge": 300}, image_mean=list(PATCHING.mean), image_std=list(PATCHING.std)
    )
    expected = processor(image, patch_size=VISION.square, return_tensors="np")["pixel_values"]
    pixels = cut(open_image(image), replace(VISION, patching=patching))
    assert np.array_equal(normalize(pixels[None], patching), expected)


def test_an_image_that_lies_on_its_side_is_turned_first():
    image, exif = draw("RGB", 200, 90), Image.Exif()
    exif[0x0112] = 6
    image.info["exif"] = exif.tobytes()
    assert VISION.grid(*cut(open_image(image)).shape[1:]) == (7, 3)


def test_a_strip_that_transformers_refuses_is_refused():
    with pytest.raises(RequestError, match=r"picture has 1 x 201 pixels, .* at most 200 times the shorter"):
        open_image(draw("L", 1, 201), "picture")
    with pytest.raises(ValueError, match="200"):
        process(draw("L", 1, 201), VISION)


GRIDS = [(1, 1), (2, 3), (4, 4), (5, 4), (9, 7), (1, 13)]


@pytest.mark.parametrize("grid", GRIDS)
def test_positions_and_windows_are_those_of_transformers(grid):
    import torch
    from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

    rows, columns = grid
    feeds = make_feeds(see(columns, rows, VISION), VISION)
    sizes = torch.tensor([[1, 2 * rows, 2 * columns]])
    assert np.array_equal(feeds["positions"], get_vision_position_ids(sizes, 2).numpy())
    squares, ends = get_vision_window_index(sizes, spatial_merge_size=2, window_size=112, patch_size=14)
    patches = (4 * squares[:, None] + torch.arange(4)).flatten()
    expected = [part.tolist() for part in torch.tensor_split(patches, ends[1:-1].tolist())]
    found = [[patch for patch in window if patch >= 0] for window in feeds["windows"].tolist()]
    assert found == expected
    places = feeds["window_places"]
    assert np.array_equal(feeds["windows"].ravel()[places], np.arange(len(places)))


@pytest.mark.parametrize("grid", GRIDS)
def test_entries_of_the_table_and_their_weights_are_those_of_transformers(grid):
    import torch
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    rows, columns = grid
    feeds = make_feeds(see(columns, rows, WIDER), WIDER)
    indices, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, 2 * rows, 2 * columns]]), 48, "bilinear", align_corners=True, spatial_merge_size=2
    )
    assert feeds["corner_weights"].dtype == np.float32
    found = spread(feeds["corners"].T, feeds["corner_weights"].T)
    assert np.array_equal(found, spread(indices.numpy(), weights.numpy()))


def spread(indices: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weight of every entry of the table in each patch, both [P, C]."""
    found = np.zeros((len(indices), 48 * 48), np.float32)
    for patch, own in enumerate(indices):
        np.add.at(found[patch], own, weights[patch])
    return found


def make_rows(length: int, *images: tuple[int, tuple[int, int]]) -> ImageRows:
    return ImageRows(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 1)), place_tokens(length, images))


def test_tokens_behind_an_image_stand_behind_its_longer_side():
    """2 tokens, an image of 2 x 3, 2 tokens, an image of 3 x 1 at the end, and what is generated after it."""
    images = make_rows(13, (2, (2, 3)), (10, (3, 1)))
    assert images.place(0, 16).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 7, 7, 10, 11, 12],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11, 12],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 7, 7, 10, 11, 12],
    ]


def test_any_cut_of_a_row_has_the_same_positions():
    images = make_rows(13, (2, (2, 3)), (10, (3, 1)))
    whole = images.place(0, 20)
    for start in range(20):
        for end in range(start + 1, 21):
            assert np.array_equal(images.place(start, end), whole[:, start:end])


def test_rows_of_a_call_have_their_own_positions_and_those_without_images_plain_ones():
    images = make_rows(6, (1, (2, 2)))
    call = Batch.of(Phase.DECODE, np.zeros((3, 2), np.int64), np.array([6, 3, 9]), np.zeros((3, 0), np.int64))
    found = call.feed_rows([images.feeds(6, 8), {}]).feeds["positions"]
    assert found[:, 0].tolist() == [[4, 5]] * 3
    assert found[:, 1].tolist() == [[3, 4]] * 3 and found[:, 2].tolist() == [[9, 10]] * 3  # the last is a dummy
    assert call.feed_rows([{}, {}]).feeds.keys() == call.feeds.keys()
