"""Images and audio in bodies: the data itself in base64; addresses are refused, for nothing is fetched."""

import base64
from collections.abc import Iterable
from itertools import groupby
from typing import Annotated, Any

from pydantic import Field

from llmc.runtime.server.http.errors import ApiError

MOST_IMAGES = 256  # of a message; each takes 64 tokens of most models
# An address that holds an image itself.
DataUrl = Annotated[
    str, Field(pattern="^data:image/(png|jpe?g|webp);base64,", description="the image itself; nothing is fetched")
]


def decode_base64(text: str, place: str) -> bytes:
    """The bytes of an image or audio, also of an image in a :data:`DataUrl`; ``place`` names it to the client.
    Raises ApiError: 400, it is no base64."""
    try:
        return base64.b64decode(text.rpartition(",")[2], validate=True)
    except ValueError as error:
        raise ApiError(400, f"{place} is no base64 ({error}); encode the bytes of the file", param=place) from error


class Sound(bytes):
    """A file of audio, beside which bytes are images."""


_MEDIA: dict[type, str] = {bytes: "image", Sound: "audio"}


def make_content(pieces: Iterable[str | bytes], between: str = "") -> str | list[dict[str, Any]]:
    """The content of a message for :meth:`llmc.runtime.Model.stream_chat`: text, or parts where some pieces are images
    or audio; texts that follow each other are one, with ``between`` among them."""
    parts: list[dict[str, Any]] = []
    for kind, group in groupby(pieces, type):
        if (medium := _MEDIA.get(kind)) is not None:
            parts += [{"type": medium, medium: piece} for piece in group]
        else:
            parts.append({"type": "text", "text": between.join(map(str, group))})
    if any(part["type"] != "text" for part in parts):
        return parts
    return parts[0]["text"] if parts else ""
