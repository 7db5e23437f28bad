"""Files of images become upright RGB pixels, or one sentence: bombs, films, damage and what is no image."""

import io
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from doubles.images import draw
from PIL import Image
from transformers.image_utils import load_image

from llmc.errors import MissingExtraError, RequestError, ResourceError, UsageError
from llmc.runtime.vision import decode
from llmc.runtime.vision.decode import LARGEST_FILE, MOST_SCANS, open_image

ORIENTATION = 0x0112


def encode(image: Image.Image, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A PNG that says it is so large, and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_files_bytes_and_objects_give_the_same_pixels(form, tmp_path):
    content = encode(draw("RGB", 61, 43), form)
    (tmp_path / "image").write_bytes(content)
    found = open_image(content)
    assert (found.mode, found.size) == ("RGB", (61, 43))
    for source in (tmp_path / "image", str(tmp_path / "image"), Image.open(io.BytesIO(content)), np.array(found)):
        assert np.array_equal(np.array(open_image(source)), np.array(found))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_stands_upright(orientation, tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    draw("RGB", 32, 20).save(tmp_path / "turned.jpg", exif=exif)
    found = open_image(tmp_path / "turned.jpg")
    assert np.array_equal(np.array(found), np.array(load_image(str(tmp_path / "turned.jpg"))))
    assert found.size == ((32, 20) if orientation < 5 else (20, 32))


def test_arrays_may_be_grey_or_have_an_alpha_channel():
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert np.array_equal(np.array(open_image(grey)), np.stack([grey] * 3, axis=2))
    clear = np.zeros((2, 2, 4), np.uint8)
    assert np.array(open_image(clear)).min() == 255


def test_a_photograph_with_a_preview_is_its_first_picture():
    content = encode(draw("RGB", 30, 20), "MPO", save_all=True, append_images=[draw("RGB", 15, 10)])
    assert open_image(content).size == (30, 20)


BOMBS = [(100_000, 501), (2**31 - 1, 1), (30_000, 30_000), (20_000_000, 1), (1, 20_000_000), (50_000_000, 1), (201, 1)]


@pytest.mark.threat("image-bombs")
@pytest.mark.parametrize("size", BOMBS)
def test_a_bomb_is_refused_before_it_is_decoded(size):
    with pytest.raises(RequestError, match=r"^image 2 (has|cannot be decoded).*(pixels|Decompression)"):
        open_image(png_of(*size), "image 2")


def encode_exif(count: int) -> bytes:
    """Exif of so many tags, each of which is the same 100,000 bytes."""
    tags = b"".join(struct.pack("<HHII", 9 + number, 7, 100_000, 14 + 12 * count) for number in range(count))
    return b"II*\0" + struct.pack("<IH", 8, count) + tags + bytes(4 + 100_000)


@pytest.mark.threat("image-bombs")
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_tags_that_lie_on_each_other_take_no_memory_and_no_lines(form, recwarn):
    tracemalloc.start()
    found = open_image(with_exif(form, encode_exif(5000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.size == (8, 8) and peak < 5_000_000 and not recwarn.list


def with_exif(form: str, exif: bytes) -> bytes:
    if form != "JPEG":
        return encode(draw("RGB", 8, 8), form, exif=exif)
    content = encode(draw("RGB", 8, 8), form)
    parts = [exif[at : at + 60_000] for at in range(0, len(exif), 60_000)]
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", 8 + len(part)) + b"Exif\0\0" + part for part in parts)
    return content[:2] + segments + content[2:]


def test_no_message_shows_where_an_object_lies_in_memory():
    with pytest.raises(RequestError) as caught:
        open_image(b"GIF89a" + bytes(99))
    assert "0x" not in str(caught.value)


COLOURS = [("1", {}), ("L", {"transparency": 9}), ("LA", {}), ("P", {}), ("P", {"transparency": bytes(range(256))})]
COLOURS += [("RGB", {"transparency": (1, 2, 3)}), ("RGBA", {}), ("CMYK", {}), ("I;16", {}), ("F", {})]


@pytest.mark.threat("image-bombs")
@pytest.mark.parametrize(("mode", "info"), COLOURS, ids=str)
def test_colours_are_converted_in_bands_as_they_are_in_one_call(mode, info, monkeypatch):
    image = draw("L", 37, 50).convert(mode) if mode in ("F", "I;16") else draw(mode, 37, 50)
    image.info.update(info)
    whole = open_image(image)
    monkeypatch.setattr(decode, "BAND_PIXELS", 100)
    assert np.array_equal(np.array(open_image(image)), np.array(whole))
    assert np.ptp(np.array(whole)) > 0


def test_memory_that_lacks_is_the_machines_fault(monkeypatch):
    with pytest.raises(ResourceError, match="image 3 needs more memory"), decode.decoding("image 3"):
        raise MemoryError


def test_pixels_that_are_there_already_are_counted_too(monkeypatch):
    monkeypatch.setattr(decode, "MOST_PIXELS", 99)
    for source in (np.zeros((10, 10), np.uint8), Image.new("RGB", (10, 10))):
        with pytest.raises(RequestError, match="has 10 x 10 pixels"):
            open_image(source)
    assert open_image(np.zeros((9, 11), np.uint8)).size == (11, 9)


@pytest.mark.threat("image-bombs")
@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_films_are_refused(form):
    frames = [draw("RGB", 8, 8, seed) for seed in range(3)]
    with pytest.raises(RequestError, match="is animated"):
        open_image(encode(frames[0], form, save_all=True, append_images=frames[1:]))


@pytest.mark.threat("image-bombs")
def test_a_photograph_of_endless_scans_is_refused():
    content = encode(draw("RGB", 64, 64), "JPEG", progressive=True)
    last = content.rindex(b"\xff\xc4")  # a table and a scan
    repeated = content[:-2] + content[last:-2] * MOST_SCANS + content[-2:]
    with pytest.raises(RequestError, match="is a JPEG of 74 scans, expected at most 64"):
        open_image(repeated)
    assert open_image(content).size == (64, 64)


@pytest.mark.threat("image-bombs")
@pytest.mark.parametrize("form", ["GIF", "TIFF", "BMP", "ICO", "PPM"])
def test_other_formats_are_not_even_tried(form):
    with pytest.raises(RequestError, match="cannot be read"):
        open_image(encode(draw("RGB", 16, 16), form))


@pytest.mark.parametrize("content", [b"", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\x89PNG\r\n\x1a\n", b"RIFF"])
def test_what_is_no_image_is_refused(content):
    with pytest.raises(RequestError, match=r"the image cannot be read \(.*\); send a whole PNG, JPEG or WebP"):
        open_image(content)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_half_a_file_is_refused(form):
    content = encode(draw("RGB", 300, 200), form)
    with pytest.raises(RequestError, match="cannot be"):
        open_image(content[: len(content) // 2])


@pytest.mark.threat("image-bombs")
def test_texts_in_a_file_that_unpack_to_gigabytes_are_refused():
    packed = b"Comment\0\0" + zlib.compress(b"a" * (80 << 20))
    chunk = struct.pack(">I", len(packed)) + b"zTXt" + packed + struct.pack(">I", zlib.crc32(b"zTXt" + packed))
    content = encode(draw("RGB", 8, 8), "PNG")
    end = content.index(b"IDAT") - 4
    with pytest.raises(RequestError, match="cannot be read"):
        open_image(content[:end] + chunk + content[end:])


def test_a_large_file_is_not_read(tmp_path):
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    with pytest.raises(RequestError, match=r"cannot be read .*20971521 bytes"):
        open_image(tmp_path / "large.png")
    with pytest.raises(RequestError, match="has 20971521 bytes"):
        open_image(bytes(LARGEST_FILE + 1))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"cannot be read .*cat\.jpg"):
        open_image(tmp_path / "cat.jpg")


@pytest.mark.parametrize("source", [None, 3, [1, 2], np.zeros((4, 4, 3)), np.zeros((4, 4, 2), np.uint8), {}])
def test_what_cannot_be_an_image_is_a_mistake_of_the_caller(source):
    with pytest.raises(UsageError, match="expected"):
        open_image(source)


def test_without_pillow_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(MissingExtraError, match="in the extra 'vision'"):
        open_image(b"")
