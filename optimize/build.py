"""Export -> bundle: calibrate, lower, quantize, write, run, judge, publish."""

import logging
import os
import platform
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc import __version__
from llmc.bundle import (
    GRAPH_CONTRACT_VERSION,
    SCHEMA_VERSION,
    TOKENIZER_FILE,
    Budget,
    Compiled,
    EngineConfig,
    ExportManifest,
    FileEntry,
    Geometry,
    Graph,
    Limits,
    Manifest,
    Quality,
    Recipe,
    Target,
    read_bundle,
    read_export,
    version,
    write_chunks,
    write_manifest,
)
from llmc.errors import GpuError, MissingExtraError, ResourceError, UsageError, printable
from llmc.optimize import recipe as recipes
from llmc.optimize.calibrate.request import KEPT_BYTES, CalibrationRequest, calibrated_weights, check_windows
from llmc.optimize.calibrate.store import Calibrated
from llmc.optimize.judge.evaluate import evaluate, read_windows
from llmc.optimize.judge.gate import Advice, advise, check, check_unrounded, doubted
from llmc.optimize.judge.golden import SPREAD_FACTOR, golden_prompts, prompt_ids, tolerance
from llmc.optimize.judge.invariance import measured
from llmc.optimize.judge.overflow import check_range
from llmc.optimize.judge.replay import replay_apart
from llmc.optimize.judge.rows import check_rows
from llmc.optimize.judge.vectors import golden_vectors
from llmc.optimize.lower.context import (
    LoweringContext,
    QuantConfigs,
    check_patterns,
    quant_configs,
)
from llmc.optimize.lower.onnxruntime import folded_heads
from llmc.optimize.lower.onnxruntime.attention import check_head_sizes
from llmc.optimize.lower.rewrite import read_decoder
from llmc.optimize.passes import lower
from llmc.optimize.plan.device import device_plan, host_plan, with_engine
from llmc.optimize.plan.memory import memory_plan, plan_build
from llmc.optimize.progress import Progress, counted, silent
from llmc.optimize.recipe.engine import EngineRequest, check_heads
from llmc.optimize.targets import NATIVE, OLD, Capabilities, capabilities
from llmc.optimize.weights import WeightFile, round_to_bfloat16
from llmc.origin import check_unchanged, copy_tokenizer
from llmc.publish import file_entries, refuse_bytes, staged
from llmc.runtime import Model, load
from llmc.runtime.host import disk_cache
from llmc.runtime.kv.budget import usable_memory
from llmc.runtime.selftest import LOGIT_TOLERANCE, LOGIT_TOLERANCES, VECTOR_TOLERANCE
from llmc.runtime.sessions.onnxruntime.compiled import compile_bundle
from llmc.runtime.sessions.onnxruntime.cpu import import_onnxruntime
from llmc.runtime.sessions.tensorrt.library import lists_gpu
from llmc.runtime.text.trial import try_tokenizer

if TYPE_CHECKING:
    from llmc.optimize.tensorrt.spec import EngineSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildReport:
    """The result of a build. ``seconds`` covers everything from reading the export to publishing."""

    output: Path
    manifest: Manifest
    seconds: float

    @property
    def size(self) -> int:
        """Bytes of all files of the bundle."""
        return sum(entry.size for entry in self.manifest.files.values())


@dataclass(frozen=True)
class _Order:
    """An order to build, resolved: all that a step needs to know."""

    source: Path
    export: ExportManifest
    target: Capabilities
    recipe: Recipe
    limits: Limits
    text: Path | None
    judged: bool
    compiled: bool
    dump: Path | None
    progress: Progress
    engine: "EngineSpec | None" = None

    @property
    def lowering(self) -> str:
        """The list of passes."""
        return f"{self.target.name}-encoder" if self.export.geometry.encoder else self.target.name

    @property
    def ragged_rows(self) -> bool:
        """True if each phase has a graph of its own, and the installed engine takes rows of different lengths."""
        since = self.target.ragged_rows
        if not since or self.export.geometry.encoder or self.recipe.phases != "split" or self.recipe.cache != "float32":
            return False
        return version(import_onnxruntime(self.target.caches[self.recipe.cache]).__version__) >= version(since)

    @property
    def overwritten(self) -> int:
        """Positions behind a step's token that its folded heads write over."""
        return folded_heads.overwritten(self.export.geometry.attentions) if self.ragged_rows else 0

    @property
    def minimum(self) -> str:
        """The oldest engine that the graphs run on."""
        cache = self.target.caches[self.recipe.cache]
        return max(cache, self.target.ragged_rows, key=version) if self.ragged_rows else cache


def build(
    source: Path,
    output: Path,
    *,
    target: str = "cpu",
    precision: str | None = None,
    max_context: int | None = None,
    max_batch: int | None = None,
    budget: Budget | None = None,
    recipe: Path | recipes.Request | None = None,
    calibration: CalibrationRequest | None = None,
    engine: EngineRequest | None = None,
    text: Path | None = None,
    judged: bool = False,
    memory: int | None = None,
    force: bool = False,
    dump: Path | None = None,
    progress: Progress = silent,
) -> BuildReport:
    """Compile an exported decoder for one target and publish the bundle, or publish nothing.

    Args:
        source: folder written by ``llmc export``.
        output: bundle folder to write; must not exist unless ``force``.
        target: cpu (default), cuda, tensorrt or tensorrt-rtx.
        precision: fp32, fp16, int8 (default) or int4, for GPUs also bf16 and fp8; of quantized checkpoints source
            (default); overrides the recipe's.
        max_context: longest sequence in tokens; default: the checkpoint's, at most 32,768, for TensorRT 4,096.
        max_batch: requests that may run at once; default 8.
        budget: quality that the bundle must keep; its limits override the recipe's.
        recipe: TOML file or its contents, see :class:`llmc.optimize.recipe.Request`.
        calibration: text and decoder for recipes that look at activations.
        engine: how a TensorRT engine is compiled; what it leaves open comes from the recipe.
        text: plain text, or chats as JSONL, that quality is judged on; with a budget and without a text, a short one
            of llmc's is.
        judged: judge quality on a text even without a budget.
        memory: bytes that building may take; default: what is available.
        force: replace an existing bundle.
        dump: folder for the graph's text after each pass.
        progress: called with each step and how far it is.

    Raises:
        UsageError: the request is out of range or contradicts itself.
        CheckpointError: weights are truncated, NaN or infinite.
        BundleError: the tokenizer does not work within the limits of its trial.
        BuildError: the graph cannot be lowered, or the result is beyond the budget.
        MissingExtraError: the recipe needs calibration, and torch is not installed; or the target's library is not.
        GpuError: the target's library is too old or broken, or needs a GPU to build.
        ResourceError: the build takes more memory, by its plan.
    """
    start = time.perf_counter()
    refuse_bytes(Path(source))
    export = read_export(Path(source))
    check_unchanged(Path(source), export)
    abilities = capabilities(target)
    asked = recipes.Request(
        precision=precision, max_context=max_context, max_batch=max_batch, budget=budget, engine=engine
    )
    written = recipes.read_recipe(recipe) if isinstance(recipe, Path) else recipe
    asked = asked.over(written) if written is not None else asked
    if export.geometry.encoder:
        asked = recipes.for_encoder(asked, abilities, export.geometry.max_positions)
        if judged or text is not None or (calibration is not None and calibration.asked is not None):
            raise UsageError("a text judges and calibrates models that generate, and this one does not; leave it out")
    name = printable(recipe.stem) if isinstance(recipe, Path) else "default"
    with_text = calibration is not None and calibration.text is not None
    positions, coded = export.geometry.max_positions, bool(export.geometry.coded)
    chosen, limits = recipes.resolve(asked, abilities, positions, name, with_text, coded)
    place = Path(os.path.realpath(output))  # unlike resolve, at a loss for no loop of links
    if place == Path(os.path.realpath(source)):
        raise UsageError(f"{output} is the export itself; choose another output folder")
    if dump is not None and Path(os.path.realpath(dump)).is_relative_to(place):
        raise UsageError(f"{dump} lies in the output folder {output}; choose another folder for the dumps")
    if dump is not None and dump.exists() and not dump.is_dir():
        raise UsageError(f"{dump} is no folder; choose another one for the dumps")
    judged = judged or text is not None or bool(chosen.budget)
    order = _Order(Path(source), export, abilities, chosen, limits, text, judged, bool(asked.compiled), dump, progress)
    _check_memory(order, calibration, memory)
    try_tokenizer(Path(source))
    if abilities.makes_engine:
        from llmc.optimize.tensorrt.spec import own_bits, resolve_engine

        check_heads(export.geometry)
        wishes = asked.engine or EngineRequest()
        spec = resolve_engine(abilities, chosen, limits, wishes, own_bits=own_bits(export.geometry))
        order = replace(order, engine=spec)
    with staged(Path(output), force=force) as folder:
        manifest = _make(order, folder, calibration)
    return BuildReport(Path(output), manifest, time.perf_counter() - start)


def _check_memory(order: _Order, calibration: CalibrationRequest | None, memory: int | None) -> None:
    """Refuse a build whose plan is beyond ``memory``."""
    tokenizer = (order.source / TOKENIZER_FILE).stat().st_size
    if calibration is not None and calibration.asked is not None:
        check_windows(calibration, order.export.geometry.max_positions)
    windows = calibration.windows if calibration is not None else (0, 0)
    geometry, recipe = order.export.geometry, order.recipe
    device = device_plan(geometry, order.limits, recipe) if order.target.has_gpu else None
    plan = plan_build(
        geometry,
        recipe,
        order.limits,
        tokenizer,
        *windows,
        judged=order.judged,
        compiled=order.compiled,
        device=device,
    )
    plan.check(order.source, usable_memory(plan.parts["engine"], memory))


def _make(order: _Order, folder: Path, calibration: CalibrationRequest | None) -> Manifest:
    """Fill the staging folder, and return the manifest that was written into it last."""
    geometry = order.export.geometry  # what it cannot build is refused before hours of calibration
    check_patterns(order.recipe, [linear.name for linear in geometry.linears])
    if order.target.name == "cpu" or (order.target.name == "cuda" and order.recipe.compute != "float32"):
        check_head_sizes(geometry)
    copy_tokenizer(order.source, folder)
    weights, used = calibrated_weights(order.source, order.export, order.recipe, calibration, order.progress)
    order = replace(order, recipe=replace(order.recipe, calibration=used))
    graphs, engine = _built(order, folder, weights)
    check_unchanged(order.source, order.export)  # the weights have been read now
    compiled = None
    if order.compiled and not order.target.has_gpu:
        order.progress("compiling the graphs for this machine")
        runtime = import_onnxruntime(order.target.caches[order.recipe.cache])
        compiled = compile_bundle(runtime, folder, [graph.file for graph in graphs.values()])
    order.progress("hashing")
    judge = _judge_encoder if geometry.encoder else _judge
    return judge(order, folder, _manifest(order, graphs, compiled, engine, folder), weights)


def _built(order: _Order, folder: Path, calibrated: Calibrated) -> tuple[dict[str, Graph], EngineConfig | None]:
    """The graphs, and the engine where there is one."""
    graphs = _compile(order, folder, calibrated)
    if order.engine is None:
        return graphs, None
    from llmc.optimize.tensorrt.engine import compile_engine

    graph = folder / graphs["decode"].file
    return graphs, compile_engine(order.engine, graph, order.export.geometry, order.progress)


def _compile(order: _Order, folder: Path, calibrated: Calibrated) -> dict[str, Graph]:
    """Lower the decoder once per phase; the graphs share one weight file."""
    graphs, geometry = {}, order.export.geometry
    with closing(WeightFile(folder)) as weights:
        for phase, stored in quant_configs(order.recipe, geometry).items():
            done = counted(order.progress, f"lowering and quantizing the {phase} graph", len(geometry.linears))
            model = read_decoder(order.source)
            plan = LoweringContext(
                phase,
                geometry,
                order.limits,
                stored,
                weights,
                calibrated,
                order.recipe.cache,
                order.recipe.compute,
                done,
                ragged_rows=order.ragged_rows,
                overwritten=order.overwritten,
            )
            lower(model, order.lowering, plan, order.dump)
            _declare(model, order)
            whole = "encoder" if geometry.encoder else "decoder"
            name = f"{phase if phase in ('prefill', 'decode') else whole}.onnx"
            ir.save(model, folder / name)
            graphs[phase] = _describe(model.graph, name, stored, order, phase)
    if len(graphs) == 1:
        return dict.fromkeys(("encode",) if geometry.encoder else ("prefill", "decode"), *graphs.values())
    return graphs


def _declare(model: ir.Model, order: _Order) -> None:
    """The lowered graph uses no operator newer than the target's opset, so that older engines load it too."""
    model.functions.clear()
    model.opset_imports.clear()
    model.opset_imports[""], model.ir_version = NATIVE if order.target.makes_engine else OLD
    if not order.target.makes_engine:
        model.opset_imports["com.microsoft"] = 1


def _describe(graph: ir.Graph, name: str, stored: QuantConfigs, order: _Order, phase: str) -> Graph:
    """Bytes of weights in memory and per token (embedding rows stay on disk until read), and what the CPU must have."""
    sizes = {
        name: value.const_value.nbytes
        for name, value in graph.initializers.items()
        if value.const_value is not None and not all("Gather" in node.op_type for node, _ in value.uses())
    }
    tables = sum(size for name, size in sizes.items() if name.startswith("rotary_emb."))
    integers = stored.w8a8 is not None and any(node.op_type == "MatMulIntegerToFloat" for node in graph)
    features = order.target.w8a8_features.get(platform.machine(), ()) if integers else ()
    return Graph(
        file=name,
        weight_bytes=sum(sizes.values()),
        step_weight_bytes=sum(sizes.values()) - tables,
        cpu_features=features,
        overwritten=order.overwritten if phase == "decode" else 0,
    )


def _manifest(
    order: _Order, graphs: dict[str, Graph], compiled: Compiled | None, engine: EngineConfig | None, folder: Path
) -> Manifest:
    """The manifest before the bundle has run: no quality and no self-test."""
    export, target, recipe = order.export, order.target, order.recipe
    minimum = order.minimum
    installed = order.engine.version if order.engine else import_onnxruntime(minimum).__version__
    tokenizer = (folder / TOKENIZER_FILE).stat().st_size
    plan = host_plan(export.geometry, tokenizer) if target.has_gpu else None
    device = device_plan(export.geometry, order.limits, recipe) if target.has_gpu else None
    write_chunks(folder, sorted(path.name for path in folder.iterdir()))
    return Manifest(
        schema_version=SCHEMA_VERSION,
        llmc_version=__version__,
        graph_contract=GRAPH_CONTRACT_VERSION,
        geometry=export.geometry,
        source=export.source,
        generation=export.generation,
        notes=(*export.notes, *_chosen_anew(export.geometry, recipe)),
        target=Target(target.name, target.engine, installed, minimum),
        recipe=recipe,
        limits=order.limits,
        memory=plan or memory_plan(export.geometry, order.limits, recipe, tokenizer),
        cache=recipe.cache_type(),
        graphs=graphs,
        compiled=compiled,
        quality=None,
        golden=(),
        golden_tolerance=_least_tolerance(order),
        golden_spread=0.0,
        files=file_entries(folder, sorted(path.name for path in folder.iterdir())),
        engine=engine,
        device=device and with_engine(device, folder, engine),
    )


def _chosen_anew(geometry: Geometry, recipe: Recipe) -> list[str]:
    """A sentence about a checkpoint's own integers, if the recipe does not keep them."""
    if recipe.precision == "source" or not geometry.coded:
        return []
    return [
        f"the checkpoint stores the weights of {len(geometry.coded)} linears as integers, from which those of "
        f"{recipe.precision} were made: what both roundings lost adds up"
    ]


def _judge(order: _Order, folder: Path, manifest: Manifest, weights: Calibrated) -> Manifest:
    """Load what was built, run the golden prompts and a text, put the results beside the unquantized model's, write the
    manifest with them, and replay it.

    Raises:
        BuildError: the quality is beyond the budget, or a process that loads the bundle computes something else.
        ResourceError: it cannot be run here, yet a budget is to be kept.
    """
    write_manifest(manifest, folder)
    with ExitStack() as stack:
        try:
            model, verified = _opened(order, folder, manifest, weights, stack)
        except ResourceError as error:
            if not order.target.has_gpu or order.judged:
                raise
            log.warning("%s; the bundle is published without golden prompts: verify it on its GPU", error)
            return manifest
        text = read_windows(order.text, model) if order.judged else None
        if order.target.has_gpu and verified != "device":
            order.progress("looking for values beyond float16")
            check_range(folder, manifest, [*prompt_ids(model), *(text.ids[:1].tolist() if text else [])])
        golden = golden_prompts(model, order.source, order.progress)
        quality, allowed = golden.quality, tolerance(manifest.golden_tolerance, golden.spread)
        check_unrounded(quality, order.recipe)
        if text is not None:
            kept = disk_cache.entry("reference", order.export.source.fingerprint)
            found = evaluate(model, text, reference=order.source, cache=kept, greedy=False, progress=order.progress)
            quality = replace(found.quality, greedy_match=quality.greedy_match, greedy_tokens=quality.greedy_tokens)
            seen = partial(_advice, order, folder, manifest, weights, quality, text.ids)
            check(quality, order.recipe.budget, seen)
            disk_cache.prune("reference", KEPT_BYTES)
        doubts = doubted(
            quality if text is not None and text.default else golden.quality, order.export.geometry.vocab_size
        )
        manifest = replace(manifest, notes=(*manifest.notes, *doubts))
        if verified == "device":
            order.progress("comparing calls of different sizes")
            manifest = measured(model.runner.session, manifest)
            if order.target.has_gpu:
                check_rows(model.runner.session, replace(manifest, golden_tolerance=allowed))
        if model.runner.session.substitutes:
            manifest = replace(manifest, notes=(*manifest.notes, _stood_in(manifest)))
    finished = replace(
        manifest,
        golden=golden.cases,
        golden_tolerance=allowed,
        golden_spread=golden.spread,
        quality=quality,
        engine=manifest.engine and replace(manifest.engine, verified=verified),
    )
    write_manifest(finished, folder)
    if verified != "float32":  # what stood in for the bundle is gone, and nothing here runs the bundle itself
        order.progress("replaying the golden prompts as a first load does")
        replay_apart(folder, emulate=verified == "cpu")
    return finished


def _least_tolerance(order: _Order) -> float:
    if order.export.geometry.encoder:
        return VECTOR_TOLERANCE
    return LOGIT_TOLERANCES[order.recipe.compute] if order.target.has_gpu else LOGIT_TOLERANCE


def _judge_encoder(order: _Order, folder: Path, manifest: Manifest, weights: Calibrated) -> Manifest:
    """:func:`_judge` of a model that embeds or ranks: its vectors beside those of the unquantized one."""
    write_manifest(manifest, folder)
    with load(folder, self_test=False) as model:
        found = golden_vectors(model, order.source, order.progress)
    finished = replace(
        manifest,
        vectors=found.cases,
        golden_tolerance=max(manifest.golden_tolerance, SPREAD_FACTOR * found.spread),
        golden_spread=found.spread,
        similarity=found.similarity,
    )
    write_manifest(finished, folder)
    order.progress("replaying the golden texts as a first load does")
    replay_apart(folder)
    return finished


def _stood_in(manifest: Manifest) -> str:
    prefill, decode = manifest.graphs["prefill"], manifest.graphs["decode"]
    return (
        f"the CPU that built this bundle lacks {', '.join(prefill.cpu_features)}, so {decode.file} ran in the place of "
        f"{prefill.file}: the quality of prefill is not known; build where it runs, or with phases = 'shared'"
    )


def _advice(
    order: _Order, folder: Path, manifest: Manifest, weights: Calibrated, quality: Quality, ids: NDArray[np.int64]
) -> Advice:
    """Advice on lost quality; a graph for a GPU is cut into layers in float32, as that it is compared with."""
    if not order.target.has_gpu:
        return advise(folder, manifest, order.source, quality, ids, order.progress)
    with TemporaryDirectory(prefix=".float32.", dir=folder) as work:
        stand_in = _in_float32(order, Path(work), manifest, weights)
        return advise(stand_in, read_bundle(stand_in), order.source, quality, ids, order.progress)


def _opened(
    order: _Order, folder: Path, manifest: Manifest, weights: Calibrated, stack: ExitStack
) -> tuple[Model, str]:
    """The bundle, loaded on the device that it is for, or else its graph on the CPU; and which of them. ``stack``
    closes the model, and removes what was only made to be judged."""
    if not order.target.has_gpu:
        return stack.enter_context(load(folder, self_test=False)), "device"
    if manifest.engine is None or runs_here(order.engine, manifest.engine):
        try:
            return stack.enter_context(load(folder, self_test=False)), "device"
        except (GpuError, MissingExtraError) as error:
            log.info("%s; judging the graph on the CPU instead", error)
    if order.recipe.compute != "bfloat16":
        return stack.enter_context(load(folder, self_test=False, emulate=True)), "cpu"
    work = Path(stack.enter_context(TemporaryDirectory(prefix=".float32.", dir=folder)))
    stand_in = _in_float32(order, work, manifest, weights)
    round_to_bfloat16(stand_in)
    return stack.enter_context(load(stand_in, self_test=False, emulate=True)), "float32"


def runs_here(spec: "EngineSpec | None", plan: EngineConfig) -> bool:
    """True if there is an engine, and a GPU that it has code for and that its library lists."""
    if spec is None or spec.gpu is None or not plan.fits_gpu(spec.gpu.compute_capability):
        return False
    return lists_gpu(spec.library, spec.gpu.compute_capability)


def _in_float32(order: _Order, folder: Path, manifest: Manifest, weights: Calibrated) -> Path:
    """The same graph computing in float32: no CPU kernel knows bfloat16."""
    recipe = replace(order.recipe, compute="float32", cache="float32")
    graphs = _compile(replace(order, recipe=recipe, dump=None), folder, weights)
    copy_tokenizer(order.source, folder)
    check_unchanged(order.source, order.export)  # the weights have been read now
    files = {path.name: FileEntry(path.stat().st_size, "") for path in folder.iterdir()}  # nobody else will see it
    stand_in = replace(manifest, recipe=recipe, cache="float32", graphs=graphs, engine=None, files=files)
    write_manifest(stand_in, folder)
    return folder
