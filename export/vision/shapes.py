"""The shapes of towers: a vision transformer, and the linears that make rows for the decoder of patches."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from llmc.bundle.model.linear import Linear
from llmc.bundle.model.norm import NormKind
from llmc.bundle.model.vision import TOWER
from llmc.export.parts.rope import Rope
from llmc.export.parts.site import Shapes, shapes_of_linears

# A row is made of a square of patches: of their values side by side; of their mean (and an RMS norm whose weight is
# stored minus one); or of their values side by side by two linears, of patches that lie square by square and in grids
# of any shape.
Projector = Literal["shuffle", "pool", "mlp"]
# Base of the rotary embedding of Qwen's towers. Source: transformers, qwen2_5_vl and qwen3_vl.
THETA = 10_000.0
LAYER_NORMS, NORM_PARTS = ("input_layernorm", "post_attention_layernorm"), ("weight", "bias")


@dataclass(frozen=True)
class TowerConfig:
    """A vision transformer as SigLIP is one (arXiv 2303.15343): learned positions, norms before a layer's parts."""

    root: ClassVar[str] = TOWER  # module path

    tile: int  # pixels per side of what it sees
    patch: int  # pixels per side of a patch
    width: int  # of a patch's values between layers
    layers: int
    heads: int  # of each attention
    inner: int  # width of each layer's MLP
    eps: float  # of all norms
    merged: int  # patches per side of the square that becomes a row
    outputs: int  # width of a row: the decoder's hidden size
    token_id: int  # of the decoder's token whose embedding a row replaces
    renamed: tuple[tuple[str, str], ...]  # parts of tensor names, as in :class:`llmc.export.config.DecoderConfig`
    projector: Projector = "shuffle"
    projector_inner: int = 0  # values between the projector's two linears, 0 if there is one
    projector_bias: bool = False  # of these linears
    projector_norm: bool = False  # a layer norm stands before them

    @property
    def side(self) -> int:
        """Patches per side of a tile."""
        return self.tile // self.patch

    @property
    def tokens(self) -> int:
        """Rows that a tile becomes."""
        return (self.side // self.merged) ** 2

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linears in the order of computation."""
        pixels, width = 3 * self.patch**2, self.width * (1 if self.projector == "pool" else self.merged**2)
        read = "connector_norm" if self.projector == "pool" or self.projector_norm else "norm"
        first = Linear(f"{TOWER}.patch_embedding", self.width, pixels, True, TOWER, "", None, exact=True)
        ends, inner, bias = list[Linear](), self.projector_inner, self.projector_bias
        if inner:
            name = f"{TOWER}.connector_hidden"
            ends.append(Linear(name, inner, width, bias, f"{TOWER}.{read}", "", None, exact=True))
            width, read = inner, "connector_hidden"
        ends.append(Linear(f"{TOWER}.connector", self.outputs, width, bias, f"{TOWER}.{read}", "", None, exact=True))
        return (first, *list_layers(TOWER, self.layers, self.width, self.inner), *ends)

    @property
    def parameter_shapes(self) -> Shapes:
        """Name and shape of every tensor of the tower."""
        shapes: Shapes = {f"{TOWER}.position_embedding.weight": (self.side**2, self.width)}
        shapes |= shapes_of_linears(self.linears)
        if self.projector == "pool":
            shapes[f"{TOWER}.connector_norm.weight"] = (self.width,)
        elif self.projector_norm:
            shapes |= {f"{TOWER}.connector_norm.{part}": (self.width * self.merged**2,) for part in NORM_PARTS}
        at = [f"{TOWER}.layers.{index}.{name}" for index in range(self.layers) for name in LAYER_NORMS]
        return shapes | {f"{norm}.{part}": (self.width,) for norm in (*at, f"{TOWER}.norm") for part in NORM_PARTS}


@dataclass(frozen=True)
class PatchTowerConfig:
    """A vision transformer over the patches of a whole image of any size, as Qwen's are: rotary embeddings of rows and
    columns, and a row of each square of patches. Fields without a comment are as in :class:`TowerConfig`."""

    root: ClassVar[str] = TOWER

    patch: int
    frames: int  # copies of each patch's pixels
    merged: int
    width: int
    layers: int
    heads: int
    inner: int
    norm: NormKind  # of all norms
    gated: bool  # MLPs are silu-gated; otherwise they have approximate GELU
    embedding_bias: bool  # of the product with a patch's pixels
    window: int  # squares per side of the windows within which patches attend, 0 if all layers see all patches
    whole: tuple[int, ...]  # layers that see all patches all the same
    places: int  # entries per side of the table of learned positions, 0 without one
    deep: tuple[int, ...]  # layers of the tower after which a further part of each row is made
    outputs: int  # width of each part of a row
    token_id: int
    renamed: tuple[tuple[str, str], ...]

    @property
    def axes(self) -> int:
        """Numbers in the position of a token of the decoder: time, row and column."""
        return 3

    @property
    def kernel(self) -> int:
        """Patches per side that convolutions see, 0 without one."""
        return 0

    @property
    def rope(self) -> Rope:
        """Half of a head's pairs turn by the row of a patch, the others as fast by its column."""
        return Rope(self.width // self.heads // 2, THETA)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linears in the order of computation."""
        pixels = 3 * self.frames * self.patch**2
        first = Linear(f"{TOWER}.patch_embedding", self.width, pixels, self.embedding_bias, TOWER, "", None, exact=True)
        rows = [("self_attn.qkv", 3 * self.width, self.width, LAYER_NORMS[0])]
        rows.append(("self_attn.o_proj", self.width, self.width, "self_attn"))
        parts = ("gate", "up")[not self.gated :]
        rows += [(f"mlp.{part}_proj", self.inner, self.width, LAYER_NORMS[1]) for part in parts]
        rows.append(("mlp.down_proj", self.width, self.inner, "mlp"))
        linears = [first]
        for index in range(self.layers):
            linears += _list_layer(TOWER, index, rows)
            if index in self.deep:
                linears += self._list_merger(f"{TOWER}.deep.{self.deep.index(index)}")
        return (*linears, *self._list_merger(f"{TOWER}.merger"))

    def _list_merger(self, at: str) -> list[Linear]:
        wide = self.width * self.merged**2
        return [
            Linear(f"{at}.fc1", wide, wide, True, f"{at}.norm", "", None),
            Linear(f"{at}.fc2", self.outputs, wide, True, f"{at}.fc1", "", None),
        ]

    @property
    def parameter_shapes(self) -> Shapes:
        """Name and shape of every tensor of the tower."""
        places: Shapes = {f"{TOWER}.position_embedding.weight": (self.places**2, self.width)} if self.places else {}
        wide = self.width * self.merged**2
        sizes = {f"layers.{index}.{name}": self.width for index in range(self.layers) for name in LAYER_NORMS}
        sizes |= {"merger.norm": self.width, **{f"deep.{number}.norm": wide for number, _ in enumerate(self.deep)}}
        parts = NORM_PARTS if self.norm == "layer" else NORM_PARTS[:1]
        norms: Shapes = {f"{TOWER}.{norm}.{part}": (size,) for norm, size in sizes.items() for part in parts}
        return places | shapes_of_linears(self.linears) | norms


def list_layers(root: str, layers: int, width: int, inner: int) -> Iterator[Linear]:
    """The linears of the layers of a transformer without gates, in the order of computation; ``root`` is its path."""
    rows = [(f"self_attn.{part}_proj", width, width, LAYER_NORMS[0]) for part in "qkv"]
    rows.append(("self_attn.o_proj", width, width, "self_attn"))
    rows.append(("mlp.up_proj", inner, width, LAYER_NORMS[1]))
    rows.append(("mlp.down_proj", width, inner, "mlp"))
    for index in range(layers):
        yield from _list_layer(root, index, rows)


def _list_layer(root: str, index: int, rows: Iterable[tuple[str, int, int, str]]) -> list[Linear]:
    """The linears of a layer from their names, outputs, inputs and what they read."""
    at = f"{root}.layers.{index}"
    return [
        Linear(f"{at}.{name}", outputs, inputs, True, f"{at}.{read}", "", index) for name, outputs, inputs, read in rows
    ]
