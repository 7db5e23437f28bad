"""Places parts in a decoder's layers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from llmc.bundle.model.cache import Cache
from llmc.bundle.model.linear import Linear
from llmc.export.parts.rope import Rope

T = TypeVar("T")
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Site:
    """A part's place in a layer, and what it reads there."""

    path: str  # module path of the part
    layer: int
    hidden: int  # width of the residual stream
    inputs: int  # width of what the part reads
    reads: str = ""  # see :class:`llmc.bundle.model.linear.Linear`
    producer: str = ""
    ropes: tuple[Rope, ...] = ()  # of the decoder
    cached: bool = True  # attentions have a cache

    def read(self, name: str, outputs: int, bias: bool = False, *, exact: bool = False) -> Linear:
        """A linear that reads what the part reads."""
        return Linear(
            f"{self.path}.{name}", outputs, self.inputs, bias, self.reads, self.producer, self.layer, exact=exact
        )

    def expand(self, name: str, outputs: int, inputs: int, source: str) -> Linear:
        """A linear that reads the part's module ``source``."""
        return Linear(f"{self.path}.{name}", outputs, inputs, False, f"{self.path}.{source}", "", self.layer)

    def write(self, name: str, inputs: int, bias: bool = False, producer: str = "") -> Linear:
        """A linear from the part's inner values to the residual stream."""
        return Linear(f"{self.path}.{name}", self.hidden, inputs, bias, self.path, producer, self.layer)


class Part(ABC):
    """A part of a layer. Names are relative to its module."""

    @abstractmethod
    def list_linears(self, site: Site) -> list[Linear]:
        """Its linears in the order of computation."""

    def list_norms(self, hidden: int) -> list[tuple[str, int]]:
        """Names and sizes of its norms in the order of computation."""
        return []

    def list_shapes(self, hidden: int) -> Shapes:
        """Shapes of its tensors that belong to no linear, no norm and no stack of experts."""
        return {}

    def list_caches(self, site: Site) -> list[Cache]:
        """The caches that it writes."""
        return []


def place(kind: type[T], part: Any, **where: Any) -> T:
    """The inventory's entry of a part: the fields of ``kind``, those in ``where`` as given there."""
    kept = (field.name for field in fields(kind) if field.name not in where)  # type: ignore[arg-type]
    return kind(**{name: getattr(part, name) for name in kept}, **where)


def shapes_of_linears(linears: Sequence[Linear]) -> Shapes:
    """Shapes of the linears' tensors by name."""
    weights: Shapes = {f"{it.name}.weight": (it.outputs, it.inputs) for it in linears}
    return weights | {f"{it.name}.bias": (it.outputs,) for it in linears if it.bias}
