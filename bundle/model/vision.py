"""Images: how they are cut, and the tower that reads them."""

from dataclasses import dataclass
from math import isqrt
from typing import Annotated, ClassVar, Literal

from llmc.bundle.model.linear import Linear
from llmc.bundle.model.ranges import Positions

# Module path of the tower: ``vision.patch_embedding``, ``vision.layers.0...``.
TOWER = "vision"

# Tiles of one image; published models cut it into 4 x 4.
MOST_TILES = 257

Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]

Pixels = Annotated[int, range(1, 4097)]

Channels = Annotated[tuple[float, ...], range(3, 4)]  # a number for each of red, green and blue

Lines = Annotated[tuple[str, ...], range(1, 17)]  # of a text, joined by newlines


@dataclass(frozen=True)
class Markers:
    """Texts around the tokens of an image in a prompt; the tokenizer gets them as one text with the image's tokens."""

    image: str  # text of the token that a row replaces
    tile: Lines  # before each tile of a cut image; ``{row}`` and ``{column}`` are its place, from 1
    row_end: Lines  # after the last tile of each row
    whole: Lines  # after all tiles, before the view of the whole image
    single: Lines  # before an image that is not cut
    after: Lines  # after every image
    placeholder: str = ""  # what templates write once for an image, empty if that is the token itself
    before: Lines = ("",)  # before every image
    line_end: Lines = ("",)  # between the lines of an image's rows


@dataclass(frozen=True)
class Tiling:
    """Steps from pixels to tiles: an RGB image is resized until its longest edge has ``longest_edge`` pixels, then to
    the next multiples of a tile, and cut; if that makes several tiles, the image resized to one tile follows."""

    longest_edge: Annotated[int, range(4097)]  # pixels; 0: images are resized to one tile at once
    cut: bool  # images are cut into tiles, not resized to one
    filter: Filter  # of every resizing, by Pillow's name
    rescale: float  # factor of the values 0 ... 255
    mean: Channels  # subtracted then
    std: Channels  # divided by then


@dataclass(frozen=True)
class Patching:
    """Steps from pixels to the patches of a tower for grids of any shape: an RGB image is resized to whole squares of
    patches, near its ratio and within bounds of its pixels. If tiles are cut, a large image is also resized to them,
    and they come before that view of the whole."""

    least_pixels: Annotated[int, range(1, 1 << 26)]  # of the resized image
    most_pixels: Annotated[int, range(1, 1 << 26)]
    filter: Filter  # this and the next three as in :class:`Tiling`
    rescale: float
    mean: Channels
    std: Channels
    frames: Annotated[int, range(1, 17)]  # copies of each patch's pixels: the tower is made for videos, too
    window: Annotated[int, range(1 << 12)]  # squares per side of the windows of some layers' attention, 0 for none
    places: Annotated[int, range(1 << 12)]  # entries per side of the table of positions that images stretch, or 0
    naflex: bool = False  # patches as SigLIP 2's (LFM2-VL), positions stretched by areas; else as Qwen's
    least_tiles: Annotated[int, range(1, MOST_TILES)] = 1  # that a large image is cut into
    most_tiles: Annotated[int, range(1, MOST_TILES)] = 1  # 1 if no image is cut
    tolerance: float = 1.0  # an image that is not cut has at most so many times ``most_pixels``
    kernel: Annotated[int, range(1 << 6)] = 0  # patches per side that convolutions of the tower see, 0 without one
    longest_edge: Annotated[int, range(1 << 13)] = 0  # pixels; then only larger images are made smaller (Pixtral), or 0
    # Small images grow to ``most_pixels`` too; patches lie as SigLIP 2's, and their rows and columns are fed (Gemma 4).
    filled: bool = False


@dataclass(frozen=True)
class Vision:
    """A tower that makes rows of embeddings from images; the rows replace a prompt's image tokens."""

    graph: ClassVar[str] = TOWER  # name of its graph
    kind: ClassVar[str] = "image"  # of the parts of messages that it reads

    tile: Pixels  # per side, whole squares of patches; each square becomes a row
    patch: Pixels  # per side
    tokens: Positions  # rows that each tile becomes
    token_id: Annotated[int, range(1 << 24)]  # of the token whose embedding a row replaces
    tiling: Tiling | None  # how images become tiles; either this or ``patching``
    markers: Markers
    layers: Annotated[int, range(1 << 12)]  # of the tower; 0 if rows are made of pixels by linears alone
    linears: tuple[Linear, ...]  # in the order of computation
    patching: Patching | None = None  # how images become patches of any grid
    axes: Annotated[int, range(0, 4, 3)] = 0  # of the decoder's positions: 3 if images have rows and columns, else 0
    deep: Annotated[int, range(1 << 8)] = 0  # first layers of the decoder that add a further part of each row
    both_ways: bool = False  # in layers of the decoder the rows of an image see one another, later ones too
    norms: Annotated[int, range(1 << 16)] = 0  # of the tower

    @property
    def square(self) -> int:
        """Pixels per side of the square that becomes a row."""
        return self.tile // isqrt(self.tokens)

    @property
    def steps(self) -> Tiling | Patching:
        """Steps from images to what the tower sees."""
        steps = self.tiling or self.patching
        assert steps is not None
        return steps

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of squares in so many pixels."""
        return height // self.square, width // self.square

    @property
    def most_rows(self) -> int:
        """Most rows that the tower makes at a time."""
        return max(self.tokens, self.patching.most_pixels // self.square**2) if self.patching else self.tokens

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest image."""
        return self.tokens * (self.most_tiles - 1) + self.most_rows

    @property
    def attentions(self) -> int:
        """Number of attentions in the tower."""
        return sum(linear.name.endswith(".self_attn.o_proj") for linear in self.linears)

    @property
    def least_chunk(self) -> int:
        """Tokens that a call must have room for: if rows see later rows an image and a token on either side, else 1."""
        return self.most_tokens + 2 if self.both_ways else 1

    @property
    def most_tiles(self) -> int:
        """Tiles of the largest image, the view of the whole included."""
        if self.tiling is None:
            most = self.patching.most_tiles if self.patching else 1
            return most + (most > 1)
        side = -(-self.tiling.longest_edge // self.tile)
        return side * side + 1 if self.tiling.cut and side > 1 else 1

    def is_sound(self, vocab_size: int) -> bool:
        return (
            self.tokens <= (self.tile // self.patch) ** 2
            and self.square**2 * self.tokens == self.tile**2
            and self.square % self.patch == 0
            and self.token_id < vocab_size
            and (self.tiling is None) != (self.patching is None)
            and self.steps.rescale > 0
            and min(self.steps.std) > 0
            and self.most_tiles <= MOST_TILES
            and (self.patching is None or self.patching.least_pixels <= self.patching.most_pixels)
        )
