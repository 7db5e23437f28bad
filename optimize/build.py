"""Export -> bundle: calibrate, lower, quantize, write, run, judge, publish."""

import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from llmc import __version__
from llmc.bundle import (
    ADAPTERS_FOLDER,
    BUNDLE_MANIFEST,
    CHUNKS_FILE,
    GRAPH_CONTRACT_VERSION,
    SCHEMA_VERSION,
    TOKENIZER_FILE,
    TWO_OF_FOUR,
    EngineConfig,
    Geometry,
    Graph,
    Manifest,
    Part,
    Target,
    write_chunks,
)
from llmc.bundle.model.kinds import allows, find_evidence
from llmc.errors import BuildError, BundleError, ResourceError, UsageError
from llmc.optimize.calibrate.request import calibrate_weights, check_windows
from llmc.optimize.graphs import compile_graphs
from llmc.optimize.judge.encoders import judge_texts
from llmc.optimize.judge.finished import judge_decoder, least_tolerance
from llmc.optimize.judge.heads import judge_values
from llmc.optimize.lower.context import check_patterns
from llmc.optimize.lower.onnxruntime.attention import check_head_sizes
from llmc.optimize.order import Order, runs_here, take_order
from llmc.optimize.plan.borders import choose_borders
from llmc.optimize.plan.device import device_plan, host_plan, with_engine
from llmc.optimize.plan.memory import bundle_bytes, memory_plan, plan_build
from llmc.optimize.progress import Progress, silent
from llmc.optimize.recipe import BuildRequest, settle
from llmc.optimize.split import split
from llmc.optimize.targets import capabilities_for
from llmc.optimize.weights.store import Calibrated
from llmc.origin import check_unchanged, copy_tokenizer
from llmc.publish import file_entries, staging_folder
from llmc.runtime.kv.budget import MB, usable_memory
from llmc.runtime.sessions.onnxruntime.cpu import import_onnxruntime
from llmc.runtime.text.trial import try_tokenizer


@dataclass(frozen=True)
class BuildReport:
    """The result of a build. ``seconds`` covers everything from reading the export to publishing."""

    output: Path
    manifest: Manifest
    seconds: float

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.manifest.files.values())


def build(request: BuildRequest, progress: Progress = silent) -> BuildReport:
    """Compile an exported decoder for one target and publish the bundle, or publish nothing.

    Args:
        progress: called with each step and how far it is.

    Raises:
        UsageError: the request is out of range, contradicts itself, or does not go with the model.
        CheckpointError: weights are truncated, NaN or infinite.
        BundleError: the tokenizer does not work within the limits of its trial.
        BuildError: the graph cannot be lowered, or the result is beyond the budget.
        MissingExtraError: the recipe needs calibration, and torch is not installed; or the target's library is not.
        GpuError: the target's library is too old or broken, or needs a GPU to build.
        ResourceError: the build takes more memory or disk, by its plan, or a stage more memory than its box has.
    """
    start = time.perf_counter()
    order = take_order(replace(request, source=Path(request.source), output=Path(request.output)), progress)
    request, geometry = order.request, order.export.geometry
    if os.path.realpath(request.output) == os.path.realpath(request.source):  # unlike resolve, accepts loops of links
        raise UsageError("output", f"{request.output} is the export itself", "choose another output folder")
    tokenizer = (request.source / TOKENIZER_FILE).stat().st_size
    check_room(request, geometry, tokenizer)
    try_tokenizer(request.source)
    order = order.with_engine()
    # Refuse unsupported requests before hours of calibration.
    check_patterns(order.recipe, [*(it.name for it in geometry.mixtures), *(it.name for it in geometry.every_linear)])
    if order.target.name == "cpu" or (order.target.name == "cuda" and order.recipe.compute != "float32"):
        check_head_sizes(geometry)
    boxes = request.stages
    cuts = choose_borders(geometry, order.limits, order.recipe, tokenizer, boxes) if boxes else []
    with staging_folder(request.output, force=request.force) as folder:
        manifest = _fill(order, folder)
        manifest = split(folder, manifest, cuts, progress) if cuts else manifest
    return BuildReport(request.output, manifest, time.perf_counter() - start)


def check_room(request: BuildRequest, geometry: Geometry, tokenizer_bytes: int) -> None:
    """Refuse a filled request for a model that would be refused, or takes more memory or disk to build than there is.

    Raises:
        UsageError: see :func:`llmc.optimize.recipe.settle`.
        ResourceError: naming the source, or the disk's folder.
    """
    target = capabilities_for(request.target, request.gpu_memory)
    recipe, limits = settle(request, geometry, target)
    windows = check_windows(request, geometry.max_positions) if request.decoder is not None else (0, 0)
    device = device_plan(geometry, limits, recipe) if target.has_gpu else None
    plan = plan_build(geometry, recipe, limits, tokenizer_bytes, *windows, judged=request.judged, device=device)
    plan.check(request.source, usable_memory(plan.parts["engine"], request.memory))
    parents = Path(os.path.realpath(request.output)).parents
    folder = next((parent for parent in parents if os.path.exists(parent)), Path(os.sep))
    needed, free = bundle_bytes(geometry, recipe, limits, tokenizer_bytes), shutil.disk_usage(folder).free
    if free < needed:
        problem = f"{free / MB:,.0f} MB of the disk are free, and the bundle takes {needed / MB:,.0f} MB"
        raise ResourceError(problem, "free some space, or choose a folder on another disk", path=folder)


def _fill(order: Order, folder: Path) -> Manifest:
    copy_tokenizer(order.source, folder)
    weights, used = calibrate_weights(order.request, order.export, order.recipe, order.progress)
    order = replace(order, recipe=replace(order.recipe, calibration=used))
    graphs = compile_graphs(order, folder, weights)
    engine: EngineConfig | None = None
    if order.engine is not None:
        from llmc.optimize.tensorrt.engine import compile_engine

        engine = compile_engine(order.engine, folder / graphs["decode"].file, order.export.geometry, order.progress)
    check_unchanged(order.source, order.export)  # the weights are not needed any more
    if engine is not None and runs_here(order.engine, engine):
        return _judge_engine(order, folder, graphs, engine, weights)
    order.progress("hashing")
    manifest = _manifest(order, graphs, engine, folder)
    judges = {"prompts": judge_decoder, "texts": judge_texts, "values": judge_values}
    return judges[find_evidence(order.export.geometry)](order, folder, manifest, weights)


def _judge_engine(
    order: Order, folder: Path, graphs: dict[str, Graph], engine: EngineConfig, weights: Calibrated
) -> Manifest:
    """Judge an engine on its GPU; one that does not pass is compiled again, with another border of attention."""
    from llmc.optimize.tensorrt.engine import compile_engine
    from llmc.optimize.tensorrt.ladder import rewrite_border, try_borders

    def attempt(border: str) -> Manifest:
        made, graph = engine, folder / graphs["decode"].file
        if border != engine.border:
            for name in (BUNDLE_MANIFEST, CHUNKS_FILE):
                (folder / name).unlink(missing_ok=True)
            rewrite_border(graph, border, engine.compute)
            assert order.engine is not None
            made = compile_engine(order.engine, graph, order.export.geometry, order.progress)
        order.progress("hashing")
        manifest = _manifest(order, graphs, replace(made, border=border), folder)
        return judge_decoder(order, folder, manifest, weights)

    return try_borders(engine, attempt, (BuildError, BundleError))


def _manifest(order: Order, graphs: dict[str, Graph], engine: EngineConfig | None, folder: Path) -> Manifest:
    """The manifest before the bundle has run, without quality and self-test."""
    export, target, recipe = order.export, order.target, order.recipe
    installed = order.engine.version if order.engine else import_onnxruntime(order.minimum).__version__
    tokenizer = (folder / TOKENIZER_FILE).stat().st_size
    plan = host_plan(export.geometry, tokenizer) if target.has_gpu else None
    device = device_plan(export.geometry, order.limits, recipe) if target.has_gpu else None
    memory = plan or memory_plan(export.geometry, order.limits, recipe, tokenizer)
    given = 4 * len(order.hidden) * export.geometry.hidden_size * order.limits.prefill_chunk
    write_chunks(folder, sorted(path.name for path in folder.iterdir()))
    return Manifest(
        schema_version=SCHEMA_VERSION,
        llmc_version=__version__,
        graph_contract=GRAPH_CONTRACT_VERSION,
        geometry=replace(export.geometry, long_after=export.geometry.long_after * _switches_ropes(order)),
        source=export.source,
        generation=export.generation,
        notes=(*export.notes, *_notes(order)),
        target=Target(target.name, target.engine, installed, order.minimum, order.unsigned),
        recipe=recipe,
        limits=order.limits,
        memory=memory.add(Part("workspace", given)),
        cache=recipe.cache_type(),
        graphs={name: graph for name, graph in graphs.items() if name != ADAPTERS_FOLDER},
        adapter_graph=graphs.get(ADAPTERS_FOLDER),
        quality=None,
        golden=(),
        golden_tolerance=least_tolerance(order),
        golden_spread=0.0,
        files=file_entries(folder, sorted(path.name for path in folder.iterdir())),
        engine=engine,
        device=device and with_engine(device, folder, engine),
        hidden=order.hidden,
    )


def _switches_ropes(order: Order) -> bool:
    """True if the graph has the factors of short texts and of long ones, where ropes have both."""
    return order.target.name == "cpu" and order.limits.max_context > order.export.geometry.long_after


def _notes(order: Order) -> list[str]:
    """Notes on what makes this bundle worse than it might be."""
    recipe, geometry, notes = order.recipe, order.export.geometry, []
    if 0 < geometry.long_after < order.limits.max_context and not _switches_ropes(order):
        notes.append(
            f"longrope: texts of any length have the factors of those beyond {geometry.long_after} tokens; build with "
            f"--max-context {geometry.long_after} for the factors of shorter ones"
        )
    if geometry.coded and recipe.precision != "source":
        notes.append(
            f"the checkpoint stores the weights of {len(geometry.coded)} linears or mixtures as codes, from which "
            f"those of {recipe.precision} were made: what both roundings lost adds up"
        )
    if recipe.sparsity:
        zeros = "2 of 4 weights" if recipe.sparsity == TWO_OF_FOUR else f"{float(recipe.sparsity):.0%} of the weights"
        notes.append(
            f"{zeros} of the layers' linears were set to zero by the rule {recipe.pruning}: the distance from the "
            "unquantized model counts what that cost. Only engines with sparse kernels (TensorRT's, of 2:4) may be "
            "faster for it"
        )
    turned = recipe.smoothing or recipe.rotated or geometry.coded or not allows(geometry, "calibration")
    if recipe.activations == "per-token" and not turned:
        notes.append(
            "activations of prompts are rounded as they are, since this family's norms do not let them be rotated: "
            "build where torch is installed and without --no-calibration, and they are smoothed"
        )
    return notes
