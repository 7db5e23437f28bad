"""Sizes of a decoder, and its inventory."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from llmc.bundle.model.attention import Attention
from llmc.bundle.model.cache import Cache
from llmc.bundle.model.diffusion import Diffusion
from llmc.bundle.model.draft_head import HEAD_INPUT, DraftHead
from llmc.bundle.model.encoder import DENSE, SCORE, Encoder
from llmc.bundle.model.experts import LATENT_INPUT, LATENT_OUTPUT, Experts, Mlp
from llmc.bundle.model.linear import Codes, Linear
from llmc.bundle.model.names import EMBEDDING, HEAD, PER_LAYER, PER_LAYER_PROJECTION
from llmc.bundle.model.norm import Norm
from llmc.bundle.model.ranges import Count, Positions, Vocabulary, Width
from llmc.bundle.model.recurrent import Recurrent
from llmc.bundle.model.vision import Vision


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
