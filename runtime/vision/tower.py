"""From images in a conversation to embedding rows: cut, write into the prompt, and compute each image once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle.model.vision import Vision
from llmc.errors import ContextError, EngineClosedError, RequestError, UsageError
from llmc.runtime.vision.decode import decoding, open_image
from llmc.runtime.vision.patches import cut_patches, make_feeds
from llmc.runtime.vision.rows import ImageRows, make_names, place_tokens
from llmc.runtime.vision.tiles import Tiles, count_rows, cut_tiles, write_markers

# Bytes of embeddings kept for images that come again, as in every turn of a chat: about 25 images of SmolVLM2-256M in
# its largest size.
KEPT_BYTES = 64_000_000


class Tower:
    """Computes embedding rows of images. Any thread may call it: the process decodes one image at a time, and this
    tower computes one tile at a time, so neither memory nor results depend on other requests.

    Args:
        vision: the tower's sizes and the settings of its images.
        run: computes float32 [tokens, hidden] from :func:`llmc.runtime.vision.patches.make_feeds` of a tile.
    """

    def __init__(self, vision: Vision, run: Callable[..., NDArray[np.float32]]) -> None:
        self._vision = vision
        self._run: Callable[..., NDArray[np.float32]] | None = run
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    def write_images(
        self, prompt: str, images: Sequence[Any], mark: Callable[[str], str], max_context: int
    ) -> tuple[str, list[Tiles]]:
        """The prompt with each image placeholder replaced by the image's tokens, and the images cut for the tower.

        Args:
            prompt: written by the template.
            images: inputs of :func:`llmc.runtime.vision.decode.open_image`.
            mark: replaces special tokens as in the prompt.
            max_context: tokens.

        Raises:
            RequestError, UsageError: the template left out images, or an image cannot be read.
            ResourceError: not enough memory for an image.
            ContextError: images have more tokens than the context.
        """
        vision, seen, tokens = self._vision, list[Tiles](), 0
        around = prompt.split(mark(vision.markers.placeholder or vision.markers.image))
        if len(around) - 1 != len(images):
            raise RequestError(
                f"the model's chat template shows {len(around) - 1} of the {len(images)} images of the messages; put "
                "images into user messages"
            )
        for number, image in enumerate(images, 1):
            with decoding(name := f"image {number}"):
                seen.append(_see(image, vision, name))
            if (tokens := tokens + count_rows(seen[-1], vision)) >= max_context:
                raise ContextError(
                    f"the first {number} of {len(images)} images have {tokens} tokens, which leaves no room in a "
                    f"context of {max_context}",
                    "leave some out",
                    parameter="prompt",
                )
        written = [mark(write_markers(tiles, vision)) for tiles in seen]
        return "".join(part for pair in zip(around, [*written, ""], strict=True) for part in pair), seen

    def compute_rows(self, images: Sequence[Tiles], prompt: Sequence[int]) -> ImageRows:
        """Embedding rows at the positions of a prompt's image tokens.

        Raises:
            RequestError: the number of image tokens in the prompt is wrong.
            EngineClosedError: the model was closed.
        """
        vision = self._vision
        positions = np.flatnonzero(np.asarray(prompt, np.int64) == vision.token_id)
        counts = [count_rows(tiles, vision) for tiles in images]
        if len(positions) != (count := sum(counts)):
            raise RequestError(
                f"the prompt has {len(positions)} image tokens, expected {count}",
                f"leave {vision.markers.image} out of the messages",
                parameter="prompt",
            )
        rows = [self._compute(tiles) for tiles in images]
        names = [make_names(tiles.digest, len(image_rows)) for tiles, image_rows in zip(images, rows, strict=True)]
        places = None
        if vision.axes:
            starts = positions[np.cumsum([0, *counts[:-1]])].tolist()
            grids = [vision.grid(*tiles.pixels[0].shape[1:]) for tiles in images]
            places = place_tokens(len(prompt), list(zip(starts, grids, strict=True)))
        return ImageRows(positions, np.concatenate(names), np.concatenate(rows), places, vision.both_ways)

    def _compute(self, tiles: Tiles) -> NDArray[np.float32]:
        with self._lock:
            if (rows := self._kept.get(tiles.digest)) is not None:
                self._kept.move_to_end(tiles.digest)
                return rows
            parts = [self.run(**make_feeds(tile, self._vision)) for tile in tiles.pixels]
            self._kept[tiles.digest] = rows = np.concatenate(parts)
            while sum(kept.nbytes for kept in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
            return rows

    def run(self, **feeds: NDArray[Any]) -> NDArray[np.float32]:
        """Embeddings float32 [tokens, hidden] from :func:`llmc.runtime.vision.patches.make_feeds` of a tile.

        Raises:
            EngineClosedError: the model was closed.
        """
        if self._run is None:
            raise EngineClosedError("the model is closed; load the bundle again")
        return self._run(**feeds)

    def close(self) -> None:
        """Free the graph after the tile in progress."""
        self._run = None


def _see(source: Any, vision: Vision, name: str) -> Tiles:
    """Cut an image for the tower; the image itself is not kept."""
    image = open_image(source, name)
    return cut_patches(image, vision, vision.patching) if vision.patching else cut_tiles(image, vision)


# Templates write placeholders for these parts, and nothing would fill them. The names are those of services.
OTHER_MEDIA = ("video", "video_url", "audio", "audio_url", "input_audio", "image_url", "input_image")


def take_images(messages: Any) -> tuple[Any, list[Any]]:
    """Messages for the template, with parts ``{"type": "image", "image": ...}`` reduced to a placeholder, and the
    images in order.

    Raises:
        UsageError: a part has another format.
    """
    images: list[Any] = []

    def take(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        if medium := next((kind for kind in OTHER_MEDIA if kind in (part.get("type"), *part)), None):
            raise UsageError("messages", f"holds a part of the kind {medium}, expected text or image", "leave it out")
        if part.get("type") != "image":
            return part
        if part.keys() != {"type", "image"}:
            raise UsageError(
                "messages",
                f'holds an image with the keys {", ".join(map(str, part))}, expected {{"type": "image", '
                '"image": the path of a file, its bytes, an array or a Pillow image}',
            )
        images.append(part["image"])
        return {"type": "image"}

    def strip(message: Any) -> Any:
        parts = message.get("content") if isinstance(message, Mapping) else None
        return {**message, "content": [take(part) for part in parts]} if isinstance(parts, list | tuple) else message

    return [strip(message) for message in messages] if isinstance(messages, list | tuple) else messages, images
