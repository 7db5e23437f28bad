"""The shapes of towers that place patches by row and column: Gemma 4's, and the few linears of Gemma 4 12B."""

from dataclasses import dataclass
from typing import ClassVar

from llmc.bundle.model.linear import Linear
from llmc.bundle.model.vision import TOWER
from llmc.export.parts.norm import SANDWICH
from llmc.export.parts.rope import Rope
from llmc.export.parts.site import Shapes, shapes_of_linears

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FEEDERS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LAYER_NORMS = (SANDWICH.before_attention, SANDWICH.after_attention, SANDWICH.before_mlp, SANDWICH.after_mlp)
HEAD_NORMS = tuple(f"self_attn.{part}_norm" for part in "qkv")
PIXEL_NORMS = ("pixel_norm", "embedding_norm", "position_norm")
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
STANDARD = ("std_bias", "std_scale")


@dataclass(frozen=True)
class AxialTowerConfig:
    """A vision transformer over the patches of one image of any size: each patch has a vector for its row and one for
    its column, heads turn by both, and the mean of a square of patches becomes a row. Without ``layers``, linears make
    rows of pixels. Fields without a comment are as in :class:`llmc.export.vision.shapes.TowerConfig`."""

    root: ClassVar[str] = TOWER

    patch: int
    merged: int
    width: int
    layers: int
    heads: int
    head_dim: int
    inner: int
    eps: float  # of RMS norms
    theta: float  # base of the rotary embedding
    places: int  # rows, and columns, of the table of positions
    most_tokens: int  # rows of the largest image, where the processor's settings do not say
    both_ways: bool  # as in :class:`llmc.bundle.model.vision.Vision`
    outputs: int
    token_id: int
    renamed: tuple[tuple[str, str], ...]
    clipped: bool = False  # what the linears of layers read and make is held within learned bounds
    standardized: bool = False  # means of patches are shifted and scaled

    @property
    def square(self) -> int:
        """Pixels per side of the square that becomes a row."""
        return self.patch * self.merged

    @property
    def embeds_pixels(self) -> bool:
        """True without layers: layer norms stand around the product with pixels, which has a bias."""
        return not self.layers

    @property
    def rope(self) -> Rope:
        """Half of a head's pairs turn by the row of a patch, the others as fast by its column."""
        return Rope(self.head_dim // 2, self.theta)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linears in the order of computation."""
        reads = f"{TOWER}.{PIXEL_NORMS[0]}" if self.embeds_pixels else TOWER
        listed = [
            Linear(
                f"{TOWER}.patch_embedding",
                *(self.width, 3 * self.patch**2, self.embeds_pixels),
                *(reads, "", None),
                exact=True,
            )
        ]
        for index in range(self.layers):
            at, heads = f"{TOWER}.layers.{index}", self.heads * self.head_dim
            rows = [(name, heads, self.width, LAYER_NORMS[0]) for name in PROJECTIONS[:3]]
            rows.append((PROJECTIONS[3], self.width, heads, "self_attn"))
            rows += [(name, self.inner, self.width, LAYER_NORMS[2]) for name in FEEDERS[:2]]
            rows.append((FEEDERS[2], self.width, self.inner, "mlp"))
            listed += [Linear(f"{at}.{name}", n, k, False, f"{at}.{read}", "", index) for name, n, k, read in rows]
        return (*listed, Linear(f"{TOWER}.connector", self.outputs, self.width, False, f"{TOWER}.norm", "", None))

    @property
    def made_norms(self) -> dict[str, int]:
        """Norms whose weights are ones, which no checkpoint stores, and their sizes."""
        values = {f"{TOWER}.layers.{index}.{HEAD_NORMS[2]}": self.head_dim for index in range(self.layers)}
        return {**values, f"{TOWER}.norm": self.width}

    @property
    def parameter_shapes(self) -> Shapes:
        """Name and shape of every tensor of the tower."""
        shapes: Shapes = {f"{TOWER}.position_embedding.weight": (2 * self.places, self.width)}
        shapes |= shapes_of_linears(self.linears)
        shapes |= {f"{name}.weight": (size,) for name, size in self.made_norms.items()}
        for index in range(self.layers):
            at = f"{TOWER}.layers.{index}"
            shapes |= {f"{at}.{name}.weight": (self.width,) for name in LAYER_NORMS}
            shapes |= {f"{at}.{name}.weight": (self.head_dim,) for name in HEAD_NORMS[:2]}
            if self.clipped:
                shapes |= {f"{at}.{name}.{bound}": (1,) for name in (*PROJECTIONS, *FEEDERS) for bound in BOUNDS}
        if self.embeds_pixels:
            sizes = zip(PIXEL_NORMS, (3 * self.patch**2, self.width, self.width), strict=True)
            shapes |= {f"{TOWER}.{name}.{part}": (size,) for name, size in sizes for part in ("weight", "bias")}
        return shapes | ({f"{TOWER}.{name}": (self.width,) for name in STANDARD} if self.standardized else {})
