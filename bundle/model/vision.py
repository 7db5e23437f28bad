"""Images: how they are cut, and the tower that reads them."""

from dataclasses import dataclass
from math import isqrt
from typing import Annotated, Literal

from llmc.bundle.model.linear import Linear
from llmc.bundle.model.ranges import Count, Positions

# Of the tower of a model that sees, whose modules are ``vision.patch_embedding``, ``vision.layers.0...``.
TOWER = "vision"

# Of one image: published models cut it into 4 x 4.
MOST_TILES = 257

Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]

Pixels = Annotated[int, range(1, 4097)]

Channels = Annotated[tuple[float, ...], range(3, 4)]  # a number for each of red, green and blue

Lines = Annotated[tuple[str, ...], range(1, 17)]  # of a text, which newlines join


@dataclass(frozen=True)
class Markers:
    """Texts around the tokens of an image in a prompt, with which they are one text for the tokenizer. In ``tile``,
    ``{row}`` and ``{column}`` stand for a tile's place, which begins with 1.

    Attributes:
        image: the token's own text.
        before: in front of every image.
        tile: in front of each tile of an image that is cut.
        row_end: behind the last tile of each row.
        whole: behind all tiles, in front of the view of the whole image.
        single: in front of an image that is not cut.
        after: behind every image.
        placeholder: what templates write once for an image, empty where that is the token itself.
    """

    image: str
    tile: Lines
    row_end: Lines
    whole: Lines
    single: Lines
    after: Lines
    placeholder: str = ""
    before: Lines = ("",)


@dataclass(frozen=True)
class Tiling:
    """Steps from pixels to tiles: an RGB image is resized until its longest edge has ``longest_edge`` pixels, then to
    the next multiples of a tile, and cut; where that makes more than one tile, the image resized to one tile follows.

    Attributes:
        longest_edge: pixels, 0 for images that are resized to one tile at once.
        cut: whether images are cut at all; else they are resized to one tile instead.
        filter: by which all this is resized, as Pillow calls it.
        rescale: factor of the values 0 ... 255.
        mean, std: are then subtracted and divided by.
    """

    longest_edge: Annotated[int, range(4097)]
    cut: bool
    filter: Filter
    rescale: float
    mean: Channels
    std: Channels


@dataclass(frozen=True)
class Patching:
    """Steps from pixels to the patches of a tower for grids of any shape: an RGB image is resized to whole squares of
    patches, near its ratio and within bounds of its pixels. Where tiles are cut, a large one is also resized to them,
    and they come before that view of the whole.

    Attributes:
        least_pixels, most_pixels: of the resized image.
        filter, rescale, mean, std: as of :class:`Tiling`.
        frames: times that each patch's pixels are there: the tower is made for videos, too.
        window: squares of each side of the windows within which some layers attend, 0 where none do.
        places: entries of each side of the table of learned positions, which is stretched over an image; 0 for none.
        naflex: whether patches are laid out as SigLIP 2's (LFM2-VL): color by color in each pixel, with positions
            stretched by areas and no others; else as Qwen's.
        least_tiles, most_tiles: that a large image is cut into; both are 1 where none is.
        tolerance: how many times ``most_pixels`` an image may have that is not cut.
    """

    least_pixels: Annotated[int, range(1, 1 << 26)]
    most_pixels: Annotated[int, range(1, 1 << 26)]
    filter: Filter
    rescale: float
    mean: Channels
    std: Channels
    frames: Annotated[int, range(1, 17)]
    window: Annotated[int, range(1 << 12)]
    places: Annotated[int, range(1 << 12)]
    naflex: bool = False
    least_tiles: Annotated[int, range(1, MOST_TILES)] = 1
    most_tiles: Annotated[int, range(1, MOST_TILES)] = 1
    tolerance: float = 1.0


@dataclass(frozen=True)
class Vision:
    """A tower that makes rows of embeddings of images, which stand in the places of a prompt's image tokens.

    Attributes:
        tile: pixels of each side of a tile, of a whole number of squares of patches, each of which becomes a row.
        patch: pixels of each side of a patch.
        tokens: rows that each tile becomes.
        token_id: of the token whose embedding a row replaces.
        tiling, markers: how images become tiles, and what stands around them in a prompt.
        layers: of the tower.
        linears: in the order of the computation.
        patching: how images become patches, in the place of ``tiling``.
        axes: of the decoder's positions: 3 where images have rows and columns in them, 0 where a position is a number.
        deep: layers of the decoder, the first ones, behind which a further part of each row is added.
        both_ways: whether the rows of an image see one another in the decoder, those after them too.
    """

    tile: Pixels
    patch: Pixels
    tokens: Positions
    token_id: Annotated[int, range(1 << 24)]
    tiling: Tiling | None
    markers: Markers
    layers: Count
    linears: tuple[Linear, ...]
    patching: Patching | None = None
    axes: Annotated[int, range(0, 4, 3)] = 0
    deep: Annotated[int, range(1 << 8)] = 0
    both_ways: bool = False

    @property
    def square(self) -> int:
        """Pixels of each side of the square that becomes a row."""
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
        """Rows that the tower makes at a time at most."""
        return max(self.tokens, self.patching.most_pixels // self.square**2) if self.patching else self.tokens

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest image."""
        return self.tokens * (self.most_tiles - 1) + self.most_rows

    @property
    def norms(self) -> int:
        """Norms of the tower: two of each layer, one behind them and those of linears that make rows."""
        connector = any(linear.reads == f"{TOWER}.connector_norm" for linear in self.linears)
        return 2 * self.layers + 1 + self.deep + connector

    @property
    def least_chunk(self) -> int:
        """Tokens of a call that must fit: where rows see those after them, all of an image, and one on either side."""
        return self.tokens + 2 if self.both_ways else 1

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
