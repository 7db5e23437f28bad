"""Load a bundle, check it, and make its engine: all that happens before the first request."""

import hashlib
import importlib
import inspect
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

from llmc.bundle import (
    BUNDLE_MANIFEST,
    STAGE_FOLDER,
    Manifest,
    list_adapters,
    list_unlisted_files,
    read_bundle,
    read_undisturbed,
    verify_files,
)
from llmc.bundle.model.audio import Audio
from llmc.bundle.model.kinds import allows, refuse
from llmc.errors import BundleError, UsageError, format_name
from llmc.runtime.api import DRAFT_WORDS
from llmc.runtime.api.options import Determinism, EngineOptions, row_limit
from llmc.runtime.audio.tower import AudioTower
from llmc.runtime.embedder import ABILITIES, Embedder
from llmc.runtime.engine.engine import Engine
from llmc.runtime.generator import Generator
from llmc.runtime.host.huge_pages import gather_soon, note_others
from llmc.runtime.host.integrity import check_files
from llmc.runtime.host.machine import available_memory, resident_bytes, usable_threads
from llmc.runtime.kv.budget import check_load, opening_bytes, plan_load
from llmc.runtime.kv.prefix_cache import BLOCK, PrefixCache
from llmc.runtime.kv.prefix_store import PrefixStore
from llmc.runtime.loaded import LoadedBundle
from llmc.runtime.runner.prefill import SingleRunner
from llmc.runtime.sampling.neighbours import neighbour
from llmc.runtime.sampling.ranges import integer
from llmc.runtime.selftest import check_once, replay
from llmc.runtime.selftest.stages import replay_stage
from llmc.runtime.selftest.values import VerifyReport
from llmc.runtime.sessions import emulate_target, open_engine, open_session
from llmc.runtime.sessions.onnxruntime.stateless import StatelessSession
from llmc.runtime.sessions.staged import Stages, plan_together, read_stages
from llmc.runtime.speculation.drafters import Drafter, PromptLookup
from llmc.runtime.speculation.head_drafter import AssistantDrafter, HeadDrafter
from llmc.runtime.speculation.model_drafter import ModelDrafter
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.text.trial import try_tokenizer
from llmc.runtime.vision.tower import RowTower, Tower

log = logging.getLogger(__name__)
_B = TypeVar("_B", bound=LoadedBundle)

# Seconds for which the tokenizer waits until the graphs are open: while it reads a vocabulary, no other thread runs.
HEAD_START_S = 0.2
# A strict step feeds a dummy token after the last one, so a prompt of one and a new token want three positions.
SHORTEST_STRICT = 3
# The prefix cache takes this part of the available memory by default, and at most so many bytes.
PREFIX_PART, PREFIX_BYTES = 8, 256_000_000
# Bytes of prefixes that may wait to be written to disk, beside the prefix cache.
PENDING_BYTES = 64_000_000


@overload
def load(bundle: str | Path, *, kind: None = None, **options: Any) -> Generator: ...
@overload
def load(bundle: str | Path, *, kind: type[_B], **options: Any) -> _B: ...
def load(
    bundle: str | Path,
    *,
    kind: Any = None,
    threads: int | None = None,
    max_context: int | None = None,
    prefill_chunk: int | None = None,
    self_test: bool | None = None,
    verify: bool | None = None,
    memory: int | None = None,
    emulate: bool = False,
    device: int = 0,
    adapters: Mapping[str, str | Path] | None = None,
    stages: Any = None,
    offline: bool | None = None,
    **options: Any,
) -> Any:
    """Load a bundle. If a build replaces it meanwhile, the new one is loaded, never a mixture.

    Args:
        bundle: the folder that ``llmc build`` wrote; or an export, a checkpoint, a GGUF file or a name at the hub, of
            which a bundle is built into the cache if it has none: see :func:`llmc.sources.built.find_bundle`.
        kind: the class that the caller wants: another bundle is refused before its weights are read. Default: the
            bundle's own, :class:`llmc.runtime.Generator` or, for an embedding model or a reranker,
            :class:`llmc.runtime.Embedder`; type checkers take it for a ``Generator``.
        threads: threads of the model; default: the affinity mask, at most the cgroup's CPU quota.
        max_context: longest sequence in tokens; default and upper bound: what the bundle was built for.
        prefill_chunk: prompt tokens per call; default and upper bound: what the bundle was built for.
        self_test: True replays all golden prompts, False none; default: the shortest one, the first time that this
            machine loads this bundle with this engine.
        verify: True hashes every file, False none; default: 64 MiB of each file, the first time that this machine loads
            these files, unless ``self_test`` is False.
        memory: bytes that this process may take. ``max_context`` must fit into them; if it is not given, it is lowered
            to what fits, with a warning. Default: what is available, checked as the cache grows.
        emulate: run the graph of a bundle for a GPU on the CPU: slow, to check it without the GPU.
        device: number of the GPU among the visible ones.
        adapters: folders that ``llmc adapter add`` wrote, by name; default: the bundle's own.
        stages: a function that opens the stages before the last one of a model in stages; default: in this process.
            ``exact`` asks it for float32 on the wire: at ``batch`` and ``strict``, and for experts.
        offline: True uses no network for a name at the hub; default: ``HF_HUB_OFFLINE``.
        options: fields of :class:`llmc.runtime.api.options.EngineOptions`.

    Raises:
        GpuError: GPU, driver or engine library are missing, unsupported or fail.
        BundleError: the folder is no whole bundle, or not for this machine or version, or fails the self-test.
        MissingExtraError: the engine is not installed.
        ResourceError: memory does not suffice.
        UsageError: an argument is out of range, or the bundle is of another kind.
    """

    def open_bundle(folder: Path) -> LoadedBundle:
        manifest = emulate_target(read_bundle(folder)) if emulate else read_bundle(folder)
        _check_kind(manifest, kind or LoadedBundle)
        before = read_stages(folder, manifest) if stages is None else {}  # all in this process
        manifest = plan_together(manifest, before)
        limits, engine_options = manifest.limits, _options(options)
        _in_range("memory", memory, 0, 1 << 50)
        fitting = limits.max_context if memory is None else _find_fitting_context(folder, manifest, memory, max_context)
        context = _in_range("max_context", max_context, fitting, limits.max_context)
        geometry, most = manifest.geometry, limits.prefill_chunk
        chunk = _in_range("prefill_chunk", prefill_chunk, most, most, min(most, geometry.least_chunk))
        workers = _in_range("threads", threads, usable_threads(), 1024)
        _check_options(folder, manifest, context, engine_options, {**options, "adapters": adapters})
        check_load(folder, manifest, context, memory)
        for part, its_manifest in {folder: manifest, **before}.items():
            check_files(part, its_manifest, False if verify is None and self_test is False else verify)
        others = note_others(manifest.memory["weights"].fixed)
        opened = threading.Event()

        def read_tokenizer() -> Tokenizer:
            try_tokenizer(folder)
            opened.wait(HEAD_START_S)
            return Tokenizer.from_folder(folder)

        with ThreadPoolExecutor(1) as pool:  # reading a large vocabulary takes about as long as opening the graphs
            tokenizer = pool.submit(read_tokenizer)
            if manifest.geometry.encoder:
                encode = StatelessSession(folder, manifest, workers, "encode", str(manifest.geometry.encoder.result))
                opened.set()
                model: LoadedBundle = Embedder(folder, manifest, tokenizer.result(), encode, workers, context)
            else:
                tower = open_tower(folder, manifest, workers)
                exact = engine_options.determinism is not Determinism.FAST or bool(manifest.geometry.mixtures)
                opener = partial(Stages, read=before) if stages is None else partial(stages, exact=exact)
                placed = {"stages": opener} if manifest.stage.before else {}
                runner = SingleRunner(open_session(folder, manifest, workers, device, **placed), context, chunk)
                opened.set()
                make = partial(make_engine, memory=memory, offline=offline)
                model = Generator(folder, manifest, tokenizer.result(), runner, workers, make, engine_options, tower)
        gather_soon(others)
        try:
            check_once(model, self_test)
            if isinstance(model, Generator):
                if engine_options.draft is not None:
                    _ = model.engine  # a draft that does not fit is refused now, and not by the first request
                for name, place in (list_adapters(folder) if adapters is None else adapters).items():
                    model.load_adapter(name, place)
        except BaseException:
            model.close()
            raise
        return model

    folder = read_undisturbed(_folder(bundle), lambda place: _find_bundle(place, bundle, offline))
    return read_undisturbed(folder, open_bundle, lambda model: model.close())


def _find_bundle(folder: Path, named: str | Path, offline: bool | None) -> Path:
    """The folder if it holds a bundle, or the bundle that is built of what was ``named``."""
    if os.path.exists(folder / BUNDLE_MANIFEST):  # pathlib raises for what cannot be looked at
        return Path(named)
    # By name: the room is above the runtime, and building needs packages that a device has not.
    found: Path = importlib.import_module("llmc.sources.built").find_bundle(named, offline=offline)
    return found


def _check_kind(manifest: Manifest, kind: type[LoadedBundle]) -> None:
    """Refuse a bundle whose loaded form is no ``kind``."""
    encoder = manifest.geometry.encoder
    if encoder is None and not issubclass(Generator, kind):
        ability = "generates text (llmc run, Generator.generate) and neither embeds nor ranks"
        raise UsageError("bundle", ability, "load one of an embedding model or a reranker")
    if encoder is not None and not issubclass(Embedder, kind):
        ability = f"{ABILITIES[str(encoder.result)]} and generates no text"
        raise UsageError("bundle", ability, "load one that does")


def open_tower(folder: Path, manifest: Manifest, threads: int) -> RowTower[Any] | None:
    """The tower of a bundle that sees or hears."""
    part = manifest.geometry.tower
    if part is None:
        return None
    run = StatelessSession(folder, manifest, threads, part.graph, "embeddings").run
    return AudioTower(part, run) if isinstance(part, Audio) else Tower(part, run)


def _check_options(
    folder: Path, manifest: Manifest, context: int, options: EngineOptions, given: Mapping[str, Any]
) -> None:
    refuse(manifest.geometry, *(name for name, value in given.items() if value and value not in ("auto", "none")))
    row_limit(manifest, options)
    if options.determinism is Determinism.STRICT and context < SHORTEST_STRICT:
        raise UsageError("max_context", f"is {context}, expected {SHORTEST_STRICT} or more with determinism 'strict'")


def verify(
    bundle: str | Path,
    *,
    threads: int | None = None,
    emulate: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> VerifyReport:
    """Hash every file, load the bundle and replay its golden prompts; with ``emulate`` a GPU's graph on the CPU. Stages
    are verified one by one, and then together.

    Raises:
        BundleError: a file is corrupt, or results differ beyond the manifest's tolerance.
    """
    folder = _folder(bundle)

    def verified(place: Path) -> VerifyReport:
        manifest = read_bundle(place)
        for name in verify_files(place, manifest):
            progress(f"hashed {name}")
        if not manifest.stage.is_last:
            with closing(open_engine(place, manifest, threads or usable_threads())) as session:
                return replay_stage(place, manifest, session)
        for number in range(len(manifest.stage.before)):
            stage = place / STAGE_FOLDER.format(number)
            if not stage.is_dir():
                raise BundleError(
                    f"{place} has whole files of its own, and {stage} is not there; its golden prompts go through all "
                    "stages: verify it where they all are"
                )
            verify(stage, threads=threads, progress=progress)
        how: dict[str, Any] = {"threads": threads, "self_test": False, "verify": False, "emulate": emulate}
        with load(place, kind=LoadedBundle, **how) as model:
            return replace(replay(model, progress), unlisted=list_unlisted_files(place, manifest))

    return read_undisturbed(folder, verified)


def _folder(bundle: str | Path) -> Path:
    """The path of a bundle, or UsageError for what no engine's library can open."""
    if not isinstance(bundle, str | os.PathLike):
        raise UsageError("bundle", f"is {bundle!r:.60}, expected the path of a folder that llmc build wrote")
    folder = Path(bundle)
    if re.search("[\0\ud800-\udfff]", str(folder)):
        raise UsageError("bundle", f"is {str(folder)!a}, which is not text in UTF-8", "rename the folder")
    try:
        folder.exists()
    except OSError as error:
        raise UsageError("bundle", f"is {folder!s:.200}, which cannot be looked at ({error.strerror})") from error
    return folder


def _find_fitting_context(folder: Path, manifest: Manifest, memory: int, asked: int | None) -> int:
    """The longest context that fits into ``memory``, all of it where none does, for :func:`check_load` to refuse."""
    most = manifest.limits.max_context
    fitting = plan_load(manifest, most).verdict(memory).largest_context or most
    if fitting < most and asked is None:
        log.warning("%s: %d MB hold a context of %d tokens, not of %d", folder, memory // 1_000_000, fitting, most)
    return fitting


def _options(given: Mapping[str, Any]) -> EngineOptions:
    known = [field.name for field in fields(EngineOptions)]
    if unknown := sorted(given.keys() - set(known)):
        close = neighbour(unknown[0], [*known, *inspect.signature(load).parameters])
        hint = f"did you mean {close}?" if close else f"the engine's options are {', '.join(known)}"
        raise UsageError(format_name(unknown[0]), "is no argument of load", hint)
    return EngineOptions(**given)


def _in_range(name: str, value: int | None, default: int, highest: int, lowest: int = 1) -> int:
    if value is None:
        return default
    integer(lowest, highest).check(name, value)
    return value


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes for ``load(memory=...)``."""

    least: int  # for one row of the longest context
    most: int  # for all rows and the prefix cache
    draft: int  # beside that, for a draft model


def memory_need(manifest: Manifest, options: Mapping[str, Any]) -> MemoryNeed:
    """The memory that a bundle takes when it is loaded with these arguments of :func:`load`."""
    limits = manifest.limits
    context = options.get("max_context") or limits.max_context
    keeps = allows(manifest.geometry, "prefix_cache_bytes")
    prefixes, draft = options.get("prefix_cache_bytes") if keeps else 0, options.get("draft")
    on_disk = options.get("prefix_cache_folder") is not None
    pending = PENDING_BYTES if on_disk else 0
    always = prefixes or (PREFIX_BYTES if on_disk else 0)
    rows = options.get("max_batch") or limits.max_batch
    drafted = 0 if draft in (None, *DRAFT_WORDS) else plan_load(read_bundle(Path(str(draft)))).total
    return MemoryNeed(
        max(plan_load(manifest, context).total, opening_bytes(manifest)) + always + pending,
        plan_load(manifest, context, rows).total + (PREFIX_BYTES if prefixes is None else prefixes) + pending,
        drafted,
    )


def default_memory() -> int:
    """Bytes that this process may take by default: what it holds already, and what is available."""
    return available_memory() + resident_bytes()[0]


def make_engine(model: Generator, memory: int | None, offline: bool | None = None) -> Engine:
    """Make the engine of a loaded model, which may take ``memory`` bytes; ``offline`` as for :func:`load`.

    Raises:
        DraftError: the draft model has another tokenizer.
        BundleError, ResourceError: the draft model cannot be loaded.
    """
    manifest, runner, options = model.manifest, model.runner, model.options
    refuse(manifest.geometry, "answers")
    if options.draft == "auto":
        keeps = drafts_keep_bits(manifest, options.determinism)
        options = replace(options, draft="lookup" if keeps else None)
    limit = default_memory() if memory is None else memory  # what the process holds already counts in the plan
    size = options.prefix_cache_bytes
    if not allows(manifest.geometry, "prefix_cache_bytes"):
        size = 0
    if size is None and manifest.stage.before and options.prefix_cache_folder is None:
        size = 0  # what stages hold would come here over the network
    if size is None:
        spare = available_memory() if memory is None else memory - manifest.memory.total(runner.max_context)
        size = max(0, min(PREFIX_BYTES, spare // (PREFIX_PART if memory is None else 1)))
    store = None
    if options.prefix_cache_folder is not None and size:
        store = PrefixStore(
            Path(options.prefix_cache_folder), options.prefix_cache_disk_bytes, pending_bytes=PENDING_BYTES
        )
    cache = runner.session.cache
    form, states = cache.form(BLOCK), None if cache.can_rewind else cache.states_form
    key = prefix_key(manifest, options.determinism, runner.session.exact)
    return Engine(
        runner.session,
        manifest,
        model.tokenizer,
        max_context=runner.max_context,
        prefill_chunk=runner.prefill_chunk,
        options=options,
        memory=limit - (PENDING_BYTES if store else 0),
        prefixes=PrefixCache(key, max_bytes=size, store=store, form=form, states=states) if size else None,
        store=store,
        drafter=make_drafter(model, options.draft, offline),
    )


def prefix_key(manifest: Manifest, level: Determinism, exact: bool) -> str:
    """Everything that cached keys and values depend on: weights, graphs, the cache's type, the shapes of calls, and if
    stages handed on ``exact`` hidden states."""
    hashes = [*manifest.stage.before, *(file.sha256 for _, file in sorted(manifest.files.items()))]
    parts = [manifest.source.fingerprint, manifest.cache, level.value, *([] if exact else ["float16"]), *hashes]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def drafts_keep_bits(manifest: Manifest, level: Determinism) -> bool:
    """Tell whether verified drafts leave the bits of all logits as they are."""
    if not allows(manifest.geometry, "draft"):
        return False
    kept = manifest.graphs["decode"].invariance
    alike = kept.single and kept.rows == 1 and kept.tokens > 0 and kept.outputs == 1
    one_graph = manifest.graphs["prefill"].file == manifest.graphs["decode"].file
    return level is Determinism.STRICT or (level is Determinism.FAST and one_graph and alike)


def make_drafter(model: Generator, draft: str | Path | None, offline: bool | None = None) -> Drafter | None:
    """Make the drafter of a model: prompt lookup, or a second bundle with the same tokenizer, of a model or a draft
    head.

    Raises:
        DraftError, BundleError, ResourceError: the draft model does not fit, or cannot be loaded.
        UsageError: it is of a kind that cannot draft.
    """
    if draft is None:
        return None
    if draft == "lookup":
        return PromptLookup()
    drafts = load(draft, kind=LoadedBundle, threads=model.threads, self_test=False, offline=offline)
    try:
        geometry = drafts.manifest.geometry
        refuse(geometry, "drafting")
        assert isinstance(drafts, Generator)
        kind = AssistantDrafter if geometry.borrows else HeadDrafter if geometry.head else ModelDrafter
        return kind(drafts, model)
    except BaseException:
        drafts.close()
        raise
