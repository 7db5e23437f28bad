"""Images become tiles of grids of any shape, as transformers' processor of LFM2-VL makes them, and patches with weighed
positions, as its tower wants them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.images import MODES, draw
from doubles.naflex import resize_tiles, write_text
from PIL import Image

from llmc.bundle.model.vision import Markers, Patching, Vision
from llmc.runtime.vision.decode import open_image
from llmc.runtime.vision.patches import cut_patches, make_feeds
from llmc.runtime.vision.tiles import Tiles, count_rows, write_markers

# Pillow's and torchvision's filters round apart by one of 255. A neighbouring pixel is about 30 away.
LEVELS = 1
# Values of positions up to 4, by other orders of float32.
TOLERANCE = 1e-5
SQUARE = 32**2
PATCHING = Patching(
    *(64 * SQUARE, 256 * SQUARE, "bilinear", 1 / 255, (0.5,) * 3, (0.5,) * 3), *(1, 0, 16, True, 2, 10, 2.0)
)
MARKERS = Markers(
    image="<image>",
    before=("<|image_start|>",),
    tile=("<|img_row_{row}_col_{column}|>",),
    row_end=("",),
    whole=("<|img_thumbnail|>",),
    single=("",),
    after=("<|image_end|>",),
)
# Of the real processor as published: width, height; rows, columns; height, width of the whole; tiles.
LAYOUTS = json.loads((Path(__file__).parents[2] / "data" / "lfm2_vl_layouts.json").read_text(encoding="utf-8"))


def make_naflex(**settings: Any) -> Vision:
    return Vision(512, 16, 256, 90, None, MARKERS, 1, (), replace(PATCHING, **settings))


def cut(image: Image.Image, vision: Vision) -> Tiles:
    assert vision.patching is not None
    return cut_patches(image, vision, vision.patching)


def list_shapes(tiles: Tiles) -> list[tuple[int, ...]]:
    return [tile.shape for tile in tiles.pixels]


@pytest.mark.parametrize(("width", "height", "rows", "columns", "tall", "wide", "count"), LAYOUTS)
def test_sizes_are_those_of_the_processor(width, height, rows, columns, tall, wide, count):
    vision = make_naflex()
    tiles = cut(Image.new("RGB", (width, height)), vision)
    assert (tiles.rows, tiles.columns) == ((rows, columns) if count > 1 else (0, 0))
    assert list_shapes(tiles) == [*[(3, 512, 512)] * (count - 1), (3, tall, wide)]
    assert count <= vision.most_tiles
    assert count_rows(tiles, vision) == 256 * (count - 1) + tall * wide // 1024
    assert write_markers(tiles, vision) == write_text(tiles, vision)


SIZES = [(1, 1), (40, 31), (733, 1021), *map(tuple, np.random.default_rng(3).integers(4, 700, (12, 2)).tolist())]


@pytest.mark.parametrize(("mode", "size"), [(MODES[number % len(MODES)], size) for number, size in enumerate(SIZES)])
def test_pixels_are_those_of_torchvision_but_for_its_rounding(mode, size):
    image, vision = open_image(draw(mode, *size)), make_naflex()
    tiles = cut(image, vision)
    expected = resize_tiles(image, tiles, vision.tile)
    for found, wanted in zip(tiles.pixels, expected, strict=True):
        assert np.abs(found.astype(int) - wanted).max() <= LEVELS
    moved = np.abs(np.roll(tiles.pixels[-1], 1, 2).astype(int) - expected[-1])
    assert size == (1, 1) or moved.max() > LEVELS


def test_without_splitting_there_is_one_tile():
    tiles = cut(draw("RGB", 1600, 900), make_naflex(least_tiles=1, most_tiles=1))
    assert list_shapes(tiles) == [(3, 384, 672)]


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (32, 32), (36, 26), (2, 128), (10, 28)])
def test_positions_are_weighed_as_transformers_weighs_them(rows, columns):
    import torch
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    table = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (16, 16, 8)).astype(np.float32))
    shapes = torch.tensor([[rows, columns]])
    (expected,) = Siglip2VisionEmbeddings.resize_positional_embeddings(table, shapes, rows * columns)
    numbers = np.arange(rows * columns).reshape(rows, columns)
    pixels = np.stack([numbers // 256, numbers % 256, 0 * numbers]).astype(np.uint8)  # of each patch its number
    vision = make_naflex(mean=(0.0,) * 3, std=(1 / 255,) * 3)
    inputs = make_feeds(pixels.repeat(16, 1).repeat(16, 2), vision)
    order = np.rint(inputs["pixel_values"][:, :2]).astype(int) @ [256, 1]
    assert order[:4].tolist() == [0, 1, columns, columns + 1]
    rows_of_table = table.numpy().reshape(256, 8)[inputs["corners"]]
    found = (rows_of_table * inputs["corner_weights"][..., None]).sum(0)
    assert np.abs(found - expected.numpy()[order]).max() < TOLERANCE
    assert np.abs(found - np.roll(expected.numpy()[order], 1, 0)).max() > 100 * TOLERANCE
