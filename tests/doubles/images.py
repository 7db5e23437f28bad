"""Images of any mode and size, and towers' settings of the families that see."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from doubles.geometries import VISION
from PIL import Image

from llmc.bundle.model.vision import Tiling, Vision

# Modes that files of the formats taken may have, and those that an application may hold.
MODES = ("RGB", "L", "1", "P", "LA", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I;16", "I", "F", "PA", "RGBX")
MARKERS = VISION.markers


def make_vision(
    tile: int = 24, longest_edge: int = 96, *, cut: bool = True, tokens: int = 4, token_id: int = 90
) -> Vision:
    """A tower of a SmolVLM, with uneven means, so that channels cannot be taken for one another."""
    tiling = Tiling(longest_edge, cut, "lanczos", 1 / 255, (0.5, 0.4, 0.3), (0.5, 0.25, 0.3))
    return Vision(tile, tile // 4, tokens, token_id, tiling, MARKERS, 1, ())


def draw(mode: str, width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise over a slope, so that filters and edges show."""
    generator = np.random.default_rng(seed)
    slope = np.linspace(0, 200, width)[None, :, None] + np.linspace(0, 55, height)[:, None, None]
    pixels = np.clip(slope + generator.integers(-60, 60, (height, width, 4)), 0, 255).astype(np.uint8)
    if mode == "RGBA":
        return Image.fromarray(pixels)
    if mode == "I;16":
        return Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257)
    picture = Image.fromarray(pixels[:, :, :3])
    if mode == "PA":
        return picture.convert("P").convert("PA")
    if mode == "LA":
        return Image.fromarray(pixels).convert("LA")
    return picture.convert(mode)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_images(folder: Path) -> None:
    """Files of each format with what readers of files look at: orientation, a profile, a palette, a comment."""
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"exif": exif, "icc_profile": bytes(300), "comment": "a comment"}
    palette = draw("P", 40, 30)
    palette.save(folder / "image.png", transparency=bytes(range(256)), exif=exif, icc_profile=bytes(300))
    draw("RGB", 40, 30).save(folder / "image.jpg", progressive=True, **options)
    draw("RGBA", 40, 30).save(folder / "image.webp", **options)
