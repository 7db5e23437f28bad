"""What transformers' processor of LFM2-VL makes of messages, which cannot run here for want of torchvision: its
resizing is torch's, to the bit, and its sizes are recorded in ``data/lfm2_vl_layouts.json``."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from llmc.bundle.model.vision import Vision
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.runtime.vision.decode import open_image
from llmc.runtime.vision.patches import cut_patches
from llmc.runtime.vision.tiles import Tiles

MARKS = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}


def resize(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Uint8 [3, height, width], as torchvision resizes tensors."""
    import torch
    from torch.nn.functional import interpolate

    pixels = torch.from_numpy(np.array(image).transpose(2, 0, 1).copy())[None]
    found: np.ndarray = interpolate(pixels, size=(height, width), mode="bilinear", antialias=True)[0].numpy()
    return found


def resize_tiles(image: Image.Image, tiles: Tiles, side: int) -> list[np.ndarray]:
    """Uint8 [3, height, width] of each tile, in the sizes of those that llmc made."""
    whole = resize(image, *tiles.pixels[-1].shape[1:])
    if not tiles.rows:
        return [whole]
    large = resize(image, tiles.rows * side, tiles.columns * side)
    places = [(row * side, column * side) for row in range(tiles.rows) for column in range(tiles.columns)]
    return [*(large[:, y : y + side, x : x + side] for y, x in places), whole]


def write_text(tiles: Tiles, vision: Vision) -> str:
    """The text of an image, by the real processor's method."""
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

    counts = [math.prod(vision.grid(*tile.shape[1:])) for tile in tiles.pixels]
    build, given = Lfm2VlProcessor._build_image_tokens, SimpleNamespace(**MARKS)
    text: str = build(given, max(1, tiles.rows), max(1, tiles.columns), vision.tokens, counts[-1], True, True)
    return text


class NaflexProcessor:
    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        vision = read_checkpoint(folder).geometry.vision
        assert vision is not None and vision.patching is not None
        self.vision, self.steps = vision, vision.patching
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.template = (folder / "chat_template.jinja").read_text(encoding="utf-8")

    def apply_chat_template(self, messages: Sequence[Any], **_: Any) -> Any:
        import torch

        images = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, chat_template=self.template
        )
        patches, shapes = [], []
        for source in images:
            image = open_image(source)
            tiles = cut_patches(image, self.vision, self.steps)
            text = text.replace(MARKS["image_token"], write_text(tiles, self.vision).replace("<image>", "<>"), 1)
            for tile in resize_tiles(image, tiles, self.vision.tile):
                shapes.append([side // self.vision.patch for side in tile.shape[1:]])
                patches.append(patch(tile, self.vision.patch))
        given = self.tokenizer(text.replace("<>", "<image>"), return_tensors="pt", add_special_tokens=False)
        found = {name: given[name] for name in ("input_ids", "attention_mask")}
        if not images:
            return found
        most = max(map(len, patches))
        values = np.zeros((len(patches), most, patches[0].shape[1]), np.float32)
        mask = np.zeros(values.shape[:2], np.int32)
        for number, own in enumerate(patches):
            values[number, : len(own)], mask[number, : len(own)] = own, 1
        found |= {"pixel_values": torch.from_numpy(values), "pixel_attention_mask": torch.from_numpy(mask)}
        return found | {"spatial_shapes": torch.tensor(shapes)}


def patch(tile: np.ndarray, side: int) -> np.ndarray:
    """Normalized patches of a tile, row by row."""
    values = (tile.astype(np.float32) - np.float32(127.5)) / np.float32(127.5)
    rows, columns = (length // side for length in tile.shape[1:])
    split = values.reshape(3, rows, side, columns, side).transpose(1, 3, 2, 4, 0)
    return split.reshape(rows * columns, -1)
