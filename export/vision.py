"""The shapes of towers: a vision transformer, and what makes rows for the decoder of the patches of a tile or image."""

from dataclasses import dataclass
from typing import Literal

from llmc.bundle.model.linear import Linear
from llmc.bundle.model.norm import NormKind
from llmc.bundle.model.vision import TOWER

# How rows are made of a square of patches: of their values side by side; of their mean (and a norm by the root mean
# square, whose weight is stored less one); or of their values side by side by two linears, of patches that lie square
# by square and in grids of any shape.
Projector = Literal["shuffle", "pool", "mlp"]
LAYER_NORMS, NORM_PARTS = ("input_layernorm", "post_attention_layernorm"), ("weight", "bias")


@dataclass(frozen=True)
class TowerConfig:
    """A vision transformer as SigLIP is one (arXiv 2303.15343): learned positions, norms before both parts of a layer.

    Attributes:
        tile, patch: pixels of each side of what it sees, and of the squares that it cuts this into.
        width: of a patch's values between layers.
        layers, heads: how many of them, and heads of each attention.
        inner: width of each layer's MLP.
        eps: of all norms.
        merged: patches of each side of the square that becomes one row.
        outputs: width of a row: the decoder's hidden size.
        token_id: of the decoder's token whose embedding a row replaces.
        projector: what makes the row, see :data:`Projector`.
        projector_inner: values between its two linears, 0 where there is one.
        projector_bias: whether these add biases.
        projector_norm: whether a layer norm is in front of them.
        renamed: parts of the names of its tensors in the checkpoint, as :class:`DecoderConfig` has them.
    """

    tile: int
    patch: int
    width: int
    layers: int
    heads: int
    inner: int
    eps: float
    merged: int
    outputs: int
    token_id: int
    renamed: tuple[tuple[str, str], ...]
    projector: Projector = "shuffle"
    projector_inner: int = 0
    projector_bias: bool = False
    projector_norm: bool = False

    @property
    def side(self) -> int:
        """Patches of each side of a tile."""
        return self.tile // self.patch

    @property
    def tokens(self) -> int:
        """Rows that a tile becomes."""
        return (self.side // self.merged) ** 2

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linears in the order of the computation."""
        pixels, width = 3 * self.patch**2, self.width * (1 if self.projector == "pool" else self.merged**2)
        read = "connector_norm" if self.projector == "pool" or self.projector_norm else "norm"
        first = Linear(f"{TOWER}.patch_embedding", self.width, pixels, True, TOWER, "", None, exact=True)
        ends, inner, bias = list[Linear](), self.projector_inner, self.projector_bias
        if inner:
            ends.append(
                Linear(f"{TOWER}.connector_hidden", inner, width, bias, f"{TOWER}.{read}", "", None, exact=True)
            )
            width, read = inner, "connector_hidden"
        ends.append(Linear(f"{TOWER}.connector", self.outputs, width, bias, f"{TOWER}.{read}", "", None, exact=True))
        return (first, *(linear for index in range(self.layers) for linear in self._list_of_layer(index)), *ends)

    def _list_of_layer(self, index: int) -> list[Linear]:
        at = f"{TOWER}.layers.{index}"
        rows = [(f"self_attn.{part}_proj", self.width, self.width, "input_layernorm") for part in "qkv"]
        rows.append(("self_attn.o_proj", self.width, self.width, "self_attn"))
        rows.append(("mlp.up_proj", self.inner, self.width, "post_attention_layernorm"))
        rows.append(("mlp.down_proj", self.width, self.inner, "mlp"))
        return [
            Linear(f"{at}.{name}", outputs, inputs, True, f"{at}.{read}", "", index)
            for name, outputs, inputs, read in rows
        ]

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of :mod:`llmc.export.tower`."""
        shapes: dict[str, tuple[int, ...]] = {f"{TOWER}.position_embedding.weight": (self.side**2, self.width)}
        for linear in self.linears:
            shapes[f"{linear.name}.weight"] = (linear.outputs, linear.inputs)
            shapes |= {f"{linear.name}.bias": (linear.outputs,)} if linear.bias else {}
        at = [f"{TOWER}.layers.{index}.{name}" for index in range(self.layers) for name in LAYER_NORMS]
        if self.projector == "pool":
            shapes[f"{TOWER}.connector_norm.weight"] = (self.width,)
        elif self.projector_norm:
            shapes |= {f"{TOWER}.connector_norm.{part}": (self.width * self.merged**2,) for part in NORM_PARTS}
        return shapes | {f"{norm}.{part}": (self.width,) for norm in (*at, f"{TOWER}.norm") for part in NORM_PARTS}


@dataclass(frozen=True)
class PatchTowerConfig:
    """A vision transformer over the patches of a whole image of any size, as Qwen's are: rotary embeddings of rows and
    columns, and rows for the decoder of squares of patches.

    Attributes:
        patch: pixels of each side of a patch.
        frames: times that each patch's pixels are there.
        merged: patches of each side of the square that becomes one row.
        width, layers, heads, inner: as of :class:`TowerConfig`.
        norm: kind of all norms.
        gated: whether MLPs are silu-gated, with approximate GELU otherwise.
        embedding_bias: whether the product with a patch's pixels adds a bias.
        window: squares of each side of the windows within which patches attend, 0 where all layers see all patches.
        whole: layers that see all patches all the same.
        places: entries of each side of the table of learned positions, 0 without one.
        deep: layers of the tower after which a further part of each row is made.
        outputs, token_id, renamed: as of :class:`TowerConfig`; a row has such a part for itself and each of ``deep``.
    """

    patch: int
    frames: int
    merged: int
    width: int
    layers: int
    heads: int
    inner: int
    norm: NormKind
    gated: bool
    embedding_bias: bool
    window: int
    whole: tuple[int, ...]
    places: int
    deep: tuple[int, ...]
    outputs: int
    token_id: int
    renamed: tuple[tuple[str, str], ...]

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linears in the order of the computation."""
        pixels = 3 * self.frames * self.patch**2
        first = Linear(f"{TOWER}.patch_embedding", self.width, pixels, self.embedding_bias, TOWER, "", None, exact=True)
        found = [first]
        for index in range(self.layers):
            found += self._list_of_layer(index)
            if index in self.deep:
                found += self._list_of_merger(f"{TOWER}.deep.{self.deep.index(index)}")
        return (*found, *self._list_of_merger(f"{TOWER}.merger"))

    def _list_of_layer(self, index: int) -> list[Linear]:
        at, read = f"{TOWER}.layers.{index}", "post_attention_layernorm"
        rows = [("self_attn.qkv", 3 * self.width, self.width, "input_layernorm")]
        rows.append(("self_attn.o_proj", self.width, self.width, "self_attn"))
        rows += [(f"mlp.{part}_proj", self.inner, self.width, read) for part in ("gate", "up")[not self.gated :]]
        rows.append(("mlp.down_proj", self.width, self.inner, "mlp"))
        return [
            Linear(f"{at}.{name}", outputs, inputs, True, f"{at}.{read}", "", index)
            for name, outputs, inputs, read in rows
        ]

    def _list_of_merger(self, at: str) -> list[Linear]:
        wide = self.width * self.merged**2
        return [
            Linear(f"{at}.fc1", wide, wide, True, f"{at}.norm", "", None),
            Linear(f"{at}.fc2", self.outputs, wide, True, f"{at}.fc1", "", None),
        ]

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of :mod:`llmc.export.tower`."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.places:
            shapes[f"{TOWER}.position_embedding.weight"] = (self.places**2, self.width)
        for linear in self.linears:
            shapes[f"{linear.name}.weight"] = (linear.outputs, linear.inputs)
            shapes |= {f"{linear.name}.bias": (linear.outputs,)} if linear.bias else {}
        wide = self.width * self.merged**2
        sizes = {f"layers.{index}.{name}": self.width for index in range(self.layers) for name in LAYER_NORMS}
        sizes |= {"merger.norm": self.width, **{f"deep.{number}.norm": wide for number, _ in enumerate(self.deep)}}
        parts = NORM_PARTS if self.norm == "layer" else NORM_PARTS[:1]
        return shapes | {f"{TOWER}.{norm}.{part}": (size,) for norm, size in sizes.items() for part in parts}
