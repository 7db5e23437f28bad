"""From images in a conversation to embedding rows: cut, write into the prompt, and compute each image once.

A tower for audio is a :class:`RowTower`, too.
"""

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

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


class Item(Protocol):
    """An image or audio, ready for its tower."""

    @property
    def digest(self) -> bytes:
        """A hash of everything: equal hashes mean equal embedding rows."""


S = TypeVar("S", bound=Item)


class RowTower(ABC, Generic[S]):
    """Computes embedding rows of images or audio. Any thread may call it: the process decodes one item at a time, and
    this tower makes one call at a time, so neither memory nor results depend on other requests.

    Args:
        run: computes float32 [rows, hidden] from the tower's inputs.
    """

    kind: ClassVar[str]  # of the parts of messages that it reads
    token_id: int  # of the token that a row replaces
    token: str  # its text
    placeholder: str  # what templates write once for an item
    whole: bool = False  # the decoder must be fed all rows of an item in one call

    def __init__(self, run: Callable[..., NDArray[np.float32]]) -> None:
        self._run: Callable[..., NDArray[np.float32]] | None = run
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    @abstractmethod
    def read(self, source: Any, name: str, most_rows: int) -> S:
        """Make an item ready for the tower; an item of more rows may be refused. ``name`` is for errors."""

    @abstractmethod
    def count(self, item: S) -> int:
        """Number of rows of an item."""

    @abstractmethod
    def write(self, item: S) -> str:
        """The text of an item in a prompt, with a token for each row."""

    @abstractmethod
    def make_feeds(self, item: S) -> Iterable[dict[str, NDArray[Any]]]:
        """Inputs of the tower, call by call."""

    def place(self, length: int, starts: Sequence[int], images: Sequence[S]) -> NDArray[np.int64] | None:
        """Coordinates int64 [3, length] of a prompt's tokens if positions have several axes; ``starts``: first tokens
        of the items."""
        return None

    def prepare(self, source: Any, name: str, most_rows: int) -> S:
        """:meth:`read`, one item at a time in this process. Raises what that does, and ResourceError."""
        with decoding(name):
            return self.read(source, name, most_rows)

    def write_images(
        self, prompt: str, images: Sequence[Any], mark: Callable[[str], str], max_context: int
    ) -> tuple[str, list[S]]:
        """The prompt with each placeholder replaced by its item's tokens, and the items ready for the tower.

        Args:
            prompt: written by the template.
            images: images or audio, inputs of :meth:`read`.
            mark: replaces special tokens as in the prompt.
            max_context: tokens.

        Raises:
            RequestError, UsageError: the template left out items, or one cannot be read.
            ResourceError: not enough memory for an item.
            ContextError: the items have more tokens than the context.
        """
        items, tokens = list[S](), 0
        around = prompt.split(mark(self.placeholder))
        if len(around) - 1 != len(images):
            raise RequestError(
                f"the model's chat template shows {len(around) - 1} of the {len(images)} {self.kind} parts of the "
                f"messages; put {self.kind} parts into user messages"
            )
        for number, image in enumerate(images, 1):
            items.append(self.prepare(image, f"{self.kind} {number}", max_context - tokens))
            if (tokens := tokens + self.count(items[-1])) >= max_context:
                raise ContextError(
                    f"the first {number} of {len(images)} {self.kind} parts have {tokens} tokens, which leaves no room "
                    f"in a context of {max_context}",
                    "leave some out",
                    parameter="prompt",
                )
        written = [mark(self.write(each)) for each in items]
        return "".join(part for pair in zip(around, [*written, ""], strict=True) for part in pair), items

    def compute_rows(self, images: Sequence[S], prompt: Sequence[int]) -> ImageRows:
        """Embedding rows at the positions of a prompt's tokens of images or audio.

        Raises:
            RequestError: the number of these tokens in the prompt is wrong.
            EngineClosedError: the model was closed.
        """
        positions = np.flatnonzero(np.asarray(prompt, np.int64) == self.token_id)
        counts = [self.count(each) for each in images]
        if len(positions) != (count := sum(counts)):
            raise RequestError(
                f"the prompt has {len(positions)} {self.kind} tokens, expected {count}",
                f"leave {self.token} out of the messages",
                parameter="prompt",
            )
        rows = [self._compute(each) for each in images]
        names = [make_names(each.digest, len(own)) for each, own in zip(images, rows, strict=True)]
        places = self.place(len(prompt), positions[np.cumsum([0, *counts[:-1]])].tolist(), images)
        return ImageRows(positions, np.concatenate(names), np.concatenate(rows), places, self.whole)

    def _compute(self, item: S) -> NDArray[np.float32]:
        with self._lock:
            if (rows := self._kept.get(item.digest)) is not None:
                self._kept.move_to_end(item.digest)
                return rows
            self._kept[item.digest] = rows = np.concatenate([self.run(**feeds) for feeds in self.make_feeds(item)])
            while sum(kept.nbytes for kept in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
            return rows

    def run(self, **feeds: NDArray[Any]) -> NDArray[np.float32]:
        """Embeddings float32 [rows, hidden] from one item of :meth:`make_feeds`.

        Raises:
            EngineClosedError: the model was closed.
        """
        if self._run is None:
            raise EngineClosedError("the model is closed; load the bundle again")
        return self._run(**feeds)

    def close(self) -> None:
        """Free the graph after the call in progress."""
        self._run = None


class Tower(RowTower[Tiles]):
    """Computes embedding rows of images, by the sizes and settings of a model that sees."""

    kind = Vision.kind

    def __init__(self, vision: Vision, run: Callable[..., NDArray[np.float32]]) -> None:
        super().__init__(run)
        self._vision, self.token_id, self.token = vision, vision.token_id, vision.markers.image
        self.placeholder, self.whole = vision.markers.placeholder or self.token, vision.both_ways

    def read(self, source: Any, name: str, most_rows: int) -> Tiles:
        """Cut an image, an input of :func:`llmc.runtime.vision.decode.open_image`; the image itself is not kept."""
        image, vision = open_image(source, name), self._vision
        return cut_patches(image, vision, vision.patching) if vision.patching else cut_tiles(image, vision)

    def count(self, item: Tiles) -> int:
        return count_rows(item, self._vision)

    def write(self, item: Tiles) -> str:
        return write_markers(item, self._vision)

    def make_feeds(self, item: Tiles) -> Iterable[dict[str, NDArray[Any]]]:
        return (make_feeds(tile, self._vision) for tile in item.pixels)

    def place(self, length: int, starts: Sequence[int], images: Sequence[Tiles]) -> NDArray[np.int64] | None:
        if not self._vision.axes:
            return None
        grids = [self._vision.grid(*tiles.pixels[0].shape[1:]) for tiles in images]
        return place_tokens(length, list(zip(starts, grids, strict=True)))


# Templates write placeholders for these parts, and nothing would fill them. The names are those of services.
MEDIA = ("video", "video_url", "audio", "audio_url", "input_audio", "image", "image_url", "input_image")


def take_images(messages: Any, kind: str = Vision.kind) -> tuple[Any, list[Any]]:
    """Messages for the template, with parts ``{"type": kind, kind: ...}`` reduced to a placeholder, and what these held
    in order.

    Raises:
        UsageError: a part has another format.
    """
    images: list[Any] = []

    def take(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        if medium := next((each for each in MEDIA if each != kind and each in (part.get("type"), *part)), None):
            raise UsageError("messages", f"holds a part of the kind {medium}, expected text or {kind}", "leave it out")
        if part.get("type") != kind:
            return part
        if part.keys() != {"type", kind}:
            raise UsageError(
                "messages",
                f'holds a part of the kind {kind} with the keys {", ".join(map(str, part))}, expected {{"type": '
                f'"{kind}", "{kind}": the path of a file, its bytes or an array}}',
            )
        images.append(part[kind])
        return {"type": kind}

    def strip(message: Any) -> Any:
        parts = message.get("content") if isinstance(message, Mapping) else None
        return {**message, "content": [take(part) for part in parts]} if isinstance(parts, list | tuple) else message

    return [strip(message) for message in messages] if isinstance(messages, list | tuple) else messages, images
