"""The shape of a decoder: its layers, and the inventory of linears, norms, attentions and caches that they contain."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from llmc.bundle.model.attention import Attention
from llmc.bundle.model.cache import Cache
from llmc.bundle.model.diffusion import Diffusion
from llmc.bundle.model.draft_head import CENTROIDS, HEAD_INPUT, HEAD_OUTPUT, DraftHead
from llmc.bundle.model.encoder import DENSE, SCORE, Encoder, Pooling, Result
from llmc.bundle.model.experts import LATENT_INPUT, LATENT_OUTPUT, ExpertActivation, Experts, Mlp
from llmc.bundle.model.geometry import Geometry
from llmc.bundle.model.linear import Linear
from llmc.bundle.model.names import EMBEDDING, HEAD, PER_LAYER, PER_LAYER_PROJECTION, POSITIONS
from llmc.bundle.model.norm import Norm, NormKind
from llmc.bundle.model.recurrent import Recurrent, Rule
from llmc.bundle.model.vision import Vision
from llmc.export.vision import PatchTowerConfig, TowerConfig

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
Score = Literal["softmax", "sigmoid"]
QkNorm = Literal["none", "head", "whole", "head_after_rope"]
# Where silu stands for a step: x * silu(STEEP * x) / STEEP differs from relu(x) ** 2 by less than 4e-8.
STEEP = 4096.0


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding.

    Attributes:
        dim: number of values of a head that are rotated, in pairs.
        theta: base of the frequencies.
        factor: divides all frequencies (linear, proportional), or the low ones (llama3 and yarn, which use the next
            values).
        low_freq_factor, high_freq_factor: turns within the original positions between which llama3 blends.
        original_max_positions: positions that the model was trained with.
        beta_slow, beta_fast: as low_freq_factor and high_freq_factor, of yarn; ``truncate`` widens to whole pairs.
        factors, long_factors: each divides one frequency (longrope), of texts with at most ``original_max_positions``
            tokens and of longer ones; without the latter texts of any length have the same.
        share: pairs of all that turn at all, the first ones (proportional).
        magnitude: of the rotated vectors, 1 where turning leaves their length as it is.
        interleaved: whether a pair is two neighbours, instead of one value of each half.
    """

    dim: int
    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0
    magnitude: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True)
class AttentionConfig:
    """An attention.

    Attributes:
        heads, kv_heads, head_dim: of queries, of keys and values, and the width of each.
        window: positions that a query sees, itself included; 0 for all.
        rope: index of its rope, None where positions are not encoded.
        scale: of the products of queries and keys; None is head_dim ** -0.5.
        softcap: c in c * tanh(products / c), 0 for none.
        query_growth: g in 1 + g * ln(1 + floor(position / growth_period)), which multiplies queries; 0 for none.
        qk_norm: whether queries and keys are normalised, each head or all heads together, before they are rotated or
            after.
        qk_scales: whether each head has weights of its own behind its norm, which then has ones.
        qkv_bias, o_bias: whether the projections add a bias.
        causal: whether a position sees none after it.
        gated: whether the output is multiplied by the sigmoid of a gate, which ``q_proj`` makes too: of each head its
            query, then its gate.
        value_norm: whether the heads of values are normalised too, without a weight.
        keys_are_values: whether values are what ``k_proj`` makes, before its norm and rotation.
        source: the layer whose keys and values it reads, which has the same heads; None if it makes its own.
        lent: whether that is a layer of another model, which has not seen the token: positions before its own are seen.
        sinks: whether each head has a learned logit more, whose share of the softmax falls away.
        latent, value_dim: width of the vector that keys and values of a token are expanded from, and of the values of
            a head; 0 without one.
        query_latent: of the vector that queries are expanded from, 0 where they come from the stream.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    rope: int | None = 0
    scale: float | None = None
    softcap: float = 0.0
    query_growth: float = 0.0
    growth_period: int = 1
    qk_norm: QkNorm = "none"
    qk_scales: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    causal: bool = True
    gated: bool = False
    value_norm: bool = False
    keys_are_values: bool = False
    source: int | None = None
    lent: bool = False
    sinks: bool = False
    latent: int = 0
    value_dim: int = 0
    query_latent: int = 0

    @property
    def turned_before(self) -> bool:
        """True if queries and keys are rotated before their norms, thus outside the attention operator."""
        return self.rope is not None and self.qk_norm == "head_after_rope"

    @property
    def widths(self) -> tuple[int, int]:
        """Width of all query heads together, and of all key heads."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim

    @property
    def parts(self) -> str:
        """The projections that it has: of ``q``, ``k`` and ``v``."""
        return "q" if self.source is not None or self.latent else "qk" if self.keys_are_values else "qkv"


@dataclass(frozen=True)
class RecurrentConfig:
    """A mixer with states; see :class:`llmc.bundle.model.recurrent.Recurrent` for what is not listed here.

    Attributes:
        bias: whether the convolution adds a bias, and of the rule ``conv`` the projections too.
        gate_first: whether the output's gate is applied before its norm, instead of behind it.
        normed: whether what a recurrence makes is normalised.
        scales: multiply what projections make of the gate, values, keys, queries and steps of ``mamba2``.
        least_step: no step of ``mamba2`` is smaller.
    """

    rule: Rule
    channels: int
    taps: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    bias: bool = False
    gate_first: bool = False
    normed: bool = True
    scales: tuple[float, ...] = (1.0,) * 5
    least_step: float = 0.0

    @property
    def inner(self) -> int:
        """Width of what the last projection reads."""
        return self.value_heads * self.value_dim or self.channels

    @property
    def norm_size(self) -> int:
        """Values that are normalised together behind a recurrence: a head's, or of ``mamba2`` those of a group."""
        return self.value_dim if self.rule == "delta" else self.inner // self.key_heads

    @property
    def scaled_apart(self) -> bool:
        """True if each group has weights of its own behind the norm, which then has ones."""
        return self.rule == "mamba2" and self.key_heads > 1 and self.normed


@dataclass(frozen=True)
class MlpConfig:
    """A feed-forward part, ``inner`` values wide. ``gelu_tanh`` approximates ``gelu``, ``relu2`` is relu(x)².

    Attributes:
        weighed: whether what it makes of a token is multiplied by the sigmoid of one value that a linear makes of it.
        gate_scale, scale: multiply what ``gate_proj`` makes, and the result.
    """

    inner: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    weighed: bool = False
    gate_scale: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts; see :class:`llmc.bundle.model.experts.Experts` for what is not listed here.

    Attributes:
        score: what makes an expert's weight of the router's output: ``softmax`` over all experts, or ``sigmoid``.
        corrected: whether a bias of each expert, which its weight does not have, is added where experts are chosen.
        normalized: whether the weights of those chosen are divided by their sum.
        scale: multiplies what the experts add up to.
        limit: bounds gate and up of experts with biases that compute ``(up + 1) * gate * sigmoid(alpha * gate)``, and
            whose gate and up have their rows in turn; 0 for ``silu(gate) * up`` without biases.
        alpha: see ``limit``.
        transposed: whether checkpoints store floats as [experts, inputs, outputs].
        groups, chosen_groups: experts are chosen from so many of all groups of neighbours, those with the best experts.
        best: experts of a group whose scores are added where groups are compared.
        squared: whether checkpoints have experts without a gate, of relu(x) ** 2: their ``up_proj``, times STEEP, is
            here the gate too, and ``scale`` has the factor.
        activation: see :class:`llmc.bundle.model.experts.Experts`.
        latent: width of the vector that experts read and make, from and to the stream by a linear each; 0 without one.
        latent_bias: whether these linears add a bias.
        routed_apart: whether the router reads the residual stream through a norm of its own, and the weights of those
            chosen are multiplied by a factor of each expert, behind all else.
    """

    count: int
    chosen: int
    inner: int
    score: Score = "softmax"
    corrected: bool = False
    normalized: bool = True
    scale: float = 1.0
    limit: float = 0.0
    alpha: float = 1.0
    transposed: bool = False
    groups: int = 1
    chosen_groups: int = 1
    best: int = 1
    squared: bool = False
    activation: ExpertActivation = "silu"
    latent: int = 0
    latent_bias: bool = False
    routed_apart: bool = False

    @property
    def clamped(self) -> bool:
        return self.limit > 0


@dataclass(frozen=True)
class NormConfig:
    """Normalisations.

    Attributes:
        eps: added to the mean square or variance.
        kind, bias: see :class:`llmc.bundle.model.norm.Norm`.
        offset: whether checkpoints store weights minus one; export adds it back.
    """

    eps: float
    kind: NormKind = "rms"
    bias: bool = False
    offset: bool = False


@dataclass(frozen=True)
class Placement:
    """Module names of a layer's norms by their place, empty where there is none.

    ``x + after(part(before(x)))`` is computed with the attention as the part and then with the MLP; if ``parallel``,
    both read the same x, and through one norm where they name the same. Experts beside an MLP read what it reads, or x
    through a norm of their own; both have a norm before they are added, then.
    """

    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str
    parallel: bool = False
    before_experts: str = ""
    after_experts: str = ""
    after_dense: str = ""


PRE = Placement("input_layernorm", "", "post_attention_layernorm", "")
# A draft head's with the embedding beside the stream, which EMBEDDING_NORM norms.
BESIDE, EMBEDDING_NORM = Placement("hidden_norm", "", "post_attention_layernorm", ""), "input_layernorm"
POST = Placement("", "post_attention_layernorm", "", "post_feedforward_layernorm")
SANDWICH = Placement(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
PARALLEL = Placement("input_layernorm", "", "input_layernorm", "", parallel=True)
PARALLEL_TWO_NORMS = Placement("input_layernorm", "", "post_attention_layernorm", "", parallel=True)


@dataclass(frozen=True)
class Layer:
    """A residual block: an attention, a recurrent mixer or the sum of both, then an MLP, experts or the sum of both;
    any of them may be missing. Scales multiply what a mixer adds."""

    attention: AttentionConfig | None
    mlp: MlpConfig | None
    placement: Placement = PRE
    recurrent: RecurrentConfig | None = None
    experts: ExpertsConfig | None = None
    attention_scale: float = 1.0
    recurrent_scale: float = 1.0


@dataclass(frozen=True)
class DenseConfig:
    """A linear after an encoder's pooling, and its activation."""

    outputs: int
    inputs: int
    bias: bool
    activation: Literal["identity", "tanh"]


@dataclass(frozen=True)
class EncoderConfig:
    """The part after an encoder's layers; see :class:`llmc.bundle.model.encoder.Encoder` for what is not listed here.

    Attributes:
        dense: layers between pooling and the result, of embeddings.
        score_rows: two tokens: the score is the first one's logit minus the second one's; empty if the checkpoint has a
            head for the score.
        sigmoid: whether scores go through a sigmoid.
    """

    result: Result
    pooling: Pooling
    normalized: bool = False
    template: bool = False
    dense: tuple[DenseConfig, ...] = ()
    score_rows: tuple[int, ...] = ()
    sigmoid: bool = False
    padding: int | None = None


@dataclass(frozen=True)
class HeadConfig:
    """A draft head's start and end; see :class:`llmc.bundle.model.draft_head.DraftHead` for what is not listed here.

    Attributes:
        beside: whether attention reads the normed embedding beside the stream, as in EAGLE-3, whose stream begins with
            a linear of the other model's hidden states; else it begins with one of both, each normed.
        normed: whether attention adds to what it reads of the stream, behind the norm, and not to the stream.
        input_norm: whether the other model's hidden states are normed, all together.
        tokens: for each token the row of the head that is its logit, one behind the last for none; empty where every
            token has its own.
        rows: of the head.
        lent: the caches of the model that its layers read, of Gemma 4's assistants. A linear then makes its own hidden
            states, as wide as the model's, of what the last norm gives.
        clusters: for each token its cluster; those of the ``best`` clusters alone have logits. Empty where all have.
    """

    borders: tuple[int, ...]
    width: int
    beside: bool
    normed: bool = False
    input_norm: bool = False
    tokens: tuple[int, ...] = ()
    rows: int = 0
    lent: tuple[Cache, ...] = ()
    clusters: tuple[int, ...] = ()
    best: int = 0

    @property
    def norms(self) -> tuple[str, ...]:
        """Of what the stream begins with, in the order of computation."""
        names = "target_norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"
        return () if self.beside else names[:1] if self.lent else names

    @property
    def inputs(self) -> int:
        """Width of what the first linear reads."""
        return (len(self.borders) if self.beside else 2) * self.width


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape and switches.

    Attributes:
        embedding_scale: multiplies embeddings.
        residual_scale: multiplies what an attention or an MLP adds to the residual stream.
        logit_scale: multiplies logits.
        logit_softcap: c in c * tanh(logits / c), 0 for none.
        head_bias: whether the head adds a bias.
        learned_positions: whether the row of a position is added to each embedding.
        packed: weights of a layer that are stored as the rows of one tensor: its module, and theirs in order.
        packed_by_head: whether such a tensor has those rows head by head: query, key and value of the first head, and
            so on.
        transposed: whether the linears of layers are stored as [inputs, outputs].
        renamed: parts of the names of tensors in the checkpoint, whole words between dots, and what they are called
            here.
        left_out: modules whose tensors belong to another part of the model; parts of names, whole words between dots.
        encoder: its end where it embeds or ranks, and has no head.
        head: its start where it is a draft head.
        per_layer, layer_scalars, vision: see :class:`llmc.bundle.model.geometry.Geometry`.
        tower: that makes its ``vision``, where the checkpoint has one that llmc reads.
        axes: of positions: the one by which each pair of a head turns; empty where a position is a number.
        diffusion: see :class:`llmc.bundle.model.diffusion.Diffusion`; no attention is causal, then.
    """

    model_type: str
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm: NormConfig
    tied_head: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    head_bias: bool = False
    learned_positions: bool = False
    packed: tuple[tuple[str, tuple[str, ...]], ...] = ()
    packed_by_head: bool = False
    transposed: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    encoder: EncoderConfig | None = None
    head: HeadConfig | None = None
    per_layer: int = 0
    layer_scalars: bool = False
    tower: TowerConfig | PatchTowerConfig | None = None
    vision: Vision | None = None
    axes: tuple[int, ...] = ()
    diffusion: Diffusion | None = None

    @property
    def first_shared(self) -> int | None:
        """The layer from which on all read caches of others, so that only rows whose logits are wanted count."""
        sources = [layer.attention.source if layer.attention else None for layer in self.layers]
        return next((index for index, source in enumerate(sources) if source is not None), None)

    def change_attentions(self, change: Callable[[int, AttentionConfig], AttentionConfig]) -> "DecoderConfig":
        """The decoder with every attention, of which ``change`` gets the layer's index too, as it returns it."""
        changed = (
            replace(layer, attention=change(index, layer.attention)) if layer.attention else layer
            for index, layer in enumerate(self.layers)
        )
        return replace(self, layers=tuple(changed))

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            model_type=self.model_type,
            layers=len(self.layers),
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            tied_head=self.tied_head,
            learned_positions=self.learned_positions,
            linears=linears(self),
            norms=norms(self),
            attentions=attentions(self),
            mlps=mlps(self),
            caches=caches(self),
            encoder=encoder(self),
            recurrents=recurrents(self),
            mixtures=mixtures(self),
            per_layer=self.per_layer,
            layer_scalars=self.layer_scalars,
            vision=self.vision,
            diffusion=self.diffusion,
            long_after=max((rope.original_max_positions for rope in self.ropes if rope.long_factors), default=0),
            head=DraftHead(self.head.borders, self.head.width, self.own_width) if self.head else None,
        )

    @property
    def own_width(self) -> int:
        """Width of an embedding, and of a draft head's own hidden states."""
        return self.head.width if self.head and self.head.lent else self.hidden_size

    @property
    def head_rows(self) -> int:
        """Logits that the head makes."""
        return (self.head and self.head.rows) or self.vocab_size

    @property
    def attention_inputs(self) -> int:
        """Width of what attentions read."""
        return self.hidden_size * (2 if self.head and self.head.beside else 1)


FINAL_NORM, PER_LAYER_NORM = "model.norm", "model.per_layer_projection_norm"


def encoder(config: DecoderConfig) -> Encoder | None:
    end = config.encoder
    if end is None:
        return None
    width = 1 if end.result == "scores" else end.dense[-1].outputs if end.dense else config.hidden_size
    return Encoder(end.result, end.pooling, width, end.normalized, end.template, end.padding)


def linears(config: DecoderConfig) -> tuple[Linear, ...]:
    found = [linear for index, _ in enumerate(config.layers) for linear in _layer_linears(config, index)]
    if config.per_layer:
        width = len(config.layers) * config.per_layer
        found.insert(0, Linear(PER_LAYER_PROJECTION, width, config.hidden_size, False, _path(0), "", None, exact=True))
    if config.encoder is not None:
        return (*found, *_end_linears(config.encoder, config.hidden_size))
    if config.head is not None:
        inputs, last = config.head.inputs, len(config.layers) - 1
        found.insert(0, Linear(HEAD_INPUT, config.hidden_size, inputs, False, f"{HEAD_INPUT}.rows", "", 0))
        if config.head.lent:
            found.append(Linear(HEAD_OUTPUT, config.own_width, config.hidden_size, False, FINAL_NORM, FINAL_NORM, last))
        if config.head.clusters:
            count, hidden = 1 + max(config.head.clusters), config.hidden_size
            found.append(Linear(CENTROIDS, count, hidden, False, FINAL_NORM, FINAL_NORM, last, exact=True))
    head = Linear(HEAD, config.head_rows, config.hidden_size, config.head_bias, FINAL_NORM, FINAL_NORM, None)
    return (*found, head)


def _end_linears(end: EncoderConfig, hidden: int) -> list[Linear]:
    if end.result == "scores":
        return [Linear(f"{SCORE}.{i}", 1, hidden, False, FINAL_NORM, "", None) for i in range(len(end.score_rows) or 1)]
    return [
        Linear(
            f"{DENSE}.{i}", layer.outputs, layer.inputs, layer.bias, f"{DENSE}.{i - 1}" if i else FINAL_NORM, "", None
        )
        for i, layer in enumerate(end.dense)
    ]


def _layer_linears(config: DecoderConfig, index: int) -> list[Linear]:
    layer, path = config.layers[index], _path(index)
    place, found = layer.placement, list[Linear]()
    read = _read(place.before_attention, path, path)
    if layer.attention is not None:
        found += _attention_linears(config, layer.attention, index, read)
    if layer.recurrent is not None:
        found += _recurrent_linears(layer.recurrent, config.hidden_size, index, read)
    read = _read(place.before_mlp, path, path if place.parallel else f"{path}.residual")
    if layer.experts is not None:
        router, bias = f"{path}.experts.router", layer.experts.clamped
        read = read if place.before_experts else (read[0], "")  # a factor cannot be moved where experts read it too
        source = f"{router}_norm" if layer.experts.routed_apart else read[0]
        found.append(Linear(router, layer.experts.count, config.hidden_size, bias, source, "", index, exact=True))
        found += _latent_linears(layer.experts, config.hidden_size, index, read)
    if layer.mlp is not None:
        found += _mlp_linears(layer.mlp, config.hidden_size, index, read)
    if config.per_layer:
        gate, hidden = f"{path}.per_layer_input_gate", config.hidden_size
        found.append(Linear(gate, config.per_layer, hidden, False, f"{path}.residual_1", "", index))
        found.append(Linear(f"{path}.per_layer_projection", hidden, config.per_layer, False, gate, "", index))
    return found


def _attention_linears(
    config: DecoderConfig, mixer: AttentionConfig, index: int, read: tuple[str, str]
) -> list[Linear]:
    at, (queries, keys) = f"{_path(index)}.self_attn", mixer.widths
    hidden, inputs = config.hidden_size, config.attention_inputs
    read = read if inputs == hidden else (read[0], "")  # a norm makes a part of it alone
    outputs = ((2 if mixer.gated else 1) * queries, keys, keys)
    producer = f"{at}.v_proj" if mixer.parts == "qkv" and not mixer.value_norm else ""
    found = [
        Linear(f"{at}.{part}_proj", rows, inputs, mixer.qkv_bias, *read, index)
        for part, rows in zip(mixer.parts, outputs, strict=False)
    ]
    if mixer.query_latent:
        found = [
            Linear(f"{at}.q_a_proj", mixer.query_latent, hidden, False, *read, index),
            Linear(f"{at}.q_proj", queries, mixer.query_latent, False, f"{at}.q_a_norm", "", index),
        ]
    if mixer.latent:
        assert mixer.rope is not None
        turned, queries = config.ropes[mixer.rope].dim, mixer.heads * mixer.value_dim
        expanded = queries + mixer.heads * (mixer.head_dim - turned)
        found.append(Linear(f"{at}.kv_a_proj", mixer.latent + turned, hidden, False, *read, index))
        found.append(Linear(f"{at}.kv_b_proj", expanded, mixer.latent, False, f"{at}.kv_a_norm", "", index))
    return [*found, Linear(f"{at}.o_proj", hidden, queries, mixer.o_bias, at, producer, index)]


def _recurrent_linears(mixer: RecurrentConfig, hidden: int, index: int, read: tuple[str, str]) -> list[Linear]:
    at, bias = f"{_path(index)}.recurrent", mixer.bias and mixer.rule == "conv"
    inputs = 3 * mixer.channels if mixer.rule == "conv" else mixer.channels
    found = [Linear(f"{at}.in_proj", inputs, hidden, bias, *read, index)]
    if mixer.rule != "conv":
        found.append(Linear(f"{at}.gate_proj", mixer.inner, hidden, False, *read, index))
        scalars = ("beta_proj", "decay_proj") if mixer.rule == "delta" else ("decay_proj",)
        found += [Linear(f"{at}.{it}", mixer.value_heads, hidden, False, *read, index, exact=True) for it in scalars]
    return [*found, Linear(f"{at}.out_proj", hidden, mixer.inner, bias, at, "", index)]


def _latent_linears(experts: ExpertsConfig, hidden: int, index: int, read: tuple[str, str]) -> list[Linear]:
    at, width, bias = f"{_path(index)}.experts", experts.latent, experts.latent_bias
    if not width:
        return []
    down, up = (f"{at}.{name}" for name in (LATENT_INPUT, LATENT_OUTPUT))
    return [Linear(down, width, hidden, bias, *read, index), Linear(up, hidden, width, bias, at, "", index)]


def _mlp_linears(mlp: MlpConfig, hidden: int, index: int, read: tuple[str, str]) -> list[Linear]:
    at, parts = f"{_path(index)}.mlp", ("gate_proj", "up_proj") if mlp.gated else ("up_proj",)
    producer = f"{at}.up_proj" if mlp.gated else ""  # an activation does not commute with a factor
    weight = [Linear(f"{at}.weight_proj", 1, hidden, False, *read, index, exact=True)] if mlp.weighed else []
    return [
        *(Linear(f"{at}.{part}", mlp.inner, hidden, mlp.bias, *read, index) for part in parts),
        Linear(f"{at}.down_proj", hidden, mlp.inner, mlp.bias, at, producer, index),
        *weight,
    ]


def _read(norm: str, path: str, stream: str) -> tuple[str, str]:
    """``reads`` and ``producer`` of linears behind a norm of a layer, or on a stream where there is none."""
    return (f"{path}.{norm}", f"{path}.{norm}") if norm else (stream, "")


def norms(config: DecoderConfig) -> tuple[Norm, ...]:
    """All norms in the order of computation, the one before the head last."""
    found = [norm for index, _ in enumerate(config.layers) for norm in _layer_norms(config, index)]
    all_rows = config.encoder is not None and config.encoder.pooling == "mean"  # nothing is gathered before it
    if config.head is not None:
        names = (f"model.{name}" for name in config.head.norms)
        found = [*(Norm(name, config.norm.kind, config.head.width, False, False, 0) for name in names), *found]
    if config.head is not None and config.head.input_norm:
        width = len(config.head.borders) * config.head.width
        found.insert(0, Norm("model.input_norm", config.norm.kind, width, False, False, 0))
    if config.per_layer:
        found.insert(0, Norm(PER_LAYER_NORM, config.norm.kind, config.per_layer, config.norm.bias, False, None))
    return (*found, Norm(FINAL_NORM, config.norm.kind, config.hidden_size, config.norm.bias, all_rows, None))


def _layer_norms(config: DecoderConfig, index: int) -> list[Norm]:
    layer, hidden = config.layers[index], config.hidden_size
    mixer, place = layer.attention, layer.placement
    follows = (index > 0 or config.learned_positions) and not config.layer_scalars
    rows = [(place.before_attention, hidden, follows)]
    rows += [(EMBEDDING_NORM, hidden, False)] if config.head and config.head.beside else []
    if mixer is not None and mixer.qk_norm != "none":
        widths = mixer.widths if mixer.qk_norm == "whole" else (mixer.head_dim,) * 2
        rows += [(f"self_attn.{part}_norm", width, False) for part, width in zip("qk", widths, strict=True)]
        if mixer.source is not None:
            rows.pop()
        elif mixer.value_norm:
            rows.append(("self_attn.v_norm", mixer.head_dim, False))
    if mixer is not None:
        latents = (("q_a_norm", mixer.query_latent), ("kv_a_norm", mixer.latent))
        rows += [(f"self_attn.{name}", width, False) for name, width in latents if width]
    if layer.recurrent is not None and layer.recurrent.rule != "conv" and layer.recurrent.normed:
        rows.append(("recurrent.norm", layer.recurrent.norm_size, False))
    rows.append((place.after_attention, hidden, False))
    if layer.mlp is not None or layer.experts is not None:
        rows += [(place.before_mlp, hidden, not place.parallel), (place.before_experts, hidden, False)]
        rows += [("experts.router_norm", hidden, False)] if layer.experts and layer.experts.routed_apart else []
        rows += [(name, hidden, False) for name in (place.after_experts, place.after_dense, place.after_mlp)]
    if config.per_layer:
        rows.append(("post_per_layer_input_norm", hidden, False))
    first: dict[str, tuple[int, bool]] = {}  # attention and MLP may share a norm
    for name, width, follows in rows:
        if name:
            first.setdefault(name, (width, follows))
    return [
        Norm(f"{_path(index)}.{name}", config.norm.kind, width, config.norm.bias, follows, index)
        for name, (width, follows) in first.items()
    ]


def attentions(config: DecoderConfig) -> tuple[Attention, ...]:
    """Every attention in the order of the layers."""
    return tuple(
        Attention(
            name=f"{_path(index)}.self_attn",
            layer=index,
            heads=mixer.heads,
            kv_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            window=mixer.window,
            rope=mixer.rope,
            rotary_dim=0 if mixer.rope is None else config.ropes[mixer.rope].dim,
            cache=str(index if mixer.source is None else mixer.source) if config.encoder is None else "",
            causal=mixer.causal,
            turned_before=mixer.turned_before,
            grows_after=mixer.growth_period if mixer.query_growth else 0,
            writes=mixer.source is None,
            sinks=mixer.sinks,
            latent=mixer.latent,
        )
        for index, mixer in enumerate(layer.attention for layer in config.layers)
        if mixer is not None
    )


def recurrents(config: DecoderConfig) -> tuple[Recurrent, ...]:
    """Every recurrent mixer in the order of the layers."""
    return tuple(
        Recurrent(
            name=f"{_path(index)}.recurrent",
            layer=index,
            rule=mixer.rule,
            key_heads=mixer.key_heads,
            value_heads=mixer.value_heads,
            key_dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            taps=mixer.taps,
            channels=mixer.channels,
            caches=tuple(f"{index}.{part}" for part in ("conv", "recurrent")[: 1 + (mixer.rule != "conv")]),
        )
        for index, mixer in enumerate(layer.recurrent for layer in config.layers)
        if mixer is not None
    )


def mlps(config: DecoderConfig) -> tuple[Mlp, ...]:
    return tuple(
        Mlp(f"{_path(index)}.mlp", index, layer.mlp.inner, layer.mlp.activation, layer.mlp.gated)
        for index, layer in enumerate(config.layers)
        if layer.mlp is not None
    )


def mixtures(config: DecoderConfig) -> tuple[Experts, ...]:
    """Every mixture of experts in the order of the layers."""
    return tuple(
        Experts(
            *(f"{_path(index)}.experts", index, it.count, it.chosen, it.inner),
            *(it.latent or config.hidden_size, it.clamped),
            activation=it.activation,
        )
        for index, it in enumerate(layer.experts for layer in config.layers)
        if it is not None
    )


def caches(config: DecoderConfig) -> tuple[Cache, ...]:
    """Every cache in the order of the graph's inputs, layer by layer; an encoder has none."""
    if config.encoder is not None:
        return ()
    if config.head is not None and config.head.lent:
        return config.head.lent
    found = [
        (item.layer, Cache(item.cache, "kv", (item.kv_heads, item.head_dim), item.window))
        for item in attentions(config)
        if item.writes
    ]
    for mixer in recurrents(config):
        states = zip(mixer.caches, mixer.state_shapes, strict=True)
        found += [(mixer.layer, Cache(name, "state", shape, 0)) for name, shape in states]
    return tuple(cache for _, cache in sorted(found, key=lambda entry: entry[0]))  # of a layer, keys and values first


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of :mod:`llmc.export.decoder`, and of its tower, computed without torch."""
    shapes: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (config.vocab_size, config.own_width)}
    if config.learned_positions:
        shapes[f"{POSITIONS}.weight"] = (config.max_positions, config.hidden_size)
    for linear in linears(config):
        if linear.name != HEAD or not config.tied_head:
            shapes[f"{linear.name}.weight"] = (linear.outputs, linear.inputs)
            shapes |= {f"{linear.name}.bias": (linear.outputs,)} if linear.bias else {}
    for norm in norms(config):
        shapes |= {f"{norm.name}.{part}": (norm.size,) for part in ("weight", "bias")[: 1 + norm.bias]}
    if config.per_layer:
        shapes[f"{PER_LAYER}.weight"] = (config.vocab_size, len(config.layers) * config.per_layer)
    for index, layer in enumerate(config.layers):
        shapes |= {f"{_path(index)}.layer_scalar": (1,)} if config.layer_scalars else {}
        shapes |= {f"{_path(index)}.{name}": shape for name, shape in _layer_shapes(layer)}
    for item in mixtures(config):
        shapes |= {f"{part.name}.weight": (item.count, part.outputs, part.inputs) for part in item.parts}
        shapes |= {f"{part.name}.bias": (item.count, part.outputs) for part in item.parts if part.bias}
    return shapes if config.tower is None else shapes | config.tower.parameter_shapes


def _layer_shapes(layer: Layer) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a layer's tensors beside linears, norms and experts."""
    if layer.attention is not None and layer.attention.sinks:
        yield "self_attn.sinks", (layer.attention.heads,)
    if layer.attention is not None and layer.attention.qk_scales:
        yield from ((f"self_attn.{p}_scale", (it,)) for p, it in zip("qk", layer.attention.widths, strict=True))
    if layer.recurrent is not None:
        yield from ((f"recurrent.{name}", shape) for name, shape in _recurrent_shapes(layer.recurrent))
    if layer.experts is not None and layer.experts.corrected:
        yield "experts.correction", (layer.experts.count,)
    if layer.experts is not None and layer.experts.routed_apart:
        yield "experts.per_expert_scale", (layer.experts.count,)


def _recurrent_shapes(mixer: RecurrentConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a recurrent mixer's tensors beside linears and norms."""
    yield "conv.weight", (mixer.channels, 1, mixer.taps)
    if mixer.bias:
        yield "conv.bias", (mixer.channels,)
    if mixer.rule != "conv":
        yield from ((name, (mixer.value_heads,)) for name in ("A_log", "dt_bias"))
    if mixer.rule == "mamba2":
        yield "D", (mixer.value_heads,)
    if mixer.scaled_apart:
        yield "norm_scale", (mixer.inner,)


def list_packed_parameters(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """Name of every tensor that holds the rows of several parameters, and theirs in order."""
    biased = {linear.name for linear in linears(config) if linear.bias}
    return {
        f"{_path(index)}.{module}.{kind}": tuple(f"{_path(index)}.{part}.{kind}" for part in parts)
        for index, _ in enumerate(config.layers)
        for module, parts in config.packed
        for kind in ("weight", "bias")[: 1 + (f"{_path(index)}.{parts[0]}" in biased)]
    }


def _path(index: int) -> str:
    return f"model.layers.{index}"
