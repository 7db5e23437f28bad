"""Images from files, bytes, arrays and Pillow objects: upright RGB pixels, within bounds."""

import ctypes
import io
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.errors import LlmcError, RequestError, ResourceError, UsageError, format_value, require, text_of
from llmc.strict import read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
LARGEST_FILE = 20 << 20  # bytes
# A telephone's 48 megapixels.
MOST_PIXELS = 50_000_000
# For WebP: its decoder holds four copies, and blocks all Python threads while it makes one (70 ms).
MOST_WEBP_PIXELS = 17_000_000
# A longer side divided by the shorter one. Resizing computes weights for each pixel of a side, so a line of 20 million
# pixels would take a gigabyte. Source: transformers, qwen2_vl.
MOST_STRETCHED = 200
# Most bytes to decode and cut an image: per pixel 4 as in the file, 4 as RGB and 2 for the rest; a progressive JPEG of
# 50 million pixels takes 456 MB (Pillow 13).
DECODING_BYTES = 10 * MOST_PIXELS
# Pixels whose colours are converted in one call, during which no other Python thread runs: about 3 ms.
BAND_PIXELS = 1 << 18
# Scans of a progressive JPEG: encoders write about ten. A scan costs a pass over all pixels (45 ms for 49 megapixels)
# and may have less than a hundred bytes, so 20 MiB of scans would take hours.
MOST_SCANS = 64
_SCAN = b"\xff\xda"
_SEND = f"send a whole {FORMATS[0]}, {FORMATS[1]} or WebP of at most {LARGEST_FILE >> 20} MiB"
_ORIENTATION = 0x0112
_ONE = threading.Lock()


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Decode and cut one image at a time in this process, so that memory does not grow with requests and models.
    Raises ResourceError: not enough memory."""
    try:
        with _ONE:
            yield
            with suppress(AttributeError):  # glibc keeps freed memory per thread
                ctypes.CDLL(None).malloc_trim(0)
    except MemoryError as error:
        raise ResourceError(f"{name} needs more memory than is free; try again later, or shrink it") from error


def open_image(source: Any, name: str = "the image") -> "Image":
    """Upright RGB pixels, transparent ones on white, as in transformers' processors.

    Args:
        source: the path of a PNG, JPEG or WebP; its bytes; uint8 [height, width], [height, width, 3] or [height, width,
            4]; or a Pillow image.
        name: the name of the image in errors.

    Raises:
        MissingExtraError: Pillow is not installed.
        RequestError: it cannot be decoded, is animated, or exceeds a bound.
        ResourceError: not enough memory.
        UsageError: it is not an image.
    """
    pillow = require("PIL.Image", "vision")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged file may cause thousands of warnings
            return _to_rgb(pillow, _open(pillow, source, name))
    except (LlmcError, MemoryError):
        raise
    except pillow.UnidentifiedImageError as error:
        raise RequestError(f"{name} cannot be read (unknown format, or damaged); {_SEND}") from error
    except (OSError, ValueError) as error:
        raise RequestError(f"{name} cannot be read ({error!s:.200}); {_SEND}") from error
    except Exception as error:  # decoders raise anything on damaged files
        raise RequestError(f"{name} cannot be decoded ({text_of(error):.200}); {_SEND}") from error


def _open(pillow: Any, source: Any, name: str) -> "Image":
    if isinstance(source, np.ndarray):
        image = _from_array(pillow, source, name)
    elif isinstance(source, bytes):
        image = _decode(pillow, source, name)
    elif isinstance(source, pillow.Image):
        image = source
    elif isinstance(source, str | os.PathLike):
        image = _decode(pillow, read_bytes(Path(source), LARGEST_FILE), name)
    else:
        expected = "the path of a file, its bytes, an array of bytes or a Pillow image"
        raise UsageError("messages", f"holds {name} as {format_value(source)}, expected {expected}")
    _check_size(image.size, name)
    return image


def _from_array(pillow: Any, pixels: "np.ndarray[Any, Any]", name: str) -> "Image":
    if pixels.dtype != np.uint8 or pixels.shape[2:] not in ((), (3,), (4,)) or pixels.ndim < 2 or 0 in pixels.shape:
        description = f"an array of {pixels.dtype} {list(pixels.shape)}"
        raise UsageError(
            "messages",
            f"holds {name} as {description:.200}, expected uint8 [height, width], with 3 or 4 channels or without",
        )
    _check_size((pixels.shape[1], pixels.shape[0]), name)
    image: Image = pillow.fromarray(pixels)
    return image


def _decode(pillow: Any, content: bytes, name: str) -> "Image":
    require("PIL.WebPImagePlugin", "vision")  # Pillow preloads the other two; otherwise it would load every plugin
    if len(content) > LARGEST_FILE:
        raise RequestError(f"{name} has {len(content)} bytes; {_SEND}")
    image: Image = pillow.open(io.BytesIO(content), formats=FORMATS)
    _check_size(image.size, name, MOST_WEBP_PIXELS if image.format == "WEBP" else None)
    if image.format in ("PNG", "WEBP") and getattr(image, "n_frames", 1) > 1:  # a JPEG's further frames are previews
        raise RequestError(f"{name} is animated, expected a still image; send one of its frames")
    if image.format not in ("PNG", "WEBP") and (scans := content.count(_SCAN)) > MOST_SCANS:
        raise RequestError(f"{name} is a JPEG of {scans} scans, expected at most {MOST_SCANS}; save it again")
    return image


def _check_size(size: tuple[int, int], name: str, most: int | None = None) -> None:
    """Check an image's size from its header. Raises RequestError: it has too many pixels, or is too long and thin."""
    most = MOST_PIXELS if most is None else most
    width, height = size
    if width * height > most:
        raise RequestError(
            f"{name} has {width} x {height} pixels, expected at most {most // 1_000_000} million; shrink it"
        )
    if max(size) > MOST_STRETCHED * min(size):
        raise RequestError(
            f"{name} has {width} x {height} pixels, expected a longer side at most {MOST_STRETCHED} times the shorter; "
            "cut it into pieces"
        )


def _to_rgb(pillow: Any, image: "Image") -> "Image":
    """Turn an image upright and convert its colours, a band of rows at a time."""
    image.load()
    turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    image = image.transpose(pillow.Transpose[turn]) if turn else image
    clear = "A" in image.getbands() or image.info.get("transparency") is not None
    if image.mode == "RGB" and not clear:
        return image
    upright: Image = pillow.new("RGB", image.size, None)
    rows = max(1, BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(image.height, top + rows)))
        upright.paste(_on_white(pillow, band) if clear else band.convert("RGB"), (0, top))
    return upright


def _on_white(pillow: Any, image: "Image") -> "Image":
    composed: Image = pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return composed.convert("RGB")


# Transpositions by the orientation in the camera's data. Source: Exif 2.32, as in PIL.ImageOps.exif_transpose.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
