"""The shape of a tower: a vision transformer, and what makes rows for the decoder of the patches of a tile."""

from dataclasses import dataclass
from typing import Literal

from llmc.inventory import TOWER, Linear

# How rows are made of a square of patches: of their values side by side, or of their mean (and a norm by the root mean
# square, whose weight is stored less one).
Projector = Literal["shuffle", "pool"]
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
        pixels, shuffles = 3 * self.patch**2, self.projector == "shuffle"
        merged, read = (self.width * self.merged**2, "norm") if shuffles else (self.width, "connector_norm")
        first = Linear(f"{TOWER}.patch_embedding", self.width, pixels, True, TOWER, "", None, exact=True)
        last = Linear(f"{TOWER}.connector", self.outputs, merged, False, f"{TOWER}.{read}", "", None, exact=True)
        return (first, *(linear for index in range(self.layers) for linear in self._list_of_layer(index)), last)

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
        shapes |= {f"{TOWER}.connector_norm.weight": (self.width,)} if self.projector == "pool" else {}
        return shapes | {f"{norm}.{part}": (self.width,) for norm in (*at, f"{TOWER}.norm") for part in NORM_PARTS}
