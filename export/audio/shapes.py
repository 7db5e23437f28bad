"""The shape of a tower that hears: convolutions, a transformer, and the linears that make rows for the decoder."""

from dataclasses import dataclass
from typing import ClassVar

from llmc.bundle.model.audio import CONVOLUTIONS, TOWER, halve
from llmc.bundle.model.linear import Linear
from llmc.export.parts.site import Shapes, shapes_of_linears
from llmc.export.vision.shapes import LAYER_NORMS, NORM_PARTS, list_layers

KERNEL = 3, 3


@dataclass(frozen=True)
class AudioTowerConfig:
    """A transformer over the spectrum of audio, as Whisper's encoder (arXiv 2212.04356), whose convolutions and
    positions begin anew with each chunk and whose attention stays within windows of chunks."""

    root: ClassVar[str] = TOWER  # module path

    bands: int  # of the spectrum
    chunk: int  # frames
    window: int  # chunks
    channels: int  # of the convolutions
    width: int  # of a row between layers
    layers: int
    heads: int  # of each attention
    inner: int  # width of each layer's MLP
    outputs: int  # width of a row: the decoder's hidden size
    token_id: int  # of the decoder's token whose embedding a row replaces
    renamed: tuple[tuple[str, str], ...]  # parts of tensor names, as in :class:`llmc.export.config.DecoderConfig`

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linears in the order of computation."""
        inputs = self.channels * halve(self.bands)
        first = Linear(f"{TOWER}.conv_out", self.width, inputs, False, TOWER, "", None, exact=True)
        hidden, connector = f"{TOWER}.connector_hidden", f"{TOWER}.connector"
        ends = (
            Linear(hidden, self.width, self.width, True, f"{TOWER}.norm", "", None, exact=True),
            Linear(connector, self.outputs, self.width, True, hidden, "", None, exact=True),
        )
        return (first, *list_layers(TOWER, self.layers, self.width, self.inner), *ends)

    @property
    def parameter_shapes(self) -> Shapes:
        """Name and shape of every tensor of the tower."""
        shapes: Shapes = {}
        for number in range(1, CONVOLUTIONS + 1):
            name, inputs = f"{TOWER}.conv2d{number}", 1 if number == 1 else self.channels
            shapes |= {f"{name}.weight": (self.channels, inputs, *KERNEL), f"{name}.bias": (self.channels,)}
        at = [f"{TOWER}.layers.{index}.{name}" for index in range(self.layers) for name in LAYER_NORMS]
        norms: Shapes = {f"{norm}.{part}": (self.width,) for norm in (*at, f"{TOWER}.norm") for part in NORM_PARTS}
        return shapes | shapes_of_linears(self.linears) | norms
