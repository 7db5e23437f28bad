"""Images from files, bytes, arrays and Pillow's own objects: upright RGB pixels, within bounds."""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.errors import LlmcError, RequestError, UsageError, format_value, require, text_of
from llmc.strict import read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
LARGEST_FILE = 20 << 20  # bytes
# Those of a telephone with 48 megapixels. In memory each takes 3 or 4 bytes, some steps hold two copies.
MOST_PIXELS = 50_000_000
# Parts in which a progressive JPEG comes: encoders write about ten. Each one costs a pass over all pixels (45 ms of 49
# megapixels) and may take less than a hundred bytes of the file, so 20 MiB of them would be decoded for hours.
MOST_SCANS = 64
_SCAN = b"\xff\xda"
_SEND = f"send a whole {FORMATS[0]}, {FORMATS[1]} or WebP of at most {LARGEST_FILE >> 20} MiB"


def open_image(source: Any, name: str = "the image") -> "Image":
    """Upright pixels in RGB, transparent ones on white, as transformers' processors make them.

    Args:
        source: the path of a PNG, JPEG or WebP; its bytes; uint8 [height, width], [height, width, 3] or [height, width,
            4]; or an image of Pillow's.
        name: what errors call it.

    Raises:
        MissingExtraError: Pillow is not installed.
        RequestError: it cannot be decoded, moves, or is beyond a bound.
        UsageError: it is no image.
    """
    pillow = require("PIL.Image", "vision")
    try:
        if isinstance(source, np.ndarray):
            image = _from_array(pillow, source, name)
        elif isinstance(source, bytes):
            image = _decode(pillow, source, name)
        elif isinstance(source, pillow.Image):
            image = source
        elif isinstance(source, str | os.PathLike):
            image = _decode(pillow, read_bytes(Path(source), LARGEST_FILE), name)
        else:
            expected = "the path of a file, its bytes, an array of bytes or an image of Pillow's"
            raise UsageError(f"{name} is {format_value(source)}, expected {expected}")
        _check_pixels(image.size, name)
        return _to_rgb(pillow, image)
    except LlmcError:
        raise
    except (OSError, ValueError) as error:
        raise RequestError(f"{name} cannot be read ({error!s:.200}); {_SEND}") from error
    except Exception as error:  # decoders raise anything for files that are damaged
        raise RequestError(f"{name} cannot be decoded ({text_of(error):.200}); {_SEND}") from error


def _from_array(pillow: Any, pixels: "np.ndarray[Any, Any]", name: str) -> "Image":
    if pixels.dtype != np.uint8 or pixels.shape[2:] not in ((), (3,), (4,)) or pixels.ndim < 2 or 0 in pixels.shape:
        found = f"an array of {pixels.dtype} {list(pixels.shape)}"
        raise UsageError(f"{name} is {found:.200}, expected uint8 [height, width], with 3 or 4 channels or without")
    _check_pixels((pixels.shape[1], pixels.shape[0]), name)
    image: Image = pillow.fromarray(pixels)
    return image


def _decode(pillow: Any, content: bytes, name: str) -> "Image":
    require("PIL.WebPImagePlugin", "vision")  # the two others Pillow knows; else it would load all that it has
    if len(content) > LARGEST_FILE:
        raise RequestError(f"{name} has {len(content)} bytes; {_SEND}")
    image: Image = pillow.open(io.BytesIO(content), formats=FORMATS)
    _check_pixels(image.size, name)
    if image.format in ("PNG", "WEBP") and getattr(image, "n_frames", 1) > 1:  # a JPEG's other ones are previews
        raise RequestError(f"{name} is animated, expected one that stands still; send one of its frames")
    if image.format not in ("PNG", "WEBP") and (scans := content.count(_SCAN)) > MOST_SCANS:
        raise RequestError(f"{name} is a JPEG of {scans} scans, at most {MOST_SCANS} are decoded; save it anew")
    return image


def _check_pixels(size: tuple[int, int], name: str) -> None:
    width, height = size
    if width * height > MOST_PIXELS:
        raise RequestError(
            f"{name} has {width} x {height} pixels, at most {MOST_PIXELS // 1_000_000} million are taken; shrink it"
        )


def _to_rgb(pillow: Any, image: "Image") -> "Image":
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = pillow.new("RGBA", image.size, "white")
    composed: Image = pillow.alpha_composite(white, image.convert("RGBA"))
    return composed.convert("RGB")
