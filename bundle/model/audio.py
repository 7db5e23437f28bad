"""Audio: its spectrum, and the tower that hears it."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from llmc.bundle.model.linear import Linear
from llmc.bundle.model.ranges import Count, Width

# Module path of the tower: ``audio.conv_out``, ``audio.layers.0...``.
TOWER = "audio"

# Convolutions before the tower's layers. Each halves the bands and the frames of a chunk.
CONVOLUTIONS = 3


def halve(count: int) -> int:
    """Bands or frames that the convolutions leave of ``count``; 0 of 0."""
    for _ in range(CONVOLUTIONS):
        count = (count + 1) // 2
    return count


@dataclass(frozen=True)
class Spectrum:
    """Steps from samples to a log-mel spectrum, as Whisper's (arXiv 2212.04356)."""

    rate: Annotated[int, range(8_000, 192_001)]  # samples per second
    bands: Annotated[int, range(1, 513)]  # on the mel scale
    frame: Annotated[int, range(16, 8193)]  # samples
    hop: Annotated[int, range(1, 8193)]  # samples from one frame to the next
    least: Annotated[int, range(1 << 20)]  # samples; zeros are put behind shorter audio


@dataclass(frozen=True)
class Audio:
    """A tower that makes rows of embeddings from audio; the rows replace a prompt's audio tokens."""

    graph: ClassVar[str] = TOWER  # name of its graph
    kind: ClassVar[str] = "audio"  # of the parts of messages that it reads
    axes, deep, least_chunk = 0, 0, 1  # as :class:`llmc.bundle.model.vision.Vision` has them

    spectrum: Spectrum
    chunk: Annotated[int, range(1, 1 << 12)]  # frames that are convolved together
    window: Annotated[int, range(1, 1 << 12)]  # chunks whose rows attend to one another
    channels: Width  # of the convolutions
    token: str  # text of the token that a row replaces
    token_id: Annotated[int, range(1 << 24)]  # of this token
    opening: str  # of a transcript, with ``{language}`` for the name of the language
    layers: Count
    linears: tuple[Linear, ...]  # in the order of computation

    def count_rows(self, frames: int) -> int:
        """Rows of so many frames."""
        whole, rest = divmod(frames, self.chunk)
        return whole * halve(self.chunk) + halve(rest)

    @property
    def most_rows(self) -> int:
        """Most rows that the tower makes at a time."""
        return self.window * halve(self.chunk)

    @property
    def attentions(self) -> int:
        """Number of attentions in the tower, one in each layer."""
        return self.layers

    @property
    def norms(self) -> int:
        """Number of norms in the tower: two in each layer and one after them."""
        return 2 * self.layers + 1

    def is_sound(self, vocab_size: int) -> bool:
        spectrum = self.spectrum
        return (
            self.token_id < vocab_size
            and self.token != ""
            and self.opening.partition("{language}")[2] != ""
            and len(self.linears) > 0
            and spectrum.hop <= spectrum.frame < 2 * spectrum.least
            and self.linears[0].inputs == self.channels * halve(spectrum.bands)
        )
