"""Contract 1: inputs and outputs of a decoder's graph, and of an encoder's. ``export/README.md`` says what they mean.

Export names them, lowerings add some, and whatever runs a graph feeds the inputs that the graph asks for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.bundle.model.cache import Cache
from llmc.bundle.model.geometry import Geometry

Feeds = Mapping[str, Any]
Tensor = tuple[str, tuple[str | int, ...]]  # type and shape, with names of the sizes that are a call's


@dataclass(frozen=True)
class Input:
    """An input of a graph."""

    name: str
    type: str
    shape: tuple[str, ...]  # names of its sizes; `coordinates` and `width` are the model's, others the call's
    when: Callable[[Geometry], bool]  # whether the exported graph of a model has it
    # what a call feeds that brings nothing for it, from what the call brings and the shape: an array, a range or a
    # number, to be broadcast. None where every call brings it.
    plain: Callable[[Feeds, Sequence[int]], Any] | None = None

    def size(self, own: Sequence[Any], feeds: Feeds, attended: int = 0) -> tuple[int, ...]:
        """Shape in a call over a cache of ``attended`` positions; ``own`` is the graph's, with the model's sizes."""
        if self.name in feeds:
            return tuple(feeds[self.name].shape)
        rows, tokens = feeds["input_ids"].shape
        sizes = {"batch": rows, "sequence": tokens, "rows": 1, "attended": attended}
        return tuple(it if isinstance(it, int) else sizes[name] for it, name in zip(own, self.shape, strict=True))

    def fill(self, array: Any, feeds: Feeds) -> None:
        """Write into ``array`` what a call brings for this input, or what a plain call has."""
        array[:] = feeds[self.name] if self.plain is None or self.name in feeds else self.plain(feeds, array.shape)

    def cut(self, array: Any, rows: slice, tokens: slice) -> Any:
        """The part of a call's ``array`` for some rows and tokens."""
        parts = {"batch": rows, "sequence": tokens}
        return array[tuple(parts.get(name, slice(None)) for name in self.shape)]


def _generates(geometry: Geometry) -> bool:
    return geometry.generates


def _takes_rows(geometry: Geometry) -> bool:
    return geometry.row_width > 0


def _never(_: Geometry) -> bool:
    return False  # a lowering adds it, or a cut


def _tokens(feeds: Feeds, _: Sequence[int]) -> Any:
    return feeds["input_ids"].shape[1]


def _ends(feeds: Feeds, _: Sequence[int]) -> Any:
    return feeds["past_lengths"] + feeds.get("new_lengths", feeds["input_ids"].shape[1])


def _places(feeds: Feeds, _: Sequence[int]) -> Any:
    return feeds["past_lengths"][:, None] + range(feeds["input_ids"].shape[1])


_TEXT, _ROW = ("batch", "sequence"), ("batch",)
INPUTS = {
    it.name: it
    for it in (
        Input("input_ids", "int64", _TEXT, lambda _: True),
        Input("past_lengths", "int64", _ROW, _generates),
        Input("logit_indices", "int64", ("batch", "outputs"), _generates),
        Input("lengths", "int64", _ROW, lambda it: not it.generates, _tokens),
        Input("new_lengths", "int64", _ROW, lambda it: it.has_states, _tokens),
        Input("embedding_indices", "int64", _TEXT, _takes_rows, lambda *_: -1),
        Input("embeddings", "float32", ("rows", "width"), _takes_rows, lambda *_: 0),
        Input("positions", "int64", ("coordinates", *_TEXT), lambda it: it.coordinates > 0, _places),
        Input("seen_lengths", "int64", _ROW, lambda it: it.diffusion is not None, _ends),
        Input("token_types", "int64", _TEXT, lambda it: it.takes_types, lambda *_: 0),
        Input("text_lengths", "int64", _ROW, lambda it: it.long_after > 0, _ends),
        Input("hidden", "float32", (*_TEXT, "width"), _never, lambda *_: 0),  # a cut's, as hidden.{first layer}
        Input("cache_slots", "int64", ("attended",), _never, lambda _, shape: range(shape[0])),
    )
}
BROUGHT = tuple(it for it in INPUTS.values() if it.plain is None)


def list_inputs(geometry: Geometry) -> dict[str, Tensor]:
    """Inputs of a model's exported graph by name, in their order."""
    numbers = {"coordinates": geometry.coordinates, "width": geometry.row_width}
    asked = [it for it in INPUTS.values() if it.when(geometry)]
    inputs = [(it.name, (it.type, tuple([numbers.get(size, size) for size in it.shape]))) for it in asked]
    pasts = [(name, _describe(cache)) for cache in geometry.caches for name in cache.inputs]
    return dict([*inputs[: len(BROUGHT)], *pasts, *inputs[len(BROUGHT) :]])


def list_outputs(geometry: Geometry) -> dict[str, Tensor]:
    """Outputs of a model's exported graph by name, in their order."""
    caches = [(name, _describe(cache)) for cache in geometry.caches for name in cache.outputs]
    first, *others = [(name, ("float32", shape)) for name, shape in geometry.results.items()]
    return dict([first, *caches, *others])


def _describe(cache: Cache) -> Tensor:
    if cache.kind == "state":
        return "float32", ("batch", *cache.shape)
    return "float32", ("batch", cache.shape[0], "capacity", cache.shape[1])
