"""Images of a conversation on their way to the decoder: seen, written into the prompt, and computed once each."""

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

# Bytes of embeddings that are kept for images that come again, as they do in every turn of a chat: of some 25 images of
# SmolVLM2-256M in its largest size.
KEPT_BYTES = 64_000_000


class Tower:
    """Rows of embeddings of images. Any thread may call it: one image at a time is decoded, and one of this tower
    computed, a tile in each call, so that neither memory nor results depend on what else comes.

    Args:
        vision: the tower's sizes and the settings of its images.
        run: rows float32 [tokens, hidden] of what :func:`llmc.runtime.vision.patches.make_feeds` makes of a tile.
    """

    def __init__(self, vision: Vision, run: Callable[..., NDArray[np.float32]]) -> None:
        self._vision = vision
        self._run: Callable[..., NDArray[np.float32]] | None = run
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    def write_images(
        self, prompt: str, images: Sequence[Any], mark: Callable[[str], str], max_context: int
    ) -> tuple[str, list[Tiles]]:
        """The prompt with the tokens of images where its template wrote one for each, and the images as the tower sees
        them.

        Args:
            prompt: as the template wrote it.
            images: what :func:`llmc.runtime.vision.decode.open_image` takes.
            mark: makes of special tokens what the prompt has in their place.
            max_context: tokens.

        Raises:
            RequestError, UsageError: the template did not write all images, or one cannot be taken.
            ResourceError: memory does not suffice for one.
            ContextError: images have more tokens than the context.
        """
        vision, seen, tokens = self._vision, list[Tiles](), 0
        around = prompt.split(mark(vision.markers.placeholder or vision.markers.image))
        if len(around) - 1 != len(images):
            raise RequestError(
                f"the model's chat template shows {len(around) - 1} of the {len(images)} images of the messages; put "
                "images into messages of the user"
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
        """Rows of embeddings in the places of a prompt's image tokens.

        Raises:
            RequestError: the prompt has more or fewer of them.
            EngineClosedError: the model was closed meanwhile.
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
        names = [make_names(tiles.digest, len(own)) for tiles, own in zip(images, rows, strict=True)]
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
            found = [self.run(**make_feeds(tile, self._vision)) for tile in tiles.pixels]
            self._kept[tiles.digest] = rows = np.concatenate(found)
            while sum(kept.nbytes for kept in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
            return rows

    def run(self, **feeds: NDArray[Any]) -> NDArray[np.float32]:
        """Rows float32 [tokens, hidden] of what :func:`llmc.runtime.vision.patches.make_feeds` makes of a tile.

        Raises:
            EngineClosedError: the model was closed meanwhile.
        """
        if self._run is None:
            raise EngineClosedError("the model is closed; load the bundle again")
        return self._run(**feeds)

    def close(self) -> None:
        """Free the graph, once the tile that is being computed is."""
        self._run = None


def _see(source: Any, vision: Vision, name: str) -> Tiles:
    """An image as a tower sees it; nothing else of it stays."""
    image = open_image(source, name)
    return cut_patches(image, vision, vision.patching) if vision.patching else cut_tiles(image, vision)


# Parts for which templates write placeholders that nothing would fill; how services call images among them.
OTHER_MEDIA = ("video", "video_url", "audio", "audio_url", "input_audio", "image_url", "input_image")


def take_images(messages: Any) -> tuple[Any, list[Any]]:
    """Messages as templates read them, whose parts ``{"type": "image", "image": ...}`` say only that there is one, and
    the images in their order.

    Raises:
        UsageError: a part is of another form.
    """
    images: list[Any] = []

    def take(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        if other := next((kind for kind in OTHER_MEDIA if kind in (part.get("type"), *part)), None):
            raise UsageError("messages", f"holds a part of the kind {other}, expected text or image", "leave it out")
        if part.get("type") != "image":
            return part
        if part.keys() != {"type", "image"}:
            raise UsageError(
                "messages",
                f'holds an image with the keys {", ".join(map(str, part))}, expected {{"type": "image", '
                '"image": the path of a file, its bytes, an array or an image of Pillow\'s}',
            )
        images.append(part["image"])
        return {"type": "image"}

    def strip(message: Any) -> Any:
        parts = message.get("content") if isinstance(message, Mapping) else None
        return {**message, "content": [take(part) for part in parts]} if isinstance(parts, list | tuple) else message

    return [strip(message) for message in messages] if isinstance(messages, list | tuple) else messages, images
