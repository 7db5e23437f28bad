"""The shape of towers whose layers are Llama's: RMS norms, gated MLPs, no biases (Pixtral, LFM3-VL)."""

from dataclasses import dataclass

from llmc.bundle.model.experts import Activation
from llmc.bundle.model.linear import Linear
from llmc.bundle.model.norm import NormKind
from llmc.bundle.model.vision import TOWER
from llmc.export.parts.rope import Rope
from llmc.export.parts.site import Shapes, shapes_of_linears
from llmc.export.vision.shapes import LAYER_NORMS, NORM_PARTS, PatchTowerConfig


@dataclass(frozen=True, kw_only=True)
class LlamaTowerConfig(PatchTowerConfig):
    """A tower over the patches of a whole image, with a norm behind the embeddings and none behind the layers.

    Each patch goes through ``merger.norm``; the values of a square become a row by two linears, ``merger.fc1`` and
    ``merger.fc2``, of whose values GELU lies between.
    """

    norm: NormKind = "rms"
    gated: bool = True
    embedding_bias: bool = False
    window: int = 0
    whole: tuple[int, ...] = ()
    places: int = 0
    deep: tuple[int, ...] = ()
    eps: float  # of the norms of layers
    activation: Activation = "silu"  # of the gates
    theta: float  # base of the rotary embedding
    kv_heads: int
    qk_norm: bool = False  # queries and keys are normalized by head
    kernel: int = 0  # patches per side that a convolution sees
    convolved: tuple[int, ...] = ()  # layers that mix patches by a gated convolution instead of attention
    takes_turns: bool = False  # rows turn by the even frequencies of a head, columns by the odd ones
    lines: bool = False  # the tokens of an image are written in lines
    merging: bool = False  # a square's values, channel by channel, become as many as a patch has by a linear of its own
    merger_norm: NormKind  # its epsilon is the next field
    merger_eps: float
    merger_inner: int  # values between the two linears
    merger_bias: bool  # of the two linears

    @property
    def axes(self) -> int:
        """The decoder's positions are plain."""
        return 0

    @property
    def rope(self) -> Rope:
        head_dim = self.width // self.heads
        return Rope(head_dim if self.takes_turns else head_dim // 2, self.theta)

    @property
    def linears(self) -> tuple[Linear, ...]:
        pixels = 3 * self.frames * self.patch**2
        first = Linear(f"{TOWER}.patch_embedding", self.width, pixels, False, TOWER, "", None, exact=True)
        layers = (linear for index in range(self.layers) for linear in self._list_layer(index))
        return (first, *layers, *self._list_merger(f"{TOWER}.merger"))

    def _list_layer(self, index: int) -> list[Linear]:
        at, width = f"{TOWER}.layers.{index}", self.width
        if index in self.convolved:
            rows = [("conv.in_proj", 3 * width, width, LAYER_NORMS[0]), ("conv.out_proj", width, width, "conv")]
        else:
            keys = width // self.heads * self.kv_heads
            sizes = {"q": width, "k": keys, "v": keys}
            rows = [(f"self_attn.{part}_proj", size, width, LAYER_NORMS[0]) for part, size in sizes.items()]
            rows.append(("self_attn.o_proj", width, width, "self_attn"))
        rows += [(f"mlp.{part}_proj", self.inner, width, LAYER_NORMS[1]) for part in ("gate", "up")]
        rows.append(("mlp.down_proj", width, self.inner, "mlp"))
        return [Linear(f"{at}.{name}", n, m, False, f"{at}.{read}", "", index) for name, n, m, read in rows]

    def _list_merger(self, at: str) -> list[Linear]:
        wide, read, linears = self.width * self.merged**2, f"{at}.norm", list[Linear]()
        if self.merging:
            linears.append(Linear(f"{at}.merging", self.width, wide, False, read, "", None))
            wide, read = self.width, f"{at}.merging"
        linears.append(Linear(f"{at}.fc1", self.merger_inner, wide, self.merger_bias, read, "", None))
        linears.append(Linear(f"{at}.fc2", self.outputs, self.merger_inner, self.merger_bias, f"{at}.fc1", "", None))
        return linears

    @property
    def parameter_shapes(self) -> Shapes:
        sizes = {"embedding_norm": self.width}
        sizes |= {f"layers.{index}.{name}": self.width for index in range(self.layers) for name in LAYER_NORMS}
        if self.qk_norm:
            attending = (index for index in range(self.layers) if index not in self.convolved)
            head_dim = self.width // self.heads
            sizes |= {f"layers.{index}.self_attn.{part}_norm": head_dim for index in attending for part in "qk"}
        shapes: Shapes = {f"{TOWER}.{name}.weight": (size,) for name, size in sizes.items()}
        parts = NORM_PARTS if self.merger_norm == "layer" else NORM_PARTS[:1]
        shapes |= {f"{TOWER}.merger.norm.{part}": (self.width,) for part in parts}
        kernel = (self.width, 1, self.kernel, self.kernel)
        shapes |= {f"{TOWER}.layers.{index}.conv.weight": kernel for index in self.convolved}
        return shapes_of_linears(self.linears) | shapes
