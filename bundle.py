"""Contract 2: what a folder written by llmc holds, and how it is read and checked.

Two kinds of folder exist, each with a manifest of frozen dataclasses: an *export* (``export.json``: the portable
decoder, weights by reference) and a *bundle* (``llmc.json``: graphs and weights for one target). Both are published
atomically by :mod:`llmc.publish`, so a folder with a manifest is complete.
"""

import hashlib
import heapq
import json
import math
import os
import random
import re
import shlex
import stat
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from llmc.errors import BundleError, LlmcError
from llmc.inventory import Geometry as Geometry
from llmc.inventory import Positions
from llmc.strict import decode as decode
from llmc.strict import open_regular, read_json

SCHEMA_VERSION = 8
GRAPH_CONTRACT_VERSION = 3
EXPORT_MANIFEST = "export.json"
BUNDLE_MANIFEST = "llmc.json"
DECODER_FILE = "decoder.onnx"
MADE_FILE = "made.bin"  # weights of an export that no file of its checkpoint holds as the graph reads them
WEIGHTS_FILE = "weights.bin"
CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
TOKENIZER_FILE = "tokenizer.json"
PROMPTS_FILE = "config_sentence_transformers.json"
# Everything the runtime may need to speak the model's language; only the first one must exist.
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    PROMPTS_FILE,
)

# Hashes of pieces of large files, so that some bytes can be checked without reading all. They are cut to 64 bits: who
# damages a file by chance looks for no piece with the same hash, and who changes it on purpose can change this one too.
CHUNKS_FILE = "chunks.json"
CHUNK, CHUNK_DIGITS = 4 << 20, 16
SAMPLED_CHUNKS = 16  # of one file, 64 MiB: 50 ms of hashing

# Of logits, in a self-test: beyond this, nothing would be tested. In SmolLM2-135M with 4-bit weights, calls of a graph
# differ by up to 1.03, and zeroing a whole matrix in one of its 30 layers moves some logit by 1.5 to 38, mostly by more
# than this.
LARGEST_TOLERANCE = 4.0
# No build writes more rows.
MOST_ROWS = 1024
MOST_MANIFEST = 32 << 20  # bytes: of 4,096 layers, it has 20 MB
# Ranges of the manifests' numbers. What is computed, or reserved, from one that no build writes could take for ever or
# all memory: a self-test of 80,000 prompts never ends.
Version = Annotated[int, range(1, 1 << 16)]
Bytes = Annotated[int, range(1 << 60)]
Rows = Annotated[int, range(1, MOST_ROWS + 1)]
Tokens = Annotated[int, range(1 << 40)]  # of a text
Parity = Annotated[int, range(3)]
TokenIds = Annotated[tuple[Annotated[int, range(1 << 24)], ...], range(1025)]
Logits = Annotated[tuple[float, ...], range(1025)]
# A build that replaces a bundle takes its place in two steps: so long the folder is gone at most.
SWAP_S = 0.02
MOST_TRIES = 10
TICK_S = 0.02  # longer than that of any kernel's clock for files: 1 to 10 ms
# Bytes of one value of the KV cache, by its type.
CACHE_BYTES = {"float32": 4, "int8": 1, "float16": 2, "bfloat16": 2}

T = TypeVar("T")


@dataclass(frozen=True)
class Invariance:
    """Calls of a graph that compute the same bits for a token, whatever is computed beside it; found by measuring.

    Each number is 1 if calls of any size do, 2 if those of an even size do, and 0 if nothing is known to.

    Attributes:
        rows: of calls with one new token in each of several rows, how many rows.
        tokens: of calls with two or more new tokens in one row, how many tokens; except 64 k + 1 of them, of which
            nothing is known: attention works in tiles of 64 queries, and a lone last one takes other code.
        outputs: of calls of one row, how many logits.
        single: whether a new token alone in its row is computed as one among several in the same row.
    """

    rows: Parity = 0
    tokens: Parity = 0
    outputs: Parity = 0
    single: bool = False


NOTHING_KNOWN = Invariance()


@dataclass(frozen=True)
class PhaseQuality:
    """One path of a bundle, prefill or decode, on a text; None where there was no unquantized model to compare with.

    Attributes:
        perplexity: exp of the mean negative log-likelihood of the scored tokens.
        mean_kl, p99_kl: mean and 99th percentile of KL(reference || bundle) in nats over positions.
        top1_agreement: share of positions with the same most likely token, 0 ... 1.
    """

    perplexity: float
    mean_kl: float | None
    p99_kl: float | None
    top1_agreement: float | None


@dataclass(frozen=True)
class Quality:
    """Bundle against the unquantized model on a text. The properties are those of the worse of the two paths.

    Attributes:
        text: what it was measured on: a file's name, or "golden prompts".
        sha256: of the file, empty for golden prompts.
        positions: scored positions of each path.
        window: tokens per window, each of which starts from an empty cache; 0 for golden prompts.
        reference_perplexity: of the unquantized model.
        phases: by the path's name, prefill and decode: they are different graphs.
        greedy_match: mean number of the bundle's greedy tokens after a golden prompt before the first one that the
            unquantized model, given the same tokens before it, would not have chosen.
        greedy_tokens: how many tokens were generated after each golden prompt, so the largest possible greedy_match.
    """

    text: str
    sha256: str
    positions: Tokens
    window: Tokens
    reference_perplexity: float | None
    phases: dict[str, PhaseQuality]
    greedy_match: float | None
    greedy_tokens: Tokens

    @property
    def perplexity(self) -> float:
        """The larger perplexity."""
        return max(phase.perplexity for phase in self.phases.values())

    @property
    def mean_kl(self) -> float | None:
        """The larger mean KL."""
        return max((phase.mean_kl for phase in self.phases.values() if phase.mean_kl is not None), default=None)

    @property
    def p99_kl(self) -> float | None:
        """The larger 99th percentile of KL."""
        return max((phase.p99_kl for phase in self.phases.values() if phase.p99_kl is not None), default=None)

    @property
    def top1_agreement(self) -> float | None:
        """The smaller agreement."""
        known = (phase.top1_agreement for phase in self.phases.values())
        return min((agreement for agreement in known if agreement is not None), default=None)


AMPERE = (8, 0)


def version(text: str) -> tuple[int, ...]:
    """10.3.0.26 -> (10, 3, 0, 26), so that versions and compute capabilities can be compared."""
    return tuple(map(int, re.findall(r"\d{1,9}", text.partition("+")[0])))


@dataclass(frozen=True)
class Profile:
    """The largest call that an optimisation profile takes: rows, new tokens and logits of each row."""

    batch: Rows
    sequence: Positions
    outputs: Positions


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that a bundle takes on its GPU; on a Jetson they are the machine's own.

    Attributes:
        context: the driver's and the libraries' own, from experience.
        weights: of the engine or the graphs.
        workspace: activations of the largest call.
        cache_per_token: keys and values, per row and position.
        logits: of one row.
    """

    context: Bytes
    weights: Bytes
    workspace: Bytes
    cache_per_token: Bytes
    logits: Bytes

    def parts(self, positions: int, batch: int = 1) -> dict[str, int]:
        """Bytes by what they are for, with room for ``positions`` in each of ``batch`` rows."""
        return {
            "context": self.context,
            "weights": self.weights,
            "workspace": self.workspace,
            "cache": self.cache_per_token * positions * batch,
            "logits": self.logits * batch,
        }

    def total(self, positions: int, batch: int = 1) -> int:
        """The sum of the parts."""
        return sum(self.parts(positions, batch).values())


@dataclass(frozen=True)
class EngineConfig:
    """A serialized TensorRT engine: which machine it is for, and which calls it takes.

    Attributes:
        file: the engine.
        form: native (cache updated in place, attention of the library) or primitives (basic operators, for TensorRT
            before 10.15).
        compute: float16, bfloat16 or float32.
        capacity: positions of the cache, 0 where the cache has as many as the call's bucket.
        buckets: numbers of cache positions that attention may look at, ascending; the last one is the longest context.
        decode, prefill: the profiles 0 and 1.
        select: the engine that finds the largest logits, or empty; ``candidates`` of them.
        platform: operating system and processor, as linux-x86_64.
        compute_capabilities: of the GPUs it was built for, as 8.7.
        version_compatible, hardware_compatibility, stripped: the builder's options; a stripped engine takes its weights
            from the graph's file when it is loaded.
        verified: ``device`` where the engine itself was run after building, ``cpu`` where only its graph was, on a CPU;
            ``float32`` where that graph was run computing in float32, for CPUs have no bfloat16; ``no`` where nothing
            was.
        inspector: file with the network's layers.
        workspace, optimization_level: that the builder was asked for; None leaves them to the library, and the
            workspace of an integrated GPU to what its attention needs.
        log: file with every warning of the library's, in its words; empty in bundles of older versions.
        flags: for the library's compiler, by the GPU and the library's version; see ``llmc.optimize.tensorrt.flags``.
        fallback: what was built where the builder refused what was asked for; empty where it did not.
        decomposed: the profiles (``decode``, ``prefill``) whose attention has no kernel of its own; None where the
            library was not asked.
    """

    file: str
    form: str
    compute: str
    capacity: Annotated[int, range(1 << 28)]
    buckets: Annotated[tuple[Positions, ...], range(1, 65)]
    decode: Profile
    prefill: Profile
    select: str
    candidates: Annotated[int, range(1 << 24)]
    platform: str
    compute_capabilities: tuple[str, ...]
    version_compatible: bool
    hardware_compatibility: str
    stripped: bool
    verified: str
    inspector: str
    workspace: Annotated[int, range(1, 1 << 60)] | None = None
    optimization_level: Annotated[int, range(6)] | None = None
    log: str = ""
    flags: str = ""
    fallback: str = ""
    decomposed: tuple[str, ...] | None = None

    @property
    def gpus(self) -> str:
        """The compute capabilities that :meth:`fits_gpu` accepts, in words."""
        return "8.0 and newer that the library knows" if self._for_ampere else " or ".join(self.compute_capabilities)

    def fits_gpu(self, capability: str) -> bool:
        """True if the engine has code for a GPU of this compute capability, as 8.7.

        It has for those that it names; where it names none, as TensorRT-RTX builds by default, or was built so, from
        Ampere on.
        """
        return version(capability) >= AMPERE if self._for_ampere else capability in self.compute_capabilities

    @property
    def _for_ampere(self) -> bool:
        return self.hardware_compatibility == "ampere" or not self.compute_capabilities

    def fits_version(self, installed: str, built: str) -> bool:
        """True if the library's version ``installed`` reads an engine of ``built``: the same one does, and if it was
        built so, all later ones."""
        if self.version_compatible:
            return version(installed) >= version(built)
        return version(installed) == version(built)

    def is_sound(self, max_context: int, max_batch: int, prefill_chunk: int) -> bool:
        """True if a build with these limits can have written these numbers."""
        rising = list(self.buckets) == sorted(set(self.buckets)) and min(self.buckets, default=0) > 0
        if not rising or self.buckets[-1] < max_context or self.form not in ("native", "primitives"):
            return False
        capacity = 0 if self.form == "primitives" else self.buckets[-1]
        selects = self.candidates > 0 if self.select else self.candidates == 0
        decode, prefill = Profile(max_batch, 1, 1), (self.prefill.batch, self.prefill.sequence)
        profiles = self.decode == decode and prefill == (1, prefill_chunk) and 0 < self.prefill.outputs <= prefill_chunk
        gpus = all(re.fullmatch(r"\d+\.\d+", gpu, re.ASCII) for gpu in self.compute_capabilities)
        return self.capacity == capacity and selects and profiles and gpus and self.workspace != 0


@dataclass(frozen=True)
class Source:
    """Origin of the weights. ``fingerprint`` covers config.json, every shard's header and size, and samples of
    every tensor's bytes."""

    name: str
    fingerprint: str
    dtype: str
    parameters: Annotated[int, range(1 << 50)]


@dataclass(frozen=True)
class Generation:
    """Defaults of the checkpoint's generation_config.json; None where it says nothing."""

    eos_token_ids: TokenIds
    bos_token_id: Annotated[int, range(1 << 24)] | None
    do_sample: bool
    temperature: float | None
    top_k: Annotated[int, range(1 << 31)] | None
    top_p: float | None
    min_p: float | None


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
    """One compiled graph: its file, its weights in bytes, and the CPU features without which it would be wrong.
    ``overwritten`` are positions behind a step's token whose keys and values the step may write over."""

    file: str
    weight_bytes: Bytes
    step_weight_bytes: Bytes
    cpu_features: tuple[str, ...]
    invariance: Invariance = NOTHING_KNOWN
    overwritten: Annotated[int, range(1 << 12)] = 0


@dataclass(frozen=True)
class Compiled:
    """Graphs as the engine of one machine runs them: ``files`` by the plain graph's file name.
    ``environment`` is a hash of the engine's version and the processor's features; elsewhere they are not used."""

    environment: str
    files: dict[str, str]


@dataclass(frozen=True)
class Target:
    """Engine the graphs were built for; ``engine_version`` is the one that built and verified them."""

    name: str
    engine: str
    engine_version: str
    engine_minimum: str


@dataclass(frozen=True)
class Calibration:
    """The text that calibrated the weights: ``samples`` windows of ``length`` tokens of the file ``text``.

    ``default`` tells that nobody gave a text and the one that comes with llmc was used.
    """

    text: str
    sha256: str
    default: bool
    samples: Annotated[int, range(1 << 31)]
    length: Positions


@dataclass(frozen=True)
class Budget:
    """Quality that a bundle must keep to be published; None asks for nothing.

    Attributes:
        max_kl: largest mean KL(reference || bundle) in nats.
        min_agreement: smallest share of positions with the same first choice, 0 ... 1.
        max_perplexity_increase: largest relative increase of the perplexity, 0.02 for 2 %.
    """

    max_kl: float | None = None
    min_agreement: float | None = None
    max_perplexity_increase: float | None = None

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.max_kl, self.min_agreement, self.max_perplexity_increase))


@dataclass(frozen=True)
class Recipe:
    """Recipe by which the weights were compiled.

    Attributes:
        name: the recipe file's name, or default.
        precision, scheme: of the body's linears (fp32, fp16, bf16, int8, int4, fp8, or source: the checkpoint's own
            integers), and how integers were chosen (rtn, gptq...).
        block_size: inputs that share a weight scale; 0 where weights are not in blocks.
        symmetric: whether integer 0 stands for weight 0 without a zero point.
        head: precision of the head and a tied embedding.
        phases: split (a graph each for prefill and decode), shared (one) or single (one engine with two profiles).
        activations: of W8A8: per-token or static scales; none where activations stay float.
        smoothing: SmoothQuant's alpha, 0 where nothing was smoothed.
        sparsity: none, magnitude or wanda (2 of every 4 weights are zero).
        cache: float32, float16, bfloat16, int8 (a scale per tensor) or int8-channel (a scale per channel).
        layers: precision by module name pattern, for those that differ from ``precision``.
        threads: with how many a measurement found it fastest, None where none was made.
        budget, calibration: what quality was to be kept; the text that was used, None where none was needed.
        compute: type of activations and of float weights: float32, float16 or bfloat16.
    """

    name: str
    precision: str
    scheme: str
    block_size: Annotated[int, range(1 << 20)]
    symmetric: bool
    head: str
    phases: str
    activations: str
    smoothing: float
    sparsity: str
    cache: str
    layers: dict[str, str]
    threads: Annotated[int, range(1, 1025)] | None
    budget: Budget
    calibration: Calibration | None
    compute: str = "float32"

    def precisions(self) -> set[str]:
        """In which some linear is stored."""
        return {self.precision, self.head, *self.layers.values()}

    def cache_type(self) -> str:
        """The type of the KV cache's values: float32, float16, bfloat16 or int8."""
        return self.cache.partition("-")[0]


@dataclass(frozen=True)
class Limits:
    """Largest calls that the bundle was planned for, in tokens and rows."""

    max_context: Positions
    max_batch: Rows
    prefill_chunk: Positions


@dataclass(frozen=True)
class MemoryPlan:
    """Resident bytes at the peak of loading and running, pages of mapped files included.

    Attributes:
        engine: interpreter, libraries, and the structures of the opened graphs.
        tokenizer: the vocabulary and its merges, as the tokenizers library holds them.
        weights: of all graphs, as the engine's kernels read them.
        embedding: its table in each form that a graph has, of which a page is read when a token asks for its row.
        workspace: activations of the largest call.
        workspace_per_token: attention's scores of that call and the rotary tables, per cached position.
        cache_per_token: keys and values, per row and cached position, of layers that attend to all.
        window_per_token: the same of layers with a window, as far as ``window_positions``, which a row holds of them.
        logits: of one row, with what sampling makes of them.
    """

    engine: Bytes
    tokenizer: Bytes
    logits: Bytes
    weights: Bytes = 0
    embedding: Bytes = 0
    workspace: Bytes = 0
    workspace_per_token: Bytes = 0
    cache_per_token: Bytes = 0
    window_per_token: Bytes = 0
    window_positions: Bytes = 0

    def parts(self, positions: int, batch: int = 1) -> dict[str, int]:
        """Bytes by what they are for, with room for ``positions`` cached tokens in each of ``batch`` rows."""
        windows = min(positions, self.window_positions)
        return {
            "engine": self.engine,
            "tokenizer": self.tokenizer,
            "weights": self.weights,
            "embedding": self.embedding,
            "cache": batch * (self.cache_per_token * positions + self.window_per_token * windows),
            "workspace": self.workspace + self.workspace_per_token * positions,
            "logits": self.logits * batch,
        }

    def total(self, positions: int, batch: int = 1) -> int:
        """The sum of the parts."""
        return sum(self.parts(positions, batch).values())


@dataclass(frozen=True)
class GoldenPrompt:
    """One self-test case. Logits belong to the position after the prompt, by the calls that replaying makes:
    ``top_logits`` on the graph of prefill, empty where the machine that built the bundle could not run it, and
    ``decode_logits`` of the same ids on that of decode, which stands in for the other there. ``margins`` are gaps in
    logits between the first and second choice at each generated token (a tie may fall the other way elsewhere)."""

    prompt: TokenIds
    tokens: TokenIds
    margins: Logits
    top_ids: TokenIds
    top_logits: Logits
    decode_logits: Logits
    reference_ids: TokenIds
    reference_logits: Logits


@dataclass(frozen=True)
class GoldenVector:
    """One self-test case of a model that embeds or ranks: a text's tokens and the first values of its result."""

    prompt: TokenIds
    values: Logits


@dataclass(frozen=True)
class Similarity:
    """Bundle against the unquantized model on the golden texts.

    Attributes:
        texts: how many.
        mean, smallest: cosine of the bundle's vector and the unquantized model's, -1 ... 1; None for scores.
        largest_difference: between two values of a result, of all texts.
    """

    texts: Annotated[int, range(1, 1025)]
    mean: float | None
    smallest: float | None
    largest_difference: float


@dataclass(frozen=True)
class Manifest:
    """``llmc.json``: all that a runtime must know before it opens a graph.

    ``cache`` is the type of the KV cache's values. ``compiled`` is None where the recipe wants no compiled graphs.
    ``golden_tolerance`` is how far logits of ``golden`` may be from what is recorded, elsewhere. It follows from
    ``golden_spread``: how far they were apart where it was built, between calls of other shapes that an engine makes.
    ``engine`` is there for TensorRT, whose ``graphs`` are what the engine was made from; ``device`` for every
    target with a GPU. ``notes`` are those of the export. A model that embeds or ranks has one graph, ``encode``, and
    ``vectors`` and ``similarity`` in the places of ``golden`` and ``quality``.
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
    compiled: Compiled | None
    quality: Quality | None
    golden: Annotated[tuple[GoldenPrompt, ...], range(17)]
    golden_tolerance: float
    golden_spread: float
    files: Annotated[dict[str, FileEntry], range(1025)]
    engine: EngineConfig | None = None
    device: DeviceMemory | None = None
    vectors: Annotated[tuple[GoldenVector, ...], range(17)] = ()
    similarity: Similarity | None = None

    @property
    def overwritten(self) -> int:
        """Positions behind the last that counts which some graph may write over."""
        return max((graph.overwritten for graph in self.graphs.values()), default=0)

    def named_files(self) -> list[str]:
        """Every file that some part of the manifest names."""
        compiled = self.compiled.files.values() if self.compiled is not None else ()
        return [*(graph.file for graph in self.graphs.values()), *compiled, *self.engine_files()]

    def engine_files(self) -> list[str]:
        """The engine and what comes with it: what ``llmc build --rebuild`` makes anew."""
        e = self.engine
        return [name for name in (e.file, e.select, e.inspector, e.log) if name] if e is not None else []


# ---------------------------------------------------------------------------------------------- reading and writing


def write_manifest(manifest: ExportManifest | Manifest, folder: Path) -> None:
    """Write the manifest into ``folder`` as indented JSON."""
    name = BUNDLE_MANIFEST if isinstance(manifest, Manifest) else EXPORT_MANIFEST
    text = json.dumps(asdict(manifest), indent=1, ensure_ascii=False, allow_nan=False)
    (folder / name).write_text(text + "\n", encoding="utf-8")


def read_bundle(folder: Path, *, engine_matters: bool = True) -> Manifest:
    """Read a bundle's manifest and check that every file is there with its size (hashes are :func:`verify_files`' job).

    Without ``engine_matters`` the files of an engine, which is about to be replaced, may be missing or damaged.

    Raises:
        BundleError: not a bundle, written by a newer llmc, or files are missing or truncated, or lie elsewhere.
    """
    return undisturbed(folder, lambda place: _read_bundle(place, engine_matters))


def _read_bundle(folder: Path, engine_matters: bool) -> Manifest:
    refuse_other(folder)
    _refuse_to_leave(folder, BUNDLE_MANIFEST)
    manifest = _read(folder, BUNDLE_MANIFEST, Manifest, build_command("CHECKPOINT"))
    _check_values(folder, manifest)
    for name in (*manifest.files, *manifest.named_files()):
        if name not in manifest.files or name.startswith("/") or ".." in name.split("/"):
            raise BundleError(f"{folder}: {BUNDLE_MANIFEST} names {name!r}, which is unlisted or lies outside; refused")
    for name in TOKENIZER_FILES:
        if name not in manifest.files and os.path.lexists(folder / name):
            raise BundleError(
                f"{folder}: {name} is not in {BUNDLE_MANIFEST}, so it came later, and would be used; "
                "remove it, or build the bundle again"
            )
    for name, entry in manifest.files.items():
        _refuse_to_leave(folder, name)
        found = _size(folder / name)
        remade = name in manifest.engine_files()
        if found != entry.size and (engine_matters or not remade):
            state = "is missing" if found is None else f"has {found} bytes"
            remedy = f"llmc build --rebuild {folder}" if remade else "copy or build the bundle again"
            raise BundleError(f"{folder}: {name} {state}, {entry.size} expected; {remedy}")
    return manifest


def publication(folder: Path) -> tuple[int, ...] | None:
    """Identity of what is published in ``folder``, another one for every build; None where there is no bundle."""
    try:
        found = (folder / BUNDLE_MANIFEST).stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def undisturbed(folder: Path, work: Callable[[Path], T], undo: Callable[[T], object] = lambda result: None) -> T:
    """The result of ``work`` on one and the same bundle: done again if another one took its place meanwhile.

    Args:
        work: gets the folder, without links that might lead elsewhere while it works.
        undo: gets a result that is thrown away.

    Raises:
        BundleError: the bundle is replaced again and again.
        LlmcError: whatever ``work`` raises, unless the bundle was replaced.
    """
    for _ in range(MOST_TRIES):
        place = Path(os.path.realpath(folder))
        place = folder if place == Path(os.path.abspath(folder)) else place
        before = standing(place)
        try:
            result = work(place)
        except LlmcError:
            if before is None:
                time.sleep(SWAP_S)
            if standing(place) == before:
                raise
        else:
            if standing(place) == before:
                return result
            undo(result)
    raise BundleError(f"{folder} was replaced {MOST_TRIES} times while it was read; let the build end, and try again")


def of_same(folder: Path, known: tuple[int, ...] | None, work: Callable[[Path], T]) -> T:
    """The result of ``work`` on the bundle that was loaded from ``folder`` as the :func:`publication` ``known``.

    Raises:
        BundleError: another one has taken its place.
    """

    def checked(place: Path) -> T:
        if publication(place) != known:
            raise BundleError(
                f"{folder} was replaced since it was loaded, and its chat template with it; load it again"
            )
        return work(place)

    return undisturbed(folder, checked)


def standing(folder: Path) -> tuple[int, ...] | None:
    """Identity of what is published in ``folder`` for as long as it stands there: of a folder that is moved away and
    comes back, too, another one. A change in the same tick of the file system's clock would be missed, so this waits
    until a change is older."""
    try:
        found = folder.stat()
        if 0 <= time.time_ns() - found.st_ctime_ns < TICK_S * 1e9:
            time.sleep(TICK_S)
            found = folder.stat()
    except (OSError, ValueError):
        return None
    published = publication(folder)
    return None if published is None else (*published, found.st_dev, found.st_ino, found.st_ctime_ns)


def unbuilt(folder: Path) -> str | None:
    """Kind of a folder that a bundle can be built of, ``an export`` or ``a checkpoint``; None for any other folder."""
    if (folder / BUNDLE_MANIFEST).exists():
        return None
    # An export has a config.json, too.
    kinds = {EXPORT_MANIFEST: "an export", CONFIG_FILE: "a checkpoint", ADAPTER_FILE: "an adapter"}
    return next((kind for name, kind in kinds.items() if (folder / name).exists()), None)


def refuse_other(folder: Path) -> None:
    """Refuse what is no folder of a bundle, with the way to one.

    Raises:
        BundleError: nothing is there, or what a bundle is built of.
    """
    if not os.path.lexists(folder):
        said = f"{folder}: there is no such folder, expected a bundle; build one with: {build_command('CHECKPOINT')}"
        raise BundleError(absent(folder) or said)
    if kind := "a GGUF file" if folder.suffix == ".gguf" and folder.is_file() else unbuilt(folder):
        raise BundleError(f"{folder} is {kind}, expected a bundle; build one with: {build_command(folder)}")


def absent(path: Path) -> str | None:
    """The sentence for a path where nothing is and that looks like a model's name at a hub; None for any other path."""
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(?<!\.gguf)", str(path))
    if not named or os.path.lexists(path.parent):
        return None
    return (
        f"{path}: there is no such folder, and llmc downloads nothing; if this is a model's name at Hugging Face: "
        f"hf download {path} --local-dir {path.name} and then {build_command(path.name)}"
    )


def refuse_bundle(folder: Path, expected: str) -> None:
    """Raise a BundleError for a bundle in the place of what bundles are built of."""
    if (folder / BUNDLE_MANIFEST).exists():
        raise BundleError(f"{folder} is a bundle, expected {expected}; give what it was built from")


def build_command(source: str | Path) -> str:
    """The command that builds a bundle of an export or a checkpoint."""
    return f"llmc build {shlex.quote(str(source))} -o BUNDLE"


def _check_values(folder: Path, manifest: Manifest) -> None:
    """Refuse numbers that no build writes, before anything is computed from them."""
    g, limits, generation = manifest.geometry, manifest.limits, manifest.generation
    sound = {
        "geometry": g.is_sound,
        "limits": limits.prefill_chunk <= limits.max_context <= g.max_positions,
        "graphs": manifest.graphs.keys() == {"encode"}
        if g.encoder
        else "decode" in manifest.graphs and manifest.graphs.keys() <= {"prefill", "decode"},
        "generation": max((*generation.eos_token_ids, generation.bos_token_id or 0)) < g.vocab_size
        and (generation.temperature or 0) >= 0
        and all(0 <= (share or 0) <= 1 for share in (generation.top_p, generation.min_p)),
        "cache": manifest.cache in CACHE_BYTES,
        "golden_spread": 0 <= manifest.golden_spread < math.inf,
        "golden_tolerance": 0 < manifest.golden_tolerance <= LARGEST_TOLERANCE,
        "quality": manifest.quality is None or manifest.quality.phases.keys() == {"prefill", "decode"},
        "engine": manifest.engine is None
        or manifest.engine.is_sound(limits.max_context, limits.max_batch, limits.prefill_chunk),
        "target": re.fullmatch(r"\d{1,9}(\.\d{1,9})*", manifest.target.engine_minimum, re.ASCII) is not None,
    }
    for part, holds in sound.items():
        if not holds:
            raise BundleError(f"{folder}: the {part} in {BUNDLE_MANIFEST} cannot be right; build the bundle again")


def read_export(folder: Path) -> ExportManifest:
    """Read an export's manifest.

    Raises:
        BundleError: not an export, damaged, or written by a newer llmc.
    """
    if not (folder / EXPORT_MANIFEST).exists():
        refuse_bundle(folder, "an export")
    manifest = _read(folder, EXPORT_MANIFEST, ExportManifest, "llmc export CHECKPOINT -o DIR")
    if not manifest.geometry.is_sound:
        raise BundleError(f"{folder}: the geometry in {EXPORT_MANIFEST} cannot be right; export the checkpoint again")
    for name in (DECODER_FILE, TOKENIZER_FILE):
        if _size(folder / name) is None:
            raise BundleError(f"{folder}: {name} is missing; export the checkpoint again")
    return manifest


def verify_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Hash every file and yield its name once it is proven whole.

    Raises:
        BundleError: a file cannot be read, or its hash differs from the manifest.
    """
    for name, entry in manifest.files.items():
        try:
            found = sha256_file(folder / name)
        except OSError as error:
            raise BundleError(f"{folder}: {name} cannot be read ({error.strerror}); build the bundle again") from error
        if found != entry.sha256:
            raise _corrupt(folder, name)
        yield name


def unlisted_files(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Names of what lies in the folder and is not the bundle's, sorted; 16 at most, for a reader wants few."""
    found = (entry.name for entry in os.scandir(folder))
    listed = {name.partition("/")[0] for name in manifest.files}
    return tuple(heapq.nsmallest(16, (name for name in found if name not in listed and name != BUNDLE_MANIFEST)))


def verify_samples(folder: Path, manifest: Manifest, chance: random.Random) -> Iterator[str]:
    """Hash 64 MiB of every file, at places that ``chance`` chooses, or all of a smaller one, and yield its name.

    A bundle without :data:`CHUNKS_FILE`, of an older llmc, has only its smaller files checked.

    Raises:
        BundleError: a file cannot be read, or a hash differs.
    """
    largest = SAMPLED_CHUNKS * CHUNK
    small = {name: entry for name, entry in manifest.files.items() if entry.size <= largest or name == CHUNKS_FILE}
    yield from verify_files(folder, replace(manifest, files=small))
    if CHUNKS_FILE not in small:
        return
    try:
        recorded: dict[str, str] = decode(dict[str, str], read_json(folder / CHUNKS_FILE))
        for name in sorted(manifest.files.keys() - small.keys()):
            hashes = textwrap.wrap(recorded.get(name, ""), CHUNK_DIGITS)
            count = -(-manifest.files[name].size // CHUNK)
            if len(hashes) != count:
                raise BundleError(f"{folder}: {CHUNKS_FILE} does not cover {name}; build the bundle again")
            with open_regular(folder / name) as file:
                for number in sorted(chance.sample(range(count), SAMPLED_CHUNKS)):
                    file.seek(number * CHUNK)
                    if _chunk_hash(file.read(CHUNK)) != hashes[number]:
                        raise _corrupt(folder, name)
            yield name
    except (OSError, ValueError) as error:
        raise BundleError(f"{folder}: its files cannot be read ({error}); copy or build the bundle again") from error


def write_chunks(folder: Path, names: Iterable[str]) -> None:
    """Write :data:`CHUNKS_FILE`, if there are files with more bytes than :func:`verify_samples` reads of each."""
    hashes: dict[str, str] = {}
    for name in names:
        if (folder / name).stat().st_size > SAMPLED_CHUNKS * CHUNK:
            with (folder / name).open("rb") as file:
                hashes[name] = "".join(map(_chunk_hash, iter(lambda: file.read(CHUNK), b"")))
    (folder / CHUNKS_FILE).unlink(missing_ok=True)  # it may be a hard link to another bundle's
    if hashes:
        (folder / CHUNKS_FILE).write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")


def _chunk_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:CHUNK_DIGITS]


def _corrupt(folder: Path, name: str) -> BundleError:
    return BundleError(f"{folder}: {name} is corrupt (its SHA-256 changed); copy or build the bundle again")


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _size(path: Path) -> int | None:
    """Size of a regular file, None for anything else."""
    try:
        info = path.stat()
    except (OSError, ValueError):
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def _refuse_to_leave(folder: Path, name: str) -> None:
    """Refuse a link that leads out of a folder, where it could show any file of whoever runs the bundle.

    Raises:
        BundleError: it is one.
    """
    path = folder / name
    if "/" not in name and not os.path.islink(path):
        return
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    # Hugging Face's cache keeps a repository's files in one folder, and its versions as folders of links to them.
    blobs = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []
    if not any(target.is_relative_to(place) for place in (root, *blobs)):
        raise BundleError(f"{path} is a link that leads out of the bundle; refused: put the file itself there")


def _read(folder: Path, name: str, kind: type[T], remedy: str) -> T:
    path = folder / name
    data = _load(path, remedy)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is not int or version < 1:
        raise BundleError(f"{path} is corrupt (no schema_version); make it again with: {remedy}")
    writer = ascii(data.get("llmc_version"))[:40].strip("'")
    if version < SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema version {version} of an older llmc ({writer}), this one reads "
            f"{SCHEMA_VERSION}; make it again with: {remedy}"
        )
    if version > SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema version {version}, written by llmc {writer}; this llmc reads up to "
            f"{SCHEMA_VERSION}: upgrade it with pip install -U llmc-deploy"
        )
    try:
        manifest: T = decode(kind, data)
    except LlmcError as error:
        raise BundleError(f"{path} is corrupt ({error}); make it again with: {remedy}") from error
    if data["graph_contract"] != GRAPH_CONTRACT_VERSION:
        found = f"graph contract {data['graph_contract']}, not {GRAPH_CONTRACT_VERSION}"
        raise BundleError(f"{path} follows {found}; make it again with: {remedy}")
    return manifest


def _load(path: Path, remedy: str) -> Any:
    try:
        return read_json(path, MOST_MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(f"{path.parent}: no {path.name} here, not written by llmc; make it with: {remedy}") from None
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise BundleError(f"{path} is corrupt ({error}); make it again with: {remedy}") from error
