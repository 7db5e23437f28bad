"""Mixers with states: a causal convolution, and a recurrence behind it."""

from dataclasses import dataclass

from llmc.bundle.model.cache import Cache
from llmc.bundle.model.linear import Linear
from llmc.bundle.model.recurrent import Recurrent
from llmc.export.parts.site import Part, Shapes, Site, place


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(Recurrent, Part):
    """A mixer with states and its arithmetic."""

    bias: bool = False  # the convolution adds a bias, and with the rule ``conv`` the projections too
    gate_first: bool = False  # the output's gate is applied before its norm, not after it
    normed: bool = True  # the recurrence's output is normalised
    scales: tuple[float, ...] = (1.0,) * 5  # factors of the gate, values, keys, queries and steps of ``mamba2``
    least_step: float = 0.0  # lower bound of the steps of ``mamba2``
    apart: bool = False  # queries, keys and values of the delta rule have a linear each
    beta_scale: float = 1.0  # factor of the sigmoid by which the delta rule corrects
    norm_eps: float = 0.0  # epsilon of the norm, 0 for the decoder's

    @property
    def inner(self) -> int:
        """Width of what the last projection reads."""
        return self.value_heads * self.value_dim or self.channels

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of ``in_proj`` that make queries, keys and values of the delta rule."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.inner

    @property
    def norm_size(self) -> int:
        """Values that are normalised together after the recurrence: a head's, with ``mamba2`` a group's."""
        return self.value_dim if self.rule == "delta" else self.inner // self.key_heads

    @property
    def scaled_apart(self) -> bool:
        """True if each group has weights of its own after the norm, whose weights are ones."""
        return self.rule == "mamba2" and self.key_heads > 1 and self.normed

    def list_linears(self, site: Site) -> list[Linear]:
        if self.rule == "conv":
            return [site.read("in_proj", 3 * self.channels, self.bias), site.write("out_proj", self.inner, self.bias)]
        scalars = ("beta_proj", "decay_proj") if self.rule == "delta" else ("decay_proj",)
        parts = dict(zip("qkv", self.sections, strict=True)) if self.apart else {"in": self.channels}
        return [
            *(site.read(f"{part}_proj", rows) for part, rows in parts.items()),
            site.read("gate_proj", self.inner),
            *(site.read(name, self.value_heads, exact=True) for name in scalars),
            site.write("out_proj", self.inner),
        ]

    def list_norms(self, hidden: int) -> list[tuple[str, int]]:
        return [("norm", self.norm_size)] if self.rule != "conv" and self.normed else []

    def list_shapes(self, hidden: int) -> Shapes:
        shapes: Shapes = {"conv.weight": (self.channels, 1, self.taps)}
        shapes |= {"conv.bias": (self.channels,)} if self.bias else {}
        heads = {"conv": (), "delta": ("A_log", "dt_bias"), "mamba2": ("A_log", "dt_bias", "D")}[self.rule]
        shapes |= dict.fromkeys(heads, (self.value_heads,))
        return shapes | ({"norm_scale": (self.inner,)} if self.scaled_apart else {})

    def list_caches(self, site: Site) -> list[Cache]:
        names = (f"{site.layer}.{name}" for name in ("conv", "recurrent"))
        return [Cache(name, "state", shape, 0) for name, shape in zip(names, self.state_shapes, strict=False)]

    def entry(self, site: Site) -> Recurrent:
        """The inventory's entry."""
        caches = tuple(cache.name for cache in self.list_caches(site))
        return place(Recurrent, self, name=site.path, layer=site.layer, caches=caches)
