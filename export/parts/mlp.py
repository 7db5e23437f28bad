"""Feed-forward parts."""

from dataclasses import dataclass

from llmc.bundle.model.experts import Mlp
from llmc.bundle.model.linear import Linear
from llmc.export.parts.site import Part, Shapes, Site, place


@dataclass(frozen=True, kw_only=True)
class MlpConfig(Mlp, Part):
    """A feed-forward part and its arithmetic."""

    bias: bool = False
    weighed: bool = False  # the result is multiplied by the sigmoid of one value that a linear makes of the token
    gate_scale: float = 1.0  # factor of what ``gate_proj`` makes
    scale: float = 1.0  # factor of the result

    def list_linears(self, site: Site) -> list[Linear]:
        producer = f"{site.path}.up_proj" if self.gated else ""  # an activation does not commute with a factor
        return [
            *(site.read(f"{part}_proj", self.inner, self.bias) for part in ("gate", "up")[not self.gated :]),
            site.write("down_proj", self.inner, self.bias, producer),
            *([site.read("weight_proj", 1, exact=True)] if self.weighed else []),
        ]

    def list_shapes(self, hidden: int) -> Shapes:
        return dict.fromkeys(self.learned, (1,))

    def entry(self, site: Site) -> Mlp:
        """The inventory's entry."""
        return place(Mlp, self, name=site.path, layer=site.layer)
