"""Sizes of a decoder, and its inventory."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from llmc.bundle.model.attention import Attention
from llmc.bundle.model.audio import Audio
from llmc.bundle.model.cache import Cache
from llmc.bundle.model.diffusion import MOST_MASKS, Diffusion
from llmc.bundle.model.draft_head import HEAD_INPUT, DraftHead
from llmc.bundle.model.encoder import DENSE, SCORE, Encoder
from llmc.bundle.model.experts import Experts, Mlp
from llmc.bundle.model.linear import Codes, Linear
from llmc.bundle.model.names import (
    DISTANCES,
    EMBEDDING,
    HEAD,
    HIDDEN,
    PER_LAYER,
    PER_LAYER_PROJECTION,
    POSITIONS,
    TYPES,
)
from llmc.bundle.model.norm import Norm
from llmc.bundle.model.ranges import Count, Positions, Vocabulary, Width
from llmc.bundle.model.recurrent import Recurrent
from llmc.bundle.model.vision import Vision


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder, and its inventory."""

    model_type: str  # the family
    layers: Count
    hidden_size: Width  # of the residual stream
    vocab_size: Vocabulary
    max_positions: Positions  # that the model was made for
    tied_head: bool  # the head multiplies with the embedding's table
    learned_positions: bool  # a row of a table [max_positions, hidden_size] is added to each embedding
    linears: tuple[Linear, ...]  # in the order of computation, the head last
    norms: tuple[Norm, ...]  # these and the following in the order of the layers
    attentions: tuple[Attention, ...]
    mlps: tuple[Mlp, ...]
    caches: tuple[Cache, ...]
    encoder: Encoder | None = None  # the end of a model that embeds or ranks; None if it has a head and generates
    recurrents: tuple[Recurrent, ...] = ()
    mixtures: tuple[Experts, ...] = ()
    # Values that each layer gets from a table [vocab_size, layers * per_layer], 0 without one.
    per_layer: Annotated[int, range(1 << 16)] = 0
    layer_scalars: bool = False  # each layer ends with a factor of its own
    vision: Vision | None = None  # images become rows of embeddings in the places of tokens
    audio: Audio | None = None  # audio does; no model has both
    diffusion: Diffusion | None = None  # the graph asks how many positions of a row its tokens see
    head: DraftHead | None = None  # the decoder takes a row for each token: another model's hidden states and its own
    # Tokens of a text beyond which ropes have other factors (longrope), 0 for never. The graph then asks for the length
    # of each row's text.
    long_after: Annotated[int, range(1 << 25)] = 0
    # Integers that the checkpoint stores the embedding's table and the per-layer table as, None for floats.
    table_codes: Codes | None = None
    per_layer_codes: Codes | None = None

    @property
    def tables(self) -> tuple[Linear, ...]:
        """The tables of the embedding and of per-layer inputs, listed like linears: a row for each token."""
        width = self.head.own_width if self.head else self.hidden_size
        listed = [(EMBEDDING, width, self.table_codes), (PER_LAYER, self.layers * self.per_layer, self.per_layer_codes)]
        rows = self.vocab_size
        return tuple(Linear(name, rows, width, False, name, "", None, codes) for name, width, codes in listed if width)

    @property
    def row_width(self) -> int:
        """Values of a row that a call brings in the place of a token: an image's embedding and deep parts, or a draft
        head's states; 0 if the graph takes no such rows."""
        if self.head is not None:
            return len(self.head.borders) * self.head.width + self.head.own_width
        return self.hidden_size * (1 + self.tower.deep) if self.tower else 0

    @property
    def tower(self) -> Vision | Audio | None:
        """The part that makes such rows of images or audio."""
        return self.vision or self.audio

    @property
    def coordinates(self) -> int:
        """Numbers in the position of a token: 3 if the graph takes positions with rows and columns, else 0."""
        return self.tower.axes if self.tower else 0

    @property
    def least_chunk(self) -> int:
        """Tokens that a call must have room for."""
        return self.tower.least_chunk if self.tower else 1

    @property
    def every_linear(self) -> tuple[Linear, ...]:
        """The linears of all graphs: a tower's, then the model's own."""
        return (*(self.tower.linears if self.tower else ()), *self.linears)

    @property
    def generates(self) -> bool:
        """True if the model has a head and generates text."""
        return self.encoder is None

    @property
    def role(self) -> str:
        """Name of the model's graph, where one serves all calls."""
        return "decoder" if self.generates else "encoder"

    @property
    def small_tables(self) -> dict[str, tuple[int, int]]:
        """Shapes of the tables that have no row for each token of the vocabulary."""
        hidden, encoder = self.hidden_size, self.encoder
        sizes = {POSITIONS: (self.learned_positions * self.max_positions, hidden)}
        if encoder is not None:
            distances = encoder.biased * (2 * self.max_positions - 1)
            sizes |= {TYPES: (encoder.types, hidden), DISTANCES: (distances, self.most_heads)}
        return {name: shape for name, shape in sizes.items() if shape[0]}

    @property
    def takes_types(self) -> bool:
        """True if the graph takes the type of each token."""
        return self.encoder is not None and self.encoder.types > 0

    @property
    def result_width(self) -> int:
        """Values of a result: logits of a token, a vector, or one score."""
        return self.encoder.width if self.encoder else self.vocab_size

    @property
    def results(self) -> dict[str, tuple[str | int, ...]]:
        """Names and sizes of the graph's outputs, without caches."""
        if self.encoder is not None:
            return {
                self.encoder.result: ("batch", self.encoder.width)
                if self.encoder.result == "embeddings"
                else ("batch",)
            }
        hidden = {HIDDEN: self.head.own_width} if self.head else {}
        return {name: ("batch", "outputs", size) for name, size in ({"logits": self.vocab_size} | hidden).items()}

    @property
    def most_results(self) -> int:
        """Rows of results that a row of a call has at most: one for each mask of a block."""
        return MOST_MASKS if self.diffusion else 1

    @cached_property
    def linear(self) -> dict[str, Linear]:
        return {linear.name: linear for linear in self.linears}

    @cached_property
    def attention(self) -> dict[str, Attention]:
        return {attention.name: attention for attention in self.attentions}

    @property
    def mixers(self) -> "tuple[Attention | Recurrent, ...]":
        """The attentions, then the recurrent mixers."""
        return (*self.attentions, *self.recurrents)

    @property
    def coded(self) -> "tuple[Linear | Experts, ...]":
        """The linears and experts whose weights the checkpoint stores as codes."""
        parts: tuple[Linear | Experts, ...] = (*self.linears, *self.mixtures)
        return tuple(part for part in parts if part.codes is not None)

    @property
    def two_bits(self) -> bool:
        """True if the checkpoint stores some linear as 2-bit codes."""
        return any(linear.codes is not None and linear.codes.bits == 2 for linear in self.linears)

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
        """Groups of linears that read the same tensor, in the order of computation."""
        groups: dict[str, tuple[Linear, ...]] = {}
        for linear in self.linears:
            groups[linear.reads] = (*groups.get(linear.reads, ()), linear)
        return list(groups.values())

    @cached_property
    def writers(self) -> frozenset[str]:
        """Names of the linears whose outputs are added to the residual stream."""
        return frozenset({*(item.writer for item in self.mixers), *(item.writer for item in self.mlps)})

    @cached_property
    def read_norms(self) -> frozenset[str]:
        """Names of the norms that linears read."""
        return frozenset({norm.name for norm in self.norms} & {linear.producer for linear in self.linears})

    @property
    def mixes(self) -> bool:
        """True if 8-bit activations lose little once neighbouring inputs of linears are mixed: those of an encoder
        whose norms are layer norms. Outliers of RMS norms' models are larger."""
        return self.encoder is not None and all(norm.kind == "layer" for norm in self.norms)

    @property
    def rotates(self) -> bool:
        """True if an orthogonal matrix can be folded into the weights around the residual stream.

        Only RMS norms may read the stream, and only linears may add to it. Folding would destroy weights that a
        checkpoint stores as integers that W8A8 multiplies: of 2 or 8 bits, with a scale for each row.
        """
        inner = self.read_norms.union(*(item.inner_norms for item in self.mixers))
        return (
            self.generates
            and self.head is None
            and not any(
                linear.codes and linear.codes.bits != 4 and linear.codes.block == linear.inputs
                for linear in self.linears
            )
            and all(norm.kind == "rms" and norm.name in inner for norm in self.norms)
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
        """The inventory of consecutive layers only; the last norm and the head belong to the last layer."""
        held = {*layers, *([None] if layers.stop == self.layers else [])}
        kinds = ("linears", "norms", "attentions", "mlps", "recurrents", "mixtures")
        parts: dict[str, Any] = {kind: tuple(it for it in getattr(self, kind) if it.layer in held) for kind in kinds}
        return replace(self, caches=tuple(cache for layer in layers for cache in self.caches_of(layer)), **parts)

    @property
    def shares(self) -> bool:
        """True if the last layers read caches of others; they compute only rows whose logits are wanted."""
        return len(self.writing) < len(self.attentions)

    def source_of(self, layer: int) -> list[Cache]:
        """The cache of another layer that a layer reads."""
        names = {item.cache for item in self.attentions if item.layer == layer and not item.writes}
        return [cache for cache in self.caches if cache.name in names]

    @property
    def borrows(self) -> bool:
        """True if a draft head's layers read the caches of its model."""
        return any(cache.lent for cache in self.caches)

    @property
    def has_states(self) -> bool:
        """True if some cache is a state; the graph then asks how many of each row's new tokens count."""
        return any(cache.kind == "state" for cache in self.caches)

    @property
    def silus(self) -> int:
        """The number of activations that are SiLU."""
        return sum(item.silus for item in self.recurrents) + sum(item.silus for item in self.mlps)

    @property
    def scalars(self) -> int:
        """Number of factors of layers and learned scalars of activations."""
        return self.layers * self.layer_scalars + sum(len(item.learned) for item in self.mlps)

    @property
    def most_heads(self) -> int:
        return max((attention.heads for attention in self.attentions), default=0)

    @property
    def widest(self) -> int:
        """The largest inner width of an MLP, or of all experts of a token; the hidden size where no layer has one."""
        inner = *(mlp.inner for mlp in self.mlps), *(item.spread for item in self.mixtures)
        return max(inner, default=self.hidden_size)

    def cache_bytes(self, positions: int, batch: int = 1, bytes_per_value: int = 4) -> int:
        """Bytes of all caches: ``batch`` rows with room for ``positions`` each."""
        return batch * sum(cache.bytes(positions, bytes_per_value) for cache in self.caches)

    @property
    def is_sound(self) -> bool:
        """True if names and shapes fit together, as in every export; the sizes are in their ranges already."""
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
            and all(item.is_sound(caches if self.encoder is None else None) for item in self.attentions)
            and all(item.is_sound(caches) for item in self.recurrents)
            and all(item.is_sound(self.linear) for item in self.mixtures)
            and self.borrows == (self.head is not None and self.shares)
            and not (self.borrows and (self.writing or self.recurrents))
            and (self.tower is None or self.tower.is_sound(self.vocab_size))
            and (self.tower is None or self.tower.deep <= self.layers)
            and (self.vision is None or self.audio is None)
            and (self.diffusion is None or self.diffusion.mask_token_id < self.vocab_size)
        )

    @property
    def _has_sound_end(self) -> bool:
        end = [linear for linear in self.linears if linear.layer is None and linear.name != PER_LAYER_PROJECTION]
        if self.encoder is None:
            return [linear.name for linear in end] == [HEAD]
        scores = [linear for linear in end if linear.name.startswith(f"{SCORE}.")]
        kinds = [(DENSE, len(end) - len(scores)), (SCORE, len(scores))]
        return (
            [linear.name for linear in end] == [f"{kind}.{i}" for kind, count in kinds for i in range(count)]
            and self.encoder.width == (end[-1].outputs if end else self.hidden_size)
            and (
                not scores if self.encoder.result == "embeddings" else self.encoder.width == 1 and len(scores) in (1, 2)
            )
            and not self.caches
        )
