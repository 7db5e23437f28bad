"""The shape of a tower: a vision transformer, and what makes rows for the decoder of the patches of a tile."""

from dataclasses import dataclass
from typing import Literal

from llmc.inventory import TOWER, Linear

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
