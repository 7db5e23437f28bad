"""The shape of a decoder: its layers, and the inventory of linears, norms, attentions and caches that they contain."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from llmc.bundle.model.audio import Audio
from llmc.bundle.model.cache import Cache
from llmc.bundle.model.diffusion import Diffusion
from llmc.bundle.model.draft_head import DraftHead
from llmc.bundle.model.encoder import Encoder
from llmc.bundle.model.geometry import Geometry
from llmc.bundle.model.linear import Linear
from llmc.bundle.model.names import (
    DISTANCES,
    EMBEDDED_NORM,
    EMBEDDING,
    HEAD,
    PER_LAYER,
    PER_LAYER_PROJECTION,
    POSITIONS,
    TYPES,
)
from llmc.bundle.model.norm import Norm
from llmc.bundle.model.vision import Vision
from llmc.export.audio.shapes import AudioTowerConfig
from llmc.export.heads.shapes import EMBEDDING_NORM, HeadConfig
from llmc.export.parts.attention import AttentionConfig
from llmc.export.parts.encoder import EncoderConfig
from llmc.export.parts.experts import ExpertsConfig
from llmc.export.parts.mlp import MlpConfig
from llmc.export.parts.norm import PRE, NormConfig, Placement
from llmc.export.parts.recurrent import RecurrentConfig
from llmc.export.parts.rope import Rope
from llmc.export.parts.site import Part, Shapes, Site, place, shapes_of_linears
from llmc.export.vision.axial import AxialTowerConfig
from llmc.export.vision.shapes import PatchTowerConfig, TowerConfig

TowerShape = TowerConfig | PatchTowerConfig | AxialTowerConfig | AudioTowerConfig
MIXERS = "self_attn", "recurrent"
FINAL_NORM, PER_LAYER_NORM = "model.norm", "model.per_layer_projection_norm"


@dataclass(frozen=True)
class Layer:
    """A residual block: an attention, a recurrent mixer or the sum of both, then an MLP, experts or the sum of both;
    any of them may be missing."""

    attention: AttentionConfig | None
    mlp: MlpConfig | None
    placement: Placement = PRE
    recurrent: RecurrentConfig | None = None
    experts: ExpertsConfig | None = None
    attention_scale: float = 1.0  # factor of what the attention adds
    recurrent_scale: float = 1.0  # factor of what the recurrent mixer adds

    @property
    def parts(self) -> dict[str, Part]:
        """Its parts by module name, in the order of computation."""
        named = {"self_attn": self.attention, "recurrent": self.recurrent, "experts": self.experts, "mlp": self.mlp}
        return {name: part for name, part in named.items() if part is not None}


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape and switches."""

    model_type: str  # the family
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm: NormConfig
    tied_head: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    embedding_scale: float = 1.0  # factor of embeddings
    embedding_normed: bool = False  # embeddings are normalized, without a weight
    residual_scale: float = 1.0  # factor of what an attention or an MLP adds to the residual stream
    logit_scale: float = 1.0  # factor of logits
    logit_softcap: float = 0.0  # c in c * tanh(logits / c), 0 for none
    head_bias: bool = False
    learned_positions: bool = False
    first_position: int = 0  # row of the stored table for a text's first token
    stored_types: int = 0  # rows of the table of token types in the checkpoint
    # Attentions add a bias, of a stored table [32, heads] for ranges of distances, as T5 has them.
    distance_ranges: bool = False
    classifier: EncoderConfig | None = (
        None  # end of the family's ForSequenceClassification; None: the last token's score
    )
    # Weights of a layer that are stored as the rows of one tensor: its module, and theirs in order.
    packed: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # Such rows are stored in so many groups, one for each head: its queries, keys and values, and so on; 0 for none.
    packed_groups: int = 0
    transposed: bool = False  # the linears of layers are stored as [inputs, outputs]
    # Parts of tensor names in the checkpoint, whole words between dots, and llmc's names for them.
    renamed: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()  # parts of the names of tensors that another part of the model has
    encoder: EncoderConfig | None = None
    head: HeadConfig | None = None
    per_layer: int = 0  # this and the next as in :class:`llmc.bundle.model.geometry.Geometry`
    layer_scalars: bool = False
    per_layer_filler: int = 0  # token whose row of the table of layers' own inputs is read where a row of an image is
    tower: TowerShape | None = None  # makes ``vision`` or ``audio``
    vision: Vision | None = None
    audio: Audio | None = None
    pair_axes: tuple[int, ...] = ()  # the axis of positions by which each pair of a head turns; empty: plain positions
    diffusion: Diffusion | None = None  # then no attention is causal

    @property
    def has_processor(self) -> bool:
        """True if the checkpoint comes with the settings of a processor, and with a chat template of its own."""
        return self.tower is not None

    @property
    def first_shared(self) -> int | None:
        """The first of the last layers that read caches of others; from it on only rows with logits are computed."""
        sources = [layer.attention.source if layer.attention else None for layer in self.layers]
        return next((index for index, source in enumerate(sources) if source is not None), None)

    def change_attentions(self, change: Callable[[int, AttentionConfig], AttentionConfig]) -> "DecoderConfig":
        """The decoder with ``change(layer, attention)`` in the place of every attention."""
        changed = (
            replace(layer, attention=change(index, layer.attention)) if layer.attention else layer
            for index, layer in enumerate(self.layers)
        )
        return replace(self, layers=tuple(changed))

    @property
    def own_width(self) -> int:
        """Width of an embedding, and of a draft head's own hidden states."""
        return self.head.own_width if self.head else self.hidden_size

    @property
    def head_rows(self) -> int:
        """Logits that the head makes."""
        return (self.head and self.head.rows) or self.vocab_size

    @property
    def attention_inputs(self) -> int:
        """Width of what attentions read."""
        return self.hidden_size * (2 if self.head and self.head.beside else 1)

    @cached_property
    def geometry(self) -> Geometry:
        """Its sizes and inventory."""
        layers = list(enumerate(self.layers))
        return place(
            Geometry,
            self,
            layers=len(self.layers),
            linears=tuple(self._list_linears()),
            norms=tuple(self._list_norms()),
            attentions=tuple(it.attention.entry(self.site(i, "self_attn")) for i, it in layers if it.attention),
            recurrents=tuple(it.recurrent.entry(self.site(i, "recurrent")) for i, it in layers if it.recurrent),
            mixtures=tuple(it.experts.entry(self.site(i, "experts")) for i, it in layers if it.experts),
            mlps=tuple(it.mlp.entry(self.site(i, "mlp")) for i, it in layers if it.mlp),
            caches=tuple(self._list_caches()),
            encoder=place(Encoder, self.encoder) if self.encoder else None,
            long_after=max((rope.original_max_positions for rope in self.ropes if rope.long_factors), default=0),
            head=place(DraftHead, self.head) if self.head else None,
            table_codes=None,
            per_layer_codes=None,
        )

    def site(self, index: int, name: str) -> Site:
        """The place of a layer's part in the decoder, by the part's module name."""
        layer, path, inputs = self.layers[index], f"model.layers.{index}", self.hidden_size
        norm, stream, scaled = layer.placement.before_attention, path, True
        if name in MIXERS:
            inputs = self.attention_inputs if name == "self_attn" else inputs
            scaled = inputs == self.hidden_size  # else the norm makes a part of the inputs
        else:
            norm, stream = layer.placement.before_mlp, path if layer.placement.parallel else f"{path}.residual"
            # A factor cannot be moved into a norm that experts read too.
            scaled = layer.experts is None or layer.placement.before_experts != ""
        reads = f"{path}.{norm}" if norm else stream
        scaled = scaled and norm not in layer.placement.carried
        producer = reads if norm and scaled else ""
        cached = self.encoder is None
        return Site(f"{path}.{name}", index, self.hidden_size, inputs, reads, producer, self.ropes, cached)

    def _list_linears(self) -> Iterator[Linear]:
        hidden, last = self.hidden_size, len(self.layers) - 1
        starts, ends = self.head.list_linears(hidden, last, FINAL_NORM) if self.head else ([], [])
        yield from starts
        if self.per_layer:
            width = len(self.layers) * self.per_layer
            yield Linear(PER_LAYER_PROJECTION, width, hidden, False, "model.layers.0", "", None, exact=True)
        for index, layer in enumerate(self.layers):
            for name, part in layer.parts.items():
                yield from part.list_linears(self.site(index, name))
            if self.per_layer:
                path = f"model.layers.{index}"
                gate = f"{path}.per_layer_input_gate"
                yield Linear(gate, self.per_layer, hidden, False, f"{path}.residual_1", "", index)
                yield Linear(f"{path}.per_layer_projection", hidden, self.per_layer, False, gate, "", index)
        yield from ends
        if self.encoder is not None:
            yield from self.encoder.list_linears(hidden, FINAL_NORM)
        else:
            yield Linear(HEAD, self.head_rows, hidden, self.head_bias, FINAL_NORM, FINAL_NORM, None)

    def _list_norms(self) -> Iterator[Norm]:
        """Norms in the order of computation, the one before the head last."""
        kind, bias = self.norm.kind, self.norm.bias
        if self.embedding_normed:
            yield Norm(EMBEDDED_NORM, kind, self.hidden_size, bias, False, 0)
        if self.per_layer:
            yield Norm(PER_LAYER_NORM, kind, self.per_layer, bias, False, None)
        for name, size in self.head.norms if self.head else ():
            yield Norm(f"model.{name}", kind, size, False, False, 0)
        for index in range(len(self.layers)):
            first = dict[str, tuple[int, bool]]()  # attention and MLP may share a norm
            for name, size, follows in self.list_norms_of(index):
                if name:
                    first.setdefault(name, (size, follows))
            for name, (size, follows) in first.items():
                yield Norm(f"model.layers.{index}.{name}", kind, size, bias, follows, index)
        all_rows = self.encoder is not None and self.encoder.pooling == "mean"  # nothing is gathered before it
        yield Norm(FINAL_NORM, kind, self.hidden_size, bias, all_rows, None)
        for name, size in self.encoder.list_norms() if self.encoder else ():
            yield Norm(name, kind, size, bias, False, None)

    def list_norms_of(self, index: int) -> Iterator[tuple[str, int, bool]]:
        """Names and sizes of a layer's norms, and whether each is the first to read a residual sum."""
        layer, hidden = self.layers[index], self.hidden_size
        where = layer.placement
        yield where.before_attention, hidden, (index > 0 or self.learned_positions) and not self.layer_scalars
        if self.head and self.head.beside:
            yield EMBEDDING_NORM, hidden, False
        own = [[(f"{m}.{n}", size, False) for n, size in it.list_norms(hidden)] for m, it in layer.parts.items()]
        mixers = len(layer.parts.keys() & {*MIXERS})
        yield from chain(*own[:mixers])
        yield where.after_attention, hidden, False
        if own[mixers:]:
            yield where.before_mlp, hidden, not where.parallel
            yield where.before_experts, hidden, False
            yield from chain(*own[mixers:])
            yield from ((name, hidden, False) for name in (where.after_experts, where.after_dense, where.after_mlp))
        if self.per_layer:
            yield "post_per_layer_input_norm", hidden, False

    def _list_caches(self) -> Iterator[Cache]:
        """Caches in the order of the graph's inputs, layer by layer, keys and values first; an encoder has none."""
        if self.head is not None and self.head.lent:
            yield from self.head.lent
        elif self.encoder is None:
            for index, layer in enumerate(self.layers):
                for name, part in layer.parts.items():
                    yield from part.list_caches(self.site(index, name))

    @property
    def parameter_shapes(self) -> Shapes:
        """Name and shape of every tensor of :mod:`llmc.export.decoder` and its tower, computed without torch."""
        geometry = self.geometry
        shapes: Shapes = {f"{EMBEDDING}.weight": (self.vocab_size, self.own_width)}
        if self.learned_positions:
            shapes[f"{POSITIONS}.weight"] = (self.max_positions, self.hidden_size)
        if self.encoder is not None and self.encoder.types:
            shapes[f"{TYPES}.weight"] = (self.encoder.types, self.hidden_size)
        if self.distance_ranges:
            shapes[f"{DISTANCES}.weight"] = (2 * self.max_positions - 1, self.geometry.most_heads)
        shapes |= shapes_of_linears([it for it in geometry.linears if it.name != HEAD or not self.tied_head])
        for norm in geometry.norms:
            shapes |= {f"{norm.name}.{part}": (norm.size,) for part in ("weight", "bias")[: 1 + norm.bias]}
        if self.per_layer:
            shapes[f"{PER_LAYER}.weight"] = (self.vocab_size, len(self.layers) * self.per_layer)
        for index, layer in enumerate(self.layers):
            path = f"model.layers.{index}"
            shapes |= {f"{path}.layer_scalar": (1,)} if self.layer_scalars else {}
            for name, part in layer.parts.items():
                own = part.list_shapes(self.hidden_size)
                shapes |= {f"{path}.{name}.{tensor}": shape for tensor, shape in own.items()}
        for item in geometry.mixtures:
            shapes |= {f"{part.name}.weight": (item.count, part.outputs, part.inputs) for part in item.parts}
            shapes |= {f"{part.name}.bias": (item.count, part.outputs) for part in item.parts if part.bias}
        return shapes if self.tower is None else shapes | self.tower.parameter_shapes

    @property
    def packed_parameters(self) -> dict[str, tuple[str, ...]]:
        """Name of every tensor that holds the rows of several parameters, and theirs in order."""
        biased = {linear.name for linear in self.geometry.linears if linear.bias}
        paths = [f"model.layers.{index}" for index in range(len(self.layers))]
        return {
            f"{path}.{module}.{kind}": tuple(f"{path}.{part}.{kind}" for part in parts)
            for path in paths
            for module, parts in self.packed
            for kind in ("weight", "bias")[: 1 + (f"{path}.{parts[0]}" in biased)]
        }
