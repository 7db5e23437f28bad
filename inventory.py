"""The inventory of a decoder: its linears, norms, attentions, MLPs and caches, each listed once.

Export derives the lists from a checkpoint's layers and writes them into ``export.json``; a build carries them into
``llmc.json``. Counts of passes, memory estimates, packing, calibration and the runtime's cache read these lists and
know no model family. Names are module paths of the checkpoint, ``model.layers.0.self_attn.q_proj``.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt, prod
from typing import Annotated, Any, Literal

# Modules that every decoder has, by llmc's own names.
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
# Of those that add a learned vector to each position's embedding.
POSITIONS = "model.embed_positions"
# Of those that give every layer an input of its own, from a row of the token.
PER_LAYER = "model.embed_tokens_per_layer"
PER_LAYER_PROJECTION = "model.per_layer_model_projection"
# What recipes call :attr:`Geometry.sensitive`.
SENSITIVE = "sensitive"
# Of the tower of a model that sees, whose modules are ``vision.patch_embedding``, ``vision.layers.0...``.
TOWER = "vision"
# The linear of a draft head that its rows go through.
HEAD_INPUT = "model.fc"
# Of one whose hidden states are not as wide as the model's, that which makes them so.
HEAD_OUTPUT = "model.post_projection"
LATENT_INPUT, LATENT_OUTPUT = "fc1_latent_proj", "fc2_latent_proj"
# Of one that first chooses clusters of tokens.
CENTROIDS = "model.centroids"
# What an encoder has in the place of the head: layers of an embedding's, ``dense.0`` and on; ``score.0``, a row.
DENSE, SCORE = "dense", "score"

# A row of the cache can always go back so far: over drafts that were rejected, and to the border of a block of the
# prefix cache. What windows have passed is let go of once so many positions came together.
BACK, LET_GO_STEP = 64, 256
# Of one image: published models cut it into 4 x 4.
MOST_TILES = 257
# Bytes of a state's value.
STATE_BYTES = 4
# Masks of a diffusion model's block: each of them has logits.
MOST_MASKS = 128

CacheKind = Literal["kv", "state"]
Rule = Literal["conv", "delta", "mamba2"]
NormKind = Literal["rms", "layer"]
Result = Literal["embeddings", "scores"]
Pooling = Literal["last", "mean"]
ExpertActivation = Literal["silu", "gelu_tanh"]
Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]

# Ranges of what comes from a file, far beyond the largest decoders there are, and small enough that a product of a few
# of them is a number of bytes that somebody can be told.
Index = Annotated[int, range(1 << 12)]
Count = Annotated[int, range(1, 1 << 12)]  # layers, heads
Width = Annotated[int, range(1, 1 << 20)]
Vocabulary = Annotated[int, range(1, 1 << 24)]
Positions = Annotated[int, range(1, 1 << 28)]
Pixels = Annotated[int, range(1, 4097)]
Channels = Annotated[tuple[float, ...], range(3, 4)]  # a number for each of red, green and blue
Lines = Annotated[tuple[str, ...], range(1, 17)]  # of a text, which newlines join


@dataclass(frozen=True)
class Codes:
    """Integers that a checkpoint stores a weight as.

    Attributes:
        bits: of each; 4 or 8 of linears and experts, of tables the fewest that hold every code.
        block: inputs that share a scale.
        zero_points: whether each block has one.
        offsets: whether each block has a float that is added to what its integers stand for.
        kind: ``mxfp4`` are floats of 4 bits (E2M1), with powers of two for scales, which experts alone have.
        half: whether scales are numbers of float16; told of tables alone.
    """

    bits: Annotated[int, range(1, 9)]
    block: Width
    zero_points: bool
    offsets: bool = False
    kind: Literal["integer", "mxfp4"] = "integer"
    half: bool = False


@dataclass(frozen=True)
class Linear:
    """A product with a weight [outputs, inputs].

    Attributes:
        name: module path.
        outputs, inputs: shape of the weight.
        bias: whether a bias [outputs] is added.
        reads: the module whose output it multiplies, or where a residual stream as it stands: ``model.layers.{i}`` for
            what goes into layer i, ``model.layers.{i}.residual`` for what its MLP adds to, ``.residual_1`` for that
            sum. Linears that read the same read the same tensor.
        producer: the norm or linear whose output channels scale the inputs one by one, so that a factor per input can
            be moved into its weight; empty where there is none.
        layer: index of its layer, None for the head.
        codes: the integers that the checkpoint stores its weight as, None of a float weight.
        exact: whether it stays in floats whatever a recipe says: few weights, on which much depends.
    """

    name: str
    outputs: Vocabulary
    inputs: Width
    bias: bool
    reads: str
    producer: str
    layer: Index | None
    codes: Codes | None = None
    exact: bool = False

    @property
    def size(self) -> int:
        """Number of weights, the bias apart."""
        return self.outputs * self.inputs

    @property
    def is_open(self) -> bool:
        """True if adapters may change it beside a loaded model."""
        return self.layer is not None and not self.exact


@dataclass(frozen=True)
class Norm:
    """A normalisation over runs of ``size`` values.

    Attributes:
        name: module path.
        kind: ``rms`` divides by the root of the mean square, ``layer`` by the standard deviation after subtracting the
            mean.
        size: values that are normalised together, and length of the weight.
        bias: whether a bias [size] is added.
        follows_residual: whether it is the first to read a sum of the residual stream, as it stands.
        layer: index of its layer, None for the one before the head.
    """

    name: str
    kind: NormKind
    size: Width
    bias: bool
    follows_residual: bool
    layer: Index | None


@dataclass(frozen=True)
class Attention:
    """An attention over a cache of its own, or of an encoder over the tokens of the call.

    Attributes:
        name: module path.
        layer: index of its layer.
        heads, kv_heads, head_dim: of queries, of keys and values, and the width of each.
        window: positions that a query sees, itself included; 0 for all.
        rope: index of its rotary embedding, None where positions are not encoded.
        rotary_dim: values of each head that are rotated, 0 without a rope.
        cache: name of its cache, empty in an encoder.
        writes: whether it adds keys and values to it, instead of reading those of the layer that does.
        latent: width of the vector that keys and values are expanded from, 0 where they come from the stream.
        causal: whether a position sees none after it.
        turned_before: whether queries and keys are rotated by nodes of their own, ``{name}.q_rope`` and ``.k_rope``, in
            front of what the attention reads.
        grows_after: positions after which queries become longer, and have rotary tables of their own; 0 for none.
        sinks: whether each head has a learned logit more, whose share of the softmax falls away.
    """

    name: str
    layer: Index
    heads: Count
    kv_heads: Count
    head_dim: Width
    window: Annotated[int, range(1 << 28)]
    rope: Index | None
    rotary_dim: Annotated[int, range(1 << 20)]
    cache: str
    causal: bool = True
    turned_before: bool = False
    grows_after: Annotated[int, range(1 << 28)] = 0
    writes: bool = True
    sinks: bool = False
    latent: Annotated[int, range(1 << 20)] = 0

    @property
    def group_size(self) -> int:
        """Query heads that share a head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def folds(self) -> bool:
        """True for heads in groups without a window or sinks: a step may give them as tokens of one position, and
        tokens that share a head have but one sink."""
        return self.group_size > 1 and not self.window and not self.sinks


@dataclass(frozen=True)
class Recurrent:
    """A mixer that keeps states of one size, however many tokens came before.

    Attributes:
        name: module path.
        layer: index of its layer.
        rule: ``conv`` is a gated short convolution alone; ``delta`` the gated delta rule (arXiv 2412.06464) and
            ``mamba2`` a selective state space (arXiv 2405.21060), both behind such a convolution.
        key_heads, value_heads, key_dim, value_dim: of the recurrence, 0 without one. Neighbouring value heads share a
            key head.
        taps: tokens that the convolution sees, its own included.
        channels: that are convolved.
        caches: names of its states: the convolution's [taps - 1, channels], and the recurrence's [value_heads, key_dim,
            value_dim].
    """

    name: str
    layer: Index
    rule: Rule
    key_heads: Annotated[int, range(1 << 12)]
    value_heads: Annotated[int, range(1 << 12)]
    key_dim: Annotated[int, range(1 << 12)]
    value_dim: Annotated[int, range(1 << 12)]
    taps: Annotated[int, range(2, 1 << 8)]
    channels: Width
    caches: tuple[str, ...]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each of its states in one row, in the order of ``caches``."""
        conv: tuple[int, ...] = (self.taps - 1, self.channels)
        recurrence: tuple[int, ...] = (self.value_heads, self.key_dim, self.value_dim)
        return (conv,) if self.rule == "conv" else (conv, recurrence)


@dataclass(frozen=True)
class Mlp:
    """A feed-forward part: ``down(act(gate x) * up x)`` if gated, else ``down(act(up x))``, ``inner`` values wide."""

    name: str
    layer: Index
    inner: Width
    activation: str
    gated: bool


@dataclass(frozen=True)
class Experts:
    """A mixture of feed-forward parts, of which a router chooses some for each token.

    Attributes:
        name: module path; ``{name}.router`` is the linear that scores them.
        layer: index of its layer.
        count: of experts.
        chosen: how many of them each token goes through.
        inner: width of each, which computes ``down(activation(gate x) * up x)``.
        width: of a token, or of the vector that the linear ``{name}.fc1_latent_proj`` makes of it.
        bias: whether router and experts add biases, gate and up are clamped and their rows are in turn (gpt-oss).
        codes: what the checkpoint stores their weights as, None of floats.
        activation: of the gate.
    """

    name: str
    layer: Index
    count: Count
    chosen: Count
    inner: Width
    width: Width
    bias: bool = False
    codes: Codes | None = None
    activation: ExpertActivation = "silu"

    @property
    def parts(self) -> tuple[Linear, Linear]:
        """Each expert's two products, as if they were linears of their own: gate and up together, and down."""
        gate_up = Linear(f"{self.name}.gate_up_proj", 2 * self.inner, self.width, self.bias, self.name, "", self.layer)
        return gate_up, Linear(f"{self.name}.down_proj", self.width, self.inner, self.bias, self.name, "", self.layer)

    @property
    def size(self) -> int:
        """Number of weights, the router's apart."""
        return self.count * sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Cache:
    """Memory that a layer keeps of the tokens before.

    Attributes:
        name: its part of the tensors' names, ``past_key_values.{name}.key``.
        kind: ``kv`` holds a key and a value for each position, ``state`` holds one state whatever the length.
        shape: of one position, [kv_heads, head_dim] for ``kv``; of the state of one row for ``state``.
        window: positions that are ever read, 0 for all.
        lent: whether it is another model's, which a draft head reads and does not write.
    """

    name: str
    kind: CacheKind
    shape: Annotated[tuple[Width, ...], range(1, 5)]
    window: Annotated[int, range(1 << 28)]
    lent: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs that it comes in."""
        if self.kind == "kv":
            return f"past_key_values.{self.name}.key", f"past_key_values.{self.name}.value"
        return (f"past_state.{self.name}",)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs that it goes out in, as :attr:`inputs`; none of one that is lent."""
        if self.lent:
            return ()
        if self.kind == "kv":
            return f"present.{self.name}.key", f"present.{self.name}.value"
        return (f"present_state.{self.name}",)

    def bytes(self, positions: int, bytes_per_value: int) -> int:
        """Bytes of one row with room for ``positions``; a state is float32 whatever the type of keys and values. What
        is lent is the other model's."""
        if self.lent:
            return 0
        if self.kind == "state":
            return STATE_BYTES * prod(self.shape)
        return 2 * positions * prod(self.shape) * bytes_per_value

    def shape_of(self, rows: int, positions: int) -> tuple[int, ...]:
        """Shape of each of its tensors."""
        if self.kind == "state":
            return (rows, *self.shape)
        heads, width = self.shape
        return (rows, heads, positions, width)

    def count_held(self, chunk: int) -> int:
        """Positions that a row holds at most where calls feed up to ``chunk`` tokens, 0 for all."""
        return self.window + BACK + LET_GO_STEP + chunk if self.window else 0


@dataclass(frozen=True)
class Encoder:
    """An end that makes one result of a text, in one pass and without a cache.

    Attributes:
        result: ``embeddings``, one vector for each text, or ``scores``, one number for each query with a document.
        pooling: which of the last norm's outputs count: the last token's, or the mean of all.
        width: values of a result, 1 for scores.
        normalized: whether embeddings have length one.
        template: whether the chat template puts query and document together; else the tokenizer does, as a pair.
        padding: the token that counts for nothing at the end of a text, None where every token does.
    """

    result: Result
    pooling: Pooling
    width: Width
    normalized: bool
    template: bool
    padding: Annotated[int, range(1 << 24)] | None = None


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


@dataclass(frozen=True)
class Diffusion:
    """A model that puts tokens into the places of masks, several at a time, each seeing all others.

    Attributes:
        mask_token_id: of what stands where a token is still to come.
        shift: how many positions before a token its logits are.
    """

    mask_token_id: Annotated[int, range(1 << 24)]
    shift: Annotated[int, range(2)]


@dataclass(frozen=True)
class DraftHead:
    """A head that guesses another model's next tokens from its hidden states.

    Attributes:
        borders: of the hidden states that it reads of each token: those after so many layers.
        width: of each of them.
        own_width: of its own hidden states, and of the embedding.
    """

    borders: Annotated[tuple[Annotated[int, range(1, 1 << 12)], ...], range(1, 17)]
    width: Width
    own_width: Width


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder, and its inventory.

    Attributes:
        model_type: the family.
        layers: number of layers.
        hidden_size: width of the values between layers.
        vocab_size, max_positions: tokens that are known, and positions that it was made for.
        tied_head: whether the head multiplies with the embedding's table.
        learned_positions: whether a row of a table [max_positions, hidden_size] is added to each embedding.
        linears: in the order of the computation, the head last.
        norms, attentions, mlps, caches, recurrents, mixtures: in the order of the layers.
        encoder: its end where it embeds or ranks; None where it has a head and generates.
        per_layer: values that each layer gets of a table [vocab_size, layers * per_layer], 0 without one.
        layer_scalars: whether each layer ends with a factor of its own.
        vision: of a model that sees: the decoder takes rows of embeddings in the places of tokens' own.
        diffusion: of a diffusion language model, whose graph asks how many positions of a row its tokens see.
        long_after: tokens of a text beyond which its ropes have other factors (longrope), 0 where they never change;
            the graph asks for the length of each row's text.
        head: of a draft head: the decoder takes a row for each token, another model's hidden states and its own.
        table_codes, per_layer_codes: the integers that the checkpoint stores the embedding's table and that of inputs
            for each layer as, None where they are floats.
    """

    model_type: str
    layers: Count
    hidden_size: Width
    vocab_size: Vocabulary
    max_positions: Positions
    tied_head: bool
    learned_positions: bool
    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    attentions: tuple[Attention, ...]
    mlps: tuple[Mlp, ...]
    caches: tuple[Cache, ...]
    encoder: Encoder | None = None
    recurrents: tuple[Recurrent, ...] = ()
    mixtures: tuple[Experts, ...] = ()
    per_layer: Annotated[int, range(1 << 16)] = 0
    layer_scalars: bool = False
    vision: Vision | None = None
    diffusion: Diffusion | None = None
    head: DraftHead | None = None
    long_after: Annotated[int, range(1 << 25)] = 0
    table_codes: Codes | None = None
    per_layer_codes: Codes | None = None

    @property
    def tables(self) -> tuple[Linear, ...]:
        """The embedding's table and, where each layer has an input of its own, that of these, as if they were linears:
        a row for each token."""
        width = self.head.own_width if self.head else self.hidden_size
        listed = [(EMBEDDING, width, self.table_codes), (PER_LAYER, self.layers * self.per_layer, self.per_layer_codes)]
        rows = self.vocab_size
        return tuple(Linear(name, rows, width, False, name, "", None, codes) for name, width, codes in listed if width)

    @property
    def row_width(self) -> int:
        """Values of a row of an image: an embedding, and what is added behind layers; or of a draft head's."""
        if self.head is not None:
            return len(self.head.borders) * self.head.width + self.head.own_width
        return self.hidden_size * (1 + (self.vision.deep if self.vision else 0))

    @cached_property
    def linear(self) -> dict[str, Linear]:
        return {linear.name: linear for linear in self.linears}

    @cached_property
    def attention(self) -> dict[str, Attention]:
        return {attention.name: attention for attention in self.attentions}

    @property
    def coded(self) -> "tuple[Linear | Experts, ...]":
        """The linears and experts whose weights the checkpoint stores as codes."""
        parts: tuple[Linear | Experts, ...] = (*self.linears, *self.mixtures)
        return tuple(part for part in parts if part.codes is not None)

    @property
    def sensitive(self) -> tuple[str, ...]:
        """Names of the linears that lose most in 4 bits: values and the MLP's last product, in the first and last
        eighth of the layers and every third one between. Source: llama.cpp's Q4_K_M."""
        eighth, last = self.layers // 8, 7 * self.layers // 8
        chosen = {i for i in range(self.layers) if i < eighth or i >= last or (i - eighth) % 3 == 2}
        ends = (".v_proj", ".down_proj")
        return tuple(linear.name for linear in self.linears if linear.layer in chosen and linear.name.endswith(ends))

    @property
    def readers(self) -> list[tuple[Linear, ...]]:
        """The linears, those together that read the same, in the order of the computation."""
        found: dict[str, tuple[Linear, ...]] = {}
        for linear in self.linears:
            found[linear.reads] = (*found.get(linear.reads, ()), linear)
        return list(found.values())

    @cached_property
    def writers(self) -> frozenset[str]:
        """Names of the linears whose outputs are added to the residual stream."""
        ends = ((self.attentions, "o_proj"), (self.recurrents, "out_proj"), (self.mlps, "down_proj"))
        return frozenset(f"{item.name}.{end}" for items, end in ends for item in items)

    @cached_property
    def read_norms(self) -> frozenset[str]:
        """Names of the norms that linears read."""
        return frozenset({norm.name for norm in self.norms} & {linear.producer for linear in self.linears})

    @property
    def cpu_only(self) -> str:
        """Parts of the model that are lowered for CPUs alone, in words; empty if every target takes the model."""
        parts = {
            "recurrent layers": self.recurrents,
            "mixtures of experts": self.mixtures,
            "attention with sinks": any(item.sinks for item in self.attentions),
            "layers that read the caches of others": self.shares,
            "scaled layers": self.layer_scalars,
            "a tower for images": self.vision,
            "attention to later tokens": self.diffusion,
            "a draft head": self.head,
        }
        return " and ".join(words for words, found in parts.items() if found)

    @property
    def rotates(self) -> bool:
        """True if an orthogonal matrix can be folded into the weights around the residual stream.

        It is read by norms by the root mean square alone then, and all that a layer adds to it comes from a linear. Of
        integers of 8 bits with a scale for each row, which checkpoints have for W8A8, nothing would be left.
        """
        inner = {f"{item.name}.{part}_norm" for item in self.attentions for part in "qk"}
        inner |= {f"{item.name}.norm" for item in self.recurrents}
        return (
            self.encoder is None
            and self.head is None
            and not any(
                linear.codes and (linear.codes.bits, linear.codes.block) == (8, linear.inputs)
                for linear in self.linears
            )
            and all(norm.kind == "rms" and norm.name in self.read_norms | inner for norm in self.norms)
            and all(linear.producer or linear.name in self.writers for linear in self.linears)
        )

    @property
    def writing(self) -> tuple[Attention, ...]:
        """The attentions that add to a cache."""
        return tuple(attention for attention in self.attentions if attention.writes)

    def caches_of(self, layer: int) -> list[Cache]:
        """The caches that a layer writes."""
        names = {attention.cache for attention in self.writing if attention.layer == layer}
        names |= {name for item in self.recurrents if item.layer == layer for name in item.caches}
        return [cache for cache in self.caches if cache.name in names]

    def of_layers(self, layers: range) -> "Geometry":
        """Only what consecutive layers hold, and behind the last one the norm and the head."""
        held = {*layers, *([None] if layers.stop == self.layers else [])}
        kinds = ("linears", "norms", "attentions", "mlps", "recurrents", "mixtures")
        parts: dict[str, Any] = {kind: tuple(it for it in getattr(self, kind) if it.layer in held) for kind in kinds}
        return replace(self, caches=tuple(cache for layer in layers for cache in self.caches_of(layer)), **parts)

    @property
    def shares(self) -> bool:
        """True if layers read caches of others: the last layers, which compute only rows whose logits are wanted."""
        return len(self.writing) < len(self.attentions)

    def source_of(self, layer: int) -> list[Cache]:
        """The cache of another layer that a layer reads."""
        names = {item.cache for item in self.attentions if item.layer == layer and not item.writes}
        return [cache for cache in self.caches if cache.name in names]

    @property
    def borrows(self) -> bool:
        """True of a draft head whose layers read the caches of its model."""
        return any(cache.lent for cache in self.caches)

    @property
    def has_states(self) -> bool:
        """True if some cache is a state: the graph then asks how many of each row's new tokens count."""
        return any(cache.kind == "state" for cache in self.caches)

    @property
    def silus(self) -> int:
        """The number of activations that are SiLU."""
        mixers = sum({"conv": 0, "delta": 2, "mamba2": 2}[item.rule] for item in self.recurrents)
        return mixers + sum(mlp.activation == "silu" for mlp in self.mlps)

    @property
    def most_heads(self) -> int:
        return max((attention.heads for attention in self.attentions), default=0)

    @property
    def widest(self) -> int:
        """The largest inner width of an MLP, or of all experts of a token; the hidden size where no layer has one."""
        spread = (item.chosen * max(item.inner, item.width) for item in self.mixtures)
        return max((*(mlp.inner for mlp in self.mlps), *spread), default=self.hidden_size)

    def cache_bytes(self, positions: int, batch: int = 1, bytes_per_value: int = 4) -> int:
        """Bytes of all caches: ``batch`` rows with room for ``positions`` each."""
        return batch * sum(cache.bytes(positions, bytes_per_value) for cache in self.caches)

    @property
    def is_sound(self) -> bool:
        """True if names and shapes fit together, as in everything that export writes; sizes are in their ranges."""
        parts: list[Linear | Norm | Attention | Recurrent | Mlp | Experts] = [*self.linears, *self.norms]
        parts += [*self.attentions, *self.recurrents, *self.mlps, *self.mixtures]
        names, caches = {part.name for part in parts}, {cache.name: cache for cache in self.caches}
        streams = {f"model.layers.{i}{end}" for i in range(self.layers) for end in ("", ".residual", ".residual_1")}
        streams |= {f"{HEAD_INPUT}.rows"} if self.head else set()
        return (
            all(part.layer is None or 0 <= part.layer < self.layers for part in parts)
            and len(names) == len(parts)
            and self._has_sound_end
            and all(linear.reads in names | streams for linear in self.linears)
            and all(not linear.producer or linear.producer in names for linear in self.linears)
            and len(caches) == len(self.caches)
            and all(cache.kind == "state" or len(cache.shape) == 2 for cache in self.caches)
            and all(item.heads % item.kv_heads == 0 for item in self.attentions)
            and self.borrows == (self.head is not None and self.shares)
            and not (self.borrows and (self.writing or self.recurrents))
            and all((item.rope is None) == (item.rotary_dim == 0) for item in self.attentions)
            and all(item.rotary_dim % 2 == 0 and item.rotary_dim <= item.head_dim for item in self.attentions)
            and all(
                item.cache in caches and caches[item.cache].shape == (item.kv_heads, item.head_dim)
                for item in self.attentions
                if self.encoder is None
            )
            and all(
                tuple(caches[name].shape for name in item.caches if name in caches) == item.state_shapes
                for item in self.recurrents
            )
            and all(self._is_routed(item) for item in self.mixtures)
            and (self.vision is None or self.vision.is_sound(self.vocab_size))
            and (self.vision is None or self.vision.deep <= self.layers)
            and (self.diffusion is None or self.diffusion.mask_token_id < self.vocab_size)
        )

    def _is_routed(self, item: Experts) -> bool:
        router, down, up = (self.linear.get(f"{item.name}.{name}") for name in ("router", LATENT_INPUT, LATENT_OUTPUT))
        width = item.width if down is None else down.inputs
        return (
            router is not None
            and (router.outputs, router.inputs, router.exact) == (item.count, width, True)
            and (down and down.outputs) == (up and up.inputs) == (down and item.width)
            and (up is None or up.outputs == width)
        )

    @property
    def _has_sound_end(self) -> bool:
        end = [linear for linear in self.linears if linear.layer is None and linear.name != PER_LAYER_PROJECTION]
        if self.encoder is None:
            return [linear.name for linear in end] == [HEAD]
        of_embeddings = self.encoder.result == "embeddings"
        width = end[-1].outputs if end else self.hidden_size
        kind = DENSE if of_embeddings else SCORE
        names = [f"{kind}.{i}" for i in range(len(end))]
        return (
            [linear.name for linear in end] == names
            and self.encoder.width == width
            and (of_embeddings or (width == 1 and len(end) in (1, 2)))
            and not self.caches
        )
