"""Images become tiles of grids of any shape, as transformers' processor of LFM2-VL makes them, and patches with weighed
positions, as its tower wants them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.grids import resize_tiles, write_text
from doubles.images import MODES, draw, make_vision
from PIL import Image

from llmc.inventory import Grids, Markers, Vision
from llmc.runtime.vision.decode import open_image
from llmc.runtime.vision.grids import cut_grids, lay_patches
from llmc.runtime.vision.tiles import Tiles, count_rows, normalize, write_markers

# Pillow's and torchvision's filters round apart by one of 255. A neighbouring pixel is about 30 away.
LEVELS = 1
# Values of positions up to 4, by other orders of float32.
TOLERANCE = 1e-5
GRIDS = Grids(2, 16, 64, 256, 2.0, 2, 10)
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


def make_grids(**settings: Any) -> Vision:
    vision = make_vision(512, 0, tokens=256)
    tiling = replace(vision.tiling, filter="bilinear", mean=(0.5,) * 3, std=(0.5,) * 3)
    return replace(vision, patch=16, tiling=tiling, markers=MARKERS, grids=replace(GRIDS, **settings))


def cut(image: Image.Image, vision: Vision) -> Tiles:
    assert vision.grids is not None
    return cut_grids(image, vision, vision.grids)


def list_shapes(tiles: Tiles) -> list[tuple[int, ...]]:
    return [tile.shape for tile in tiles.pixels]


@pytest.mark.parametrize(("width", "height", "rows", "columns", "tall", "wide", "count"), LAYOUTS)
def test_sizes_are_those_of_the_processor(
    width: int, height: int, rows: int, columns: int, tall: int, wide: int, count: int
):
    vision = make_grids()
    tiles = cut(Image.new("RGB", (width, height)), vision)
    assert (tiles.rows, tiles.columns) == ((rows, columns) if count > 1 else (0, 0))
    assert list_shapes(tiles) == [*[(3, 512, 512)] * (count - 1), (3, tall, wide)]
    assert count <= vision.most_tiles
    assert count_rows(tiles, vision) == 256 * (count - 1) + tall * wide // 1024
    assert write_markers(tiles, vision) == write_text(tiles, vision)


SIZES = [(1, 1), (40, 31), (733, 1021), *map(tuple, np.random.default_rng(3).integers(2, 700, (27, 2)).tolist())]


@pytest.mark.parametrize(("mode", "size"), [(MODES[number % len(MODES)], size) for number, size in enumerate(SIZES)])
def test_pixels_are_those_of_torchvision_but_for_its_rounding(mode: str, size: tuple[int, int]):
    image, vision = open_image(draw(mode, *size)), make_grids()
    tiles = cut(image, vision)
    expected = resize_tiles(image, tiles, vision.tile)
    for found, wanted in zip(tiles.pixels, expected, strict=True):
        assert np.abs(found.astype(int) - wanted).max() <= LEVELS
    moved = np.abs(np.roll(tiles.pixels[-1], 1, 2).astype(int) - expected[-1])
    assert size == (1, 1) or moved.max() > LEVELS


def test_without_splitting_there_is_one_tile():
    tiles = cut(draw("RGB", 1600, 900), make_grids(least_tiles=1, most_tiles=1))
    assert list_shapes(tiles) == [(3, 384, 672)]


def test_normalized_values_are_those_of_a_fused_step():
    import torch

    pixels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(3, 1)
    tiling = make_vision().tiling
    mean, std = (torch.tensor(values) * (1.0 / tiling.rescale) for values in (tiling.mean, tiling.std))
    expected = torch.from_numpy(pixels).float().sub(mean[:, None, None]).div(std[:, None, None])
    assert np.array_equal(normalize(pixels, tiling, fused=True), expected.numpy())
    assert not np.array_equal(normalize(pixels, tiling), expected.numpy())


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (32, 32), (36, 26), (2, 128), (10, 28)])
def test_positions_are_weighed_as_transformers_weighs_them(rows: int, columns: int):
    import torch
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    table = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (16, 16, 8)).astype(np.float32))
    shapes = torch.tensor([[rows, columns]])
    (expected,) = Siglip2VisionEmbeddings.resize_positional_embeddings(table, shapes, rows * columns)
    numbers = np.arange(rows * columns, dtype=np.float32).reshape(1, 1, rows, columns).repeat(3, 1)
    pixels = numbers.repeat(16, 2).repeat(16, 3)  # of each patch its number
    inputs = lay_patches(pixels, make_grids())
    order = inputs["pixel_values"][0, :, 0].astype(int)
    assert order[:4].tolist() == [0, 1, columns, columns + 1]
    found = inputs["position_weights"] @ table.numpy().reshape(256, 8)
    assert np.abs(found - expected.numpy()[order]).max() < TOLERANCE
    assert np.abs(found - np.roll(expected.numpy()[order], 1, 0)).max() > 100 * TOLERANCE
