"""The schema of what llmc writes: ``export.json`` of an export, ``llmc.json`` of a bundle."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from llmc.bundle.engine import Bytes, EngineConfig, Rows
from llmc.bundle.memory import MemoryPlan
from llmc.bundle.model.cache import Cache
from llmc.bundle.model.geometry import Geometry
from llmc.bundle.model.ranges import Index, Positions

SCHEMA_VERSION = 22
GRAPH_CONTRACT_VERSION = 7
EXPORT_MANIFEST = "export.json"
BUNDLE_MANIFEST = "llmc.json"
DECODER_FILE = "decoder.onnx"
MADE_FILE = "made.bin"  # weights of an export that no file of its checkpoint holds as the graph reads them
WEIGHTS_FILE = "weights.bin"
CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
TOKENIZER_FILE = "tokenizer.json"
TWO_OF_FOUR = "2:4"  # pruned weights: two of every four consecutive inputs stay
PROMPTS_FILE = "config_sentence_transformers.json"
# Everything the runtime may need to speak the model's language; only the first one must exist.
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    PROMPTS_FILE,
)
LM_HEAD = "head"  # the graph of a large head, which those of both phases share: logits of their output ``logit_rows``
LOGIT_ROWS = "logit_rows"
# Outputs of a GPU's graph beside its logits: those of at most so many most probable tokens, these tokens' ids, and the
# sum of exp(logit - largest) over the vocabulary.
TOP_LOGITS, TOP_IDS, SUM_EXP = "top_logits", "top_ids", "sum_exp"
MOST_CANDIDATES = 256
REPLAY = "replay"  # the graph that computes states from what calls of up to so many tokens gave beside their logits
MOST_REPLAYED = 32
ADAPTERS_FOLDER = "adapters"  # that llmc adapter add writes into, after the bundle was built
STAGE_FOLDER = "stage-{}"  # in the last stage's folder, of each stage before it
MOST_STAGES = 64
CHUNKS_FILE = "chunks.json"  # hashes of pieces of large files

# Largest tolerance of logits in a self-test; a larger one would test nothing. In SmolLM2-135M with 4-bit weights, calls
# of a graph differ by up to 1.03, and zeroing a whole matrix in one of its 30 layers moves some logit by 1.5 to 38,
# mostly by more than this.
LARGEST_TOLERANCE = 4.0
MOST_MANIFEST = 32 << 20  # bytes; the manifest of 4,096 layers has 20 MB
# Ranges of the manifests' numbers: a number that no build writes could take endless time or all memory.
Version = Annotated[int, range(1, 1 << 16)]
Tokens = Annotated[int, range(1 << 40)]  # of a text
Parity = Annotated[int, range(3)]
TokenIds = Annotated[tuple[Annotated[int, range(1 << 24)], ...], range(2049)]
MOST_SUPPRESSED = 1 << 18
Logits = Annotated[tuple[float, ...], range(1025)]
# Most adapters that may be loaded at a time, and most columns of their factors.
MOST_ADAPTERS, MOST_RANK = 256, 512
# Bytes of one value of the KV cache, by its type.
CACHE_BYTES = {"float32": 4, "int8": 1, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Invariance:
    """The calls of a graph that compute the same bits for a token whatever else is in the call; measured.

    Each number is 1 if calls of any size do, 2 if those of an even size do, 0 if none is known to.
    """

    rows: Parity = 0  # of calls with one new token in each of several rows, how many rows
    # of calls with two or more new tokens in one row, how many tokens; except 64 k + 1 of them, of which nothing is
    # known: attention works in tiles of 64 queries, and a lone last one takes other code
    tokens: Parity = 0
    outputs: Parity = 0  # of calls of one row, how many logits
    single: bool = False  # whether a new token alone in its row is computed as one among several in the same row


NOTHING_KNOWN = Invariance()


@dataclass(frozen=True)
class PhaseQuality:
    """One path of a bundle, prefill or decode, on a text; None where there was no unquantized model to compare with."""

    perplexity: float  # exp of the mean negative log-likelihood of the scored tokens
    # mean and 99th percentile of KL(reference || bundle) in nats over positions
    mean_kl: float | None
    p99_kl: float | None
    top1_agreement: float | None  # share of positions with the same most likely token, 0 ... 1.


@dataclass(frozen=True)
class Quality:
    """Bundle against the unquantized model on a text. The properties are those of the worse of the two paths."""

    text: str  # what it was measured on: a file's name, or "golden prompts"
    sha256: str  # of the file, empty for golden prompts
    positions: Tokens  # scored positions of each path
    window: Tokens  # tokens per window, each of which starts from an empty cache; 0 for golden prompts
    reference_perplexity: float | None  # of the unquantized model
    phases: dict[str, PhaseQuality]  # by the path's name, prefill and decode: they are different graphs
    # mean number of the bundle's greedy tokens after a golden prompt before the first one that the unquantized model,
    # given the same tokens before it, would not have chosen
    greedy_match: float | None
    # how many tokens were generated after each golden prompt, so the largest possible greedy_match
    greedy_tokens: Tokens

    @property
    def perplexity(self) -> float:
        return max(phase.perplexity for phase in self.phases.values())

    @property
    def mean_kl(self) -> float | None:
        return max((phase.mean_kl for phase in self.phases.values() if phase.mean_kl is not None), default=None)

    @property
    def p99_kl(self) -> float | None:
        return max((phase.p99_kl for phase in self.phases.values() if phase.p99_kl is not None), default=None)

    @property
    def top1_agreement(self) -> float | None:
        known = (phase.top1_agreement for phase in self.phases.values())
        return min((agreement for agreement in known if agreement is not None), default=None)


@dataclass(frozen=True)
class MergedAdapter:
    """A LoRA adapter that was added to the weights: its folder's name, a hash of its files, and its factor."""

    name: str
    sha256: str
    scale: float


@dataclass(frozen=True)
class Origin:
    """A model of the Hugging Face hub: repository (``org/name``), id of the commit, and path of a GGUF file."""

    repository: str
    commit: str
    file: str = ""


@dataclass(frozen=True)
class Source:
    """The weights that were exported. ``fingerprint`` covers config.json, every shard's header and size, samples of
    every tensor's bytes, and adapters. ``origin`` is None for weights that did not come from the hub's cache."""

    name: str
    fingerprint: str
    dtype: str
    parameters: Annotated[int, range(1 << 50)]
    adapters: Annotated[tuple[MergedAdapter, ...], range(65)] = ()
    origin: Origin | None = None


@dataclass(frozen=True)
class Generation:
    """Defaults of the checkpoint's generation_config.json by the names of requests' parameters; None or none where it
    says nothing. ``bad_words`` are sequences of tokens."""

    eos_token_ids: TokenIds
    bos_token_id: Annotated[int, range(1 << 24)] | None
    do_sample: bool
    temperature: float | None
    top_k: Annotated[int, range(1 << 31)] | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: Annotated[int, range(1 << 31)] | None = None
    min_tokens: Annotated[int, range(1 << 31)] | None = None
    banned_tokens: Annotated[tuple[Annotated[int, range(1 << 24)], ...], range(MOST_SUPPRESSED + 1)] = ()
    bad_words: Annotated[tuple[TokenIds, ...], range(1025)] = ()


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 of one file."""

    size: Bytes
    sha256: str


@dataclass(frozen=True)
class ExportManifest:
    """``export.json``: what the portable decoder in this folder is.

    ``notes`` are sentences about what of the checkpoint's settings was left out on purpose; ``weights`` are bytes by
    type.
    """

    schema_version: Version
    llmc_version: str
    graph_contract: Version
    geometry: Geometry
    source: Source
    generation: Generation
    notes: tuple[str, ...]
    weights: dict[str, Bytes]


@dataclass(frozen=True)
class Graph:
    """One graph: its file and its weights in bytes. ``overwritten`` are positions behind a step's token whose keys and
    values the step may write over."""

    file: str
    weight_bytes: Bytes
    step_weight_bytes: Bytes
    invariance: Invariance = NOTHING_KNOWN
    overwritten: Annotated[int, range(1 << 12)] = 0


@dataclass(frozen=True)
class Target:
    """Engine the graphs were built for; ``engine_version`` is the one that built and verified them."""

    name: str
    engine: str
    engine_version: str
    engine_minimum: str
    # True if the weights of integer products are uint8, as a CPU without VNNI multiplies them exactly. It would convert
    # int8 weights at each load; a CPU with VNNI is fast with int8 alone. Both compute the same integers.
    unsigned: bool = False


@dataclass(frozen=True)
class Calibration:
    """The text that calibrated the weights: ``samples`` windows of ``length`` tokens of the file ``text``.

    ``default`` tells that nobody gave a text and the one that comes with llmc was used; ``experts`` how many experts
    it calibrated, ``nearest`` of how many the last product was rounded to nearest, as too few tokens went through them.
    """

    text: str
    sha256: str
    default: bool
    samples: Annotated[int, range(1 << 31)]
    length: Positions
    experts: Annotated[int, range(1 << 24)] = 0
    nearest: Annotated[int, range(1 << 24)] = 0


@dataclass(frozen=True)
class Budget:
    """Quality that a bundle must keep to be published; None asks for nothing."""

    max_kl: float | None = None  # largest mean KL(reference || bundle) in nats
    min_agreement: float | None = None  # smallest fraction of positions with the same first choice, 0 to 1
    max_perplexity_increase: float | None = None  # largest relative increase of the perplexity; 0.02 is 2 %

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.max_kl, self.min_agreement, self.max_perplexity_increase))


@dataclass(frozen=True)
class Recipe:
    """Recipe by which the weights were compiled."""

    name: str  # the recipe file's name, or default
    # of the body's linears (fp32, fp16, bf16, int8, int4, or source: the checkpoint's own integers), and how integers
    # were chosen (rtn, gptq...)
    precision: str
    scheme: str
    block_size: Annotated[int, range(1 << 20)]  # inputs that share a weight scale; 0 where weights are not in blocks
    symmetric: bool  # whether integer 0 stands for weight 0 without a zero point
    head: str  # precision of the head and a tied embedding
    phases: str  # split (a graph each for prefill and decode), shared (one) or single (one engine with two profiles)
    activations: str  # of W8A8: per-token or static scales; none where activations stay float
    smoothing: float  # SmoothQuant's alpha, 0 where nothing was smoothed
    cache: str  # float32, float16, bfloat16, int8 (a scale per tensor) or int8-channel (a scale per channel)
    layers: dict[str, str]  # precision by module name pattern, for those that differ from `precision`
    # what quality was to be kept; the text that was used, None where none was needed
    budget: Budget
    calibration: Calibration | None
    compute: str = "float32"  # type of activations and of float weights: float32, float16 or bfloat16
    rotated: tuple[str, ...] = ()  # phases whose graph has the residual stream in another basis
    sparsity: str = ""  # pattern of pruned weights, 2:4 or the share of zeros; empty where none was pruned
    pruning: str = ""  # rule that chose them, magnitude or wanda; empty where none was pruned

    def precisions(self) -> set[str]:
        """Precisions of the stored linears."""
        return {self.precision, self.head, *self.layers.values()}

    def rotates(self, phase: str) -> bool:
        """True if the graph of a phase has the residual stream in another basis; a shared one is decode's."""
        return ("decode" if phase == "shared" else phase) in self.rotated

    def cache_type(self) -> str:
        """The type of the KV cache's values: float32, float16, bfloat16 or int8."""
        return self.cache.partition("-")[0]


@dataclass(frozen=True)
class Limits:
    """Largest calls that the bundle was planned for, in tokens and rows; as many ``adapters`` of up to ``rank`` may be
    loaded at a time."""

    max_context: Positions
    max_batch: Rows
    prefill_chunk: Positions
    adapters: Annotated[int, range(MOST_ADAPTERS + 1)] = 0
    rank: Annotated[int, range(MOST_RANK + 1)] = 0


@dataclass(frozen=True)
class GoldenPrompt:
    """One self-test case. Logits are those after the prompt, by the graph of prefill. ``margins`` are gaps between the
    first and second choice at each generated token (a tie may fall the other way elsewhere)."""

    prompt: TokenIds
    tokens: TokenIds
    margins: Logits
    top_ids: TokenIds
    top_logits: Logits
    reference_ids: TokenIds
    reference_logits: Logits


@dataclass(frozen=True)
class GoldenVector:
    """One self-test case of a model that embeds or ranks: a text's tokens and the first values of its result. Of a
    tower, a stage or a draft head: no tokens, and some of what it makes of a made-up tile or made-up hidden states."""

    prompt: TokenIds
    values: Logits


@dataclass(frozen=True)
class Similarity:
    """Bundle against the unquantized model on the golden texts, or of a tower on the rows of a made-up tile."""

    texts: Positions  # how many texts or rows
    # cosine of the bundle's vector and the unquantized model's, -1 ... 1; None for scores.
    mean: float | None
    smallest: float | None
    largest_difference: float  # between two values of a result, of all texts


@dataclass(frozen=True)
class Ranking:
    """Orders of documents by a bundle, compared with the unquantized model's on llmc's own text."""

    queries: Positions
    documents: Positions  # of each query
    top1_agreement: float  # queries whose first document is the same
    # nDCG@10, 0 ... 1: the unquantized model's first ten documents have gains of 10 down to 1, others none.
    ndcg: float


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a model, all of them unless it runs in stages. The last stage is the bundle that answers;
    those before it hand hidden states on, and are bundles in its folders ``stage-0`` and on.

    ``borders`` are the first layers of all stages, ``before`` the SHA-256 of the manifests of those before the last.
    """

    number: Index = 0
    borders: Annotated[tuple[Index, ...], range(1, MOST_STAGES + 1)] = (0,)
    before: tuple[str, ...] = ()

    @property
    def is_last(self) -> bool:
        return self.number == len(self.borders) - 1

    def is_sound(self, layers: int) -> bool:
        """True if it can be of a model with so many layers."""
        increasing = [*self.borders] == sorted({0, *self.borders}) and self.borders[-1] < layers
        hashes = len(self.borders) - 1 if self.is_last else 0
        return increasing and self.number < len(self.borders) and len(self.before) == hashes


@dataclass(frozen=True)
class Manifest:
    """``llmc.json``: all that a runtime must know before it opens a graph.

    ``cache`` is the type of the KV cache's values. ``golden_tolerance`` is how far logits of ``golden`` may be from the
    recorded ones on another machine. It follows from ``golden_spread``, the differences on the building machine between
    calls of different shapes. ``engine`` is there for TensorRT, whose ``graphs`` are what the engine was made from;
    ``device`` for every target with a GPU. ``notes`` are those of the export. A model that embeds or ranks has one
    graph, ``encode``, and ``vectors``, ``similarity`` and ``ranking`` in the places of ``golden`` and ``quality``; of a
    model that sees or hears ``vectors`` and ``similarity`` are the tower's, whose graph is ``vision`` or ``audio``. Of
    a model with states ``replay`` computes these. ``adapter_graph`` runs calls in which some row has an adapter, of
    either phase. Of a model in stages ``stage`` says which this one is; its graphs, caches and memory are those of its
    layers, and one before the last has ``vectors`` of its hidden states. ``hidden`` are the borders of hidden states
    that the graphs give to a draft head, whose own bundle has two ``vectors``, of hidden states and logits, and is not
    judged.
    """

    schema_version: Version
    llmc_version: str
    graph_contract: Version
    geometry: Geometry
    source: Source
    generation: Generation
    notes: tuple[str, ...]
    target: Target
    recipe: Recipe
    limits: Limits
    memory: MemoryPlan
    cache: str
    graphs: dict[str, Graph]
    quality: Quality | None
    golden: Annotated[tuple[GoldenPrompt, ...], range(17)]
    golden_tolerance: float
    golden_spread: float
    files: Annotated[dict[str, FileEntry], range(1025)]
    engine: EngineConfig | None = None
    device: MemoryPlan | None = None
    vectors: Annotated[tuple[GoldenVector, ...], range(17)] = ()
    similarity: Similarity | None = None
    ranking: Ranking | None = None
    adapter_graph: Graph | None = None
    hidden: Annotated[tuple[Index, ...], range(17)] = ()
    stage: Stage = Stage()

    def list_layers(self, stage: int | None = None) -> range:
        """The layers that its graphs compute, or those of another stage."""
        number = self.stage.number if stage is None else stage
        ends = (*self.stage.borders[1:], self.geometry.layers)
        return range(self.stage.borders[number], ends[number])

    def list_caches(self) -> tuple[Cache, ...]:
        """The caches of these layers."""
        return self.geometry.of_layers(self.list_layers()).caches if self.stage.borders[1:] else self.geometry.caches

    @property
    def overwritten(self) -> int:
        """Positions behind the last valid one that some graph may write over."""
        return max((graph.overwritten for graph in self.graphs.values()), default=0)

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a step of decode reads."""
        return sum(self.graphs[name].step_weight_bytes for name in ("decode", LM_HEAD) if name in self.graphs)

    def list_files(self) -> list[str]:
        """Every file that some part of the manifest names."""
        own = [self.adapter_graph.file] if self.adapter_graph is not None else []
        return [*(graph.file for graph in self.graphs.values()), *own, *self.engine_files()]

    def engine_files(self) -> list[str]:
        """The engine and its side files, which ``llmc build --rebuild`` writes anew."""
        return [name for name in (self.engine.file, self.engine.log) if name] if self.engine is not None else []


def write_manifest(manifest: ExportManifest | Manifest, folder: Path) -> None:
    """Write the manifest into ``folder`` as indented JSON."""
    name = BUNDLE_MANIFEST if isinstance(manifest, Manifest) else EXPORT_MANIFEST
    text = json.dumps(asdict(manifest), indent=1, ensure_ascii=False, allow_nan=False)
    (folder / name).write_text(text + "\n", encoding="utf-8")
