"""Contract 1: the inputs and outputs of a decoder's graph, and of an encoder's.

Export names them, lowerings add some, and whatever runs a graph feeds the inputs that the graph asks for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.bundle.manifest import HIDDEN
from llmc.bundle.model.cache import Cache
from llmc.bundle.model.geometry import Geometry

Feeds = Mapping[str, Any]
Shape = tuple[str | int, ...]
AXES, WIDTH, VOCAB = "axes", "width", "vocab"  # sizes of the model; all other axes are the call's


def _end(feeds: Feeds) -> Any:
    """Positions [B] of each row behind the last new token that counts."""
    return feeds["past_lengths"] + feeds.get("new_lengths", feeds["input_ids"].shape[1])


def _places(feeds: Feeds) -> Any:
    """Places [B, S] of the new tokens in their rows."""
    return feeds["past_lengths"][:, None] + range(feeds["input_ids"].shape[1])


@dataclass(frozen=True)
class Input:
    """An input of a graph.

    Attributes:
        shape: names of its axes.
        meaning: for readers, with the graphs that have it unless all do.
        when: whether the exported graph of a model has it; never where a lowering or a cut adds it.
        plain: what a call feeds that brings nothing for it, from what the call brings and the shape: an array, a range
            or a number, to be broadcast. None where each call brings it.
    """

    name: str
    shape: tuple[str, ...]
    meaning: str
    when: Callable[[Geometry], bool]
    plain: Callable[[Feeds, Sequence[int]], Any] | None = None
    type: str = "int64"

    def size(self, own: Sequence[Any], feeds: Feeds, attended: int = 0) -> tuple[int, ...]:
        """Shape in a call with ``feeds`` over a cache of ``attended`` positions; ``own`` is the graph's, with the sizes
        that are the model's."""
        if self.name in feeds:
            return tuple(feeds[self.name].shape)
        rows, tokens = feeds["input_ids"].shape
        sizes = {"batch": rows, "sequence": tokens, "rows": 1, "attended": attended}
        return tuple(it if isinstance(it, int) else sizes[axis] for it, axis in zip(own, self.shape, strict=True))

    def fill(self, array: Any, feeds: Feeds) -> None:
        """Write into ``array`` what a call brings for this input, or what a plain call has."""
        array[:] = feeds[self.name] if self.plain is None or self.name in feeds else self.plain(feeds, array.shape)

    def cut(self, array: Any, rows: slice, tokens: slice) -> Any:
        """The part of a call's ``array`` for some rows and tokens."""
        parts = {"batch": rows, "sequence": tokens}
        return array[tuple(parts.get(axis, slice(None)) for axis in self.shape)]


def _generates(geometry: Geometry) -> bool:
    return geometry.encoder is None


def _takes_rows(geometry: Geometry) -> bool:
    return geometry.vision is not None or geometry.head is not None


def _never(_: Geometry) -> bool:
    return False


_TEXT, _ROW = ("batch", "sequence"), ("batch",)
INPUTS = {
    it.name: it
    for it in (
        Input("input_ids", _TEXT, "new tokens, right-padded", lambda _: True),
        Input("past_lengths", _ROW, "valid positions in the cache before this call", _generates),
        Input("logit_indices", ("batch", "outputs"), "which of the new positions get logits", _generates),
        Input(
            "lengths",
            _ROW,
            "only of an encoder, which has neither of the two before: tokens of each row",
            lambda it: it.encoder is not None,
            lambda feeds, _: feeds["input_ids"].shape[1],
        ),
        Input(
            "new_lengths",
            _ROW,
            "only where some layer is recurrent: so many of a row's new tokens count, and padding leaves its states "
            "alone; and where a lowering packs rows",
            lambda it: it.has_states,
            lambda feeds, _: feeds["input_ids"].shape[1],
        ),
        Input(
            "embedding_indices",
            _TEXT,
            "only of a model that sees, or a draft head: -1 for a token's own embedding, else the row of `embeddings` "
            "in its place",
            _takes_rows,
            lambda *_: -1,
        ),
        Input(
            "embeddings",
            ("rows", WIDTH),
            "with them: rows of images, at least one, which calls without images do not look at; of Qwen3-VL as wide "
            "as several, of which the others are added behind the first layers",
            _takes_rows,
            lambda *_: 0,
            "float32",
        ),
        Input(
            "positions",
            (AXES, *_TEXT),
            "only where positions have axes (Qwen's models that see): time, row and column of each new token",
            lambda it: it.vision is not None and it.vision.axes > 0,
            lambda feeds, _: _places(feeds),
        ),
        Input(
            "seen_lengths",
            _ROW,
            "only of a diffusion model: all new tokens of a row see so many of its positions, those behind them too",
            lambda it: it.diffusion is not None,
            lambda feeds, _: _end(feeds),
        ),
        Input(
            "text_lengths",
            _ROW,
            "only where ropes have other factors for long texts (longrope): how long each row's text is",
            lambda it: it.long_after > 0,
            lambda feeds, _: _end(feeds),
        ),
        Input(
            "hidden",
            (*_TEXT, WIDTH),
            "only of a stage behind another, as `hidden.{i}`: hidden states before layer i; [1, tokens, width] of the "
            "tokens that count where rows are packed",
            _never,
            lambda *_: 0,
            "float32",
        ),
        Input(
            "cache_slots",
            ("attended",),
            "only of graphs for TensorRT: 0, 1, 2 ..., as many as the positions of the cache that attention looks at",
            _never,
            lambda _, shape: range(shape[0]),
        ),
    )
}
# What every call of a decoder brings.
BROUGHT = tuple(it for it in INPUTS.values() if it.plain is None)


@dataclass(frozen=True)
class Tensor:
    """An input or an output of a graph; ``shape`` has numbers, and names of axes whose sizes are a call's."""

    name: str
    type: str
    shape: Shape


def list_inputs(geometry: Geometry) -> list[Tensor]:
    """Inputs of a model's exported graph, in their order."""
    numbers: dict[str, str | int] = {AXES: geometry.vision.axes if geometry.vision else 0, WIDTH: geometry.row_width}
    found = [
        Tensor(it.name, it.type, tuple(numbers.get(axis, axis) for axis in it.shape))
        for it in INPUTS.values()
        if it.when(geometry)
    ]
    pasts = [tensor for cache in geometry.caches for tensor in _list_cache(cache, cache.inputs)]
    return [*found[: len(BROUGHT)], *pasts, *found[len(BROUGHT) :]]


def list_outputs(geometry: Geometry) -> list[Tensor]:
    """Outputs of a model's exported graph, in their order."""
    if geometry.encoder is not None:
        shape: Shape = ("batch",) if geometry.encoder.result == "scores" else ("batch", geometry.encoder.width)
        return [Tensor(geometry.encoder.result, "float32", shape)]
    found = [Tensor("logits", "float32", ("batch", "outputs", geometry.vocab_size))]
    found += [tensor for cache in geometry.caches for tensor in _list_cache(cache, cache.outputs)]
    if geometry.head is not None:
        found.append(Tensor(HIDDEN, "float32", ("batch", "outputs", geometry.head.own_width)))
    return found


def _list_cache(cache: Cache, names: Sequence[str]) -> Iterator[Tensor]:
    shape = ("batch", *cache.shape) if cache.kind == "state" else ("batch", cache.shape[0], "capacity", cache.shape[1])
    return (Tensor(name, "float32", shape) for name in names)
