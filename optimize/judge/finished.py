"""Judges a finished bundle: load it, compare it with the unquantized model, and record its results."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import FileEntry, GoldenPrompt, Manifest, read_bundle, write_manifest
from llmc.bundle.model.kinds import find_evidence
from llmc.errors import GpuError, MissingExtraError, ResourceError
from llmc.optimize.calibrate.request import KEPT_BYTES
from llmc.optimize.graphs import compile_graphs
from llmc.optimize.judge.adapters import measure_opened
from llmc.optimize.judge.evaluate import Evaluation, Loss, evaluate, read_windows
from llmc.optimize.judge.gate import check, check_unrounded, list_doubts
from llmc.optimize.judge.golden import prompt_ids, run_golden_prompts, run_long_prompt, tolerance
from llmc.optimize.judge.invariance import measure_guarantees
from llmc.optimize.judge.layers import KL_TOKENS, WINDOWS, LayerError, layer_errors
from llmc.optimize.judge.overflow import check_range
from llmc.optimize.judge.reference import Reference
from llmc.optimize.judge.replay import replay_apart
from llmc.optimize.judge.report import QUALITY_PAGE, list_better, render
from llmc.optimize.judge.rows import check_rows
from llmc.optimize.judge.vision import judge_tower
from llmc.optimize.order import Order, runs_here
from llmc.optimize.weights.file import round_to_bfloat16
from llmc.optimize.weights.store import Calibrated
from llmc.origin import check_unchanged, copy_tokenizer
from llmc.publish import file_entries
from llmc.runtime import Generator, load
from llmc.runtime.host import disk_cache
from llmc.runtime.selftest.values import LOGIT_TOLERANCE, LOGIT_TOLERANCES, VECTOR_TOLERANCE

log = logging.getLogger(__name__)


def least_tolerance(order: Order) -> float:
    """The smallest tolerance of golden results on another machine."""
    if find_evidence(order.export.geometry) == "texts":
        return VECTOR_TOLERANCE
    return LOGIT_TOLERANCES[order.recipe.compute] if order.target.has_gpu else LOGIT_TOLERANCE


def judge_decoder(order: Order, folder: Path, manifest: Manifest, weights: Calibrated) -> Manifest:
    """Run the golden prompts and a text, compare with the unquantized model, write the manifest, and replay it.

    Raises:
        BuildError: the quality is beyond the budget, or a fresh process that loads the bundle computes other results.
        ResourceError: it cannot be run here, yet a budget is to be kept.
    """
    write_manifest(manifest, folder)
    with ExitStack() as stack:
        try:
            model, verified = _open_model(order, folder, manifest, weights, stack)
        except ResourceError as error:
            if not order.target.has_gpu or order.request.judged:
                raise
            log.warning("%s; the bundle is published without golden prompts: verify it on its GPU", error)
            return manifest
        text = read_windows(order.request.text, model) if order.request.judged else None
        if order.target.has_gpu and verified != "device":
            order.progress("looking for values beyond float16")
            check_range(folder, manifest, [*prompt_ids(model), *(text.ids[:1].tolist() if text else [])])
        golden = run_golden_prompts(model, order.source, order.progress)
        long = _run_long_prompt(order, folder, model, verified) if manifest.engine is not None else ()
        quality, allowed = golden.quality, tolerance(manifest.golden_tolerance, golden.spread)
        check_unrounded(quality, order.recipe)
        if text is not None:
            kept = disk_cache.entry("reference", order.export.source.fingerprint)
            judged = evaluate(model, text, reference=order.source, cache=kept, greedy=False, progress=order.progress)
            matched, of = quality.greedy_match, quality.greedy_tokens
            quality = replace(judged.quality, greedy_match=matched, greedy_tokens=of)
            seen = partial(_layer_errors, order, folder, manifest, weights, text.ids)
            check(quality, order.recipe, seen)
            disk_cache.prune("reference", KEPT_BYTES)
        own_text = quality if text is not None and text.default else golden.quality
        notes = list_doubts(own_text, order.export.geometry.vocab_size)
        if verified == "device":
            order.progress("comparing calls of different sizes")
            manifest = measure_guarantees(model.runner.session, manifest)
            manifest = measure_opened(model.runner.session, manifest)
            if order.target.has_gpu:
                check_rows(model.runner.session, replace(manifest, golden_tolerance=allowed))
        manifest = judge_tower(model, order.source, manifest, order.progress)
    finished = replace(
        manifest,
        notes=(*manifest.notes, *notes),
        golden=(*golden.cases, *long),
        golden_tolerance=allowed,
        golden_spread=golden.spread,
        quality=quality,
        engine=manifest.engine and replace(manifest.engine, verified=verified),
    )
    write_manifest(finished, folder)
    if verified != "float32":  # only a substitute was run and it is gone: the bundle itself cannot run here
        order.progress("replaying the golden prompts as a first load does")
        replay_apart(folder, emulate=verified == "cpu")
    if order.request.report is not None and text is not None:
        finished = _add_page(order, folder, finished, weights, text.ids, judged.losses)
    return finished


def _add_page(
    order: Order,
    folder: Path,
    manifest: Manifest,
    weights: Calibrated,
    ids: NDArray[np.int64],
    losses: tuple[Loss, ...],
) -> Manifest:
    """Write :data:`QUALITY_PAGE` into a finished bundle, and list it in the manifest."""
    assert manifest.quality is not None and order.request.report is not None
    layers = _layer_errors(order, folder, manifest, weights, ids[:, :KL_TOKENS], kl=True)
    measured, better = Evaluation(manifest.quality, losses), list_better(folder, manifest)
    page = render(manifest, measured, layers, better, order.request.report)
    (folder / QUALITY_PAGE).write_text(page, encoding="utf-8")
    listed = replace(manifest, files={**manifest.files, **file_entries(folder, [QUALITY_PAGE])})
    write_manifest(listed, folder)
    return listed


def _run_long_prompt(order: Order, folder: Path, model: Generator, verified: str) -> tuple[GoldenPrompt, ...]:
    """The long golden prompt, computed on the CPU if memory suffices: a GPU's replay is compared with it."""
    order.progress("running a long golden prompt")
    if verified == "device" and order.recipe.compute != "bfloat16":
        try:
            with load(folder, self_test=False, emulate=True) as graph:
                return run_long_prompt(graph)
        except (MissingExtraError, ResourceError) as error:
            log.info("%s; the long golden prompt is recorded on the GPU", error)
    return run_long_prompt(model)


def _layer_errors(
    order: Order, folder: Path, manifest: Manifest, weights: Calibrated, ids: NDArray[np.int64], kl: bool = False
) -> tuple[LayerError, ...]:
    """Errors of the layers; of a graph for a GPU, computed in float32 like the reference."""
    with TemporaryDirectory(prefix=".float32.", dir=folder) as work:
        if order.target.has_gpu:
            folder = _in_float32(order, Path(work), manifest, weights)
            manifest = read_bundle(folder)
        return layer_errors(folder, manifest, Reference(order.source), ids[:WINDOWS], order.progress, kl=kl)


def _open_model(
    order: Order, folder: Path, manifest: Manifest, weights: Calibrated, stack: ExitStack
) -> tuple[Generator, str]:
    """Load the bundle on its device, or else its graph on the CPU; return the model and :attr:`EngineConfig.verified`.
    ``stack`` closes the model, and removes what was only made to be judged."""
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


def _in_float32(order: Order, folder: Path, manifest: Manifest, weights: Calibrated) -> Path:
    """The same graph in float32, for no CPU kernel supports bfloat16."""
    recipe = replace(order.recipe, compute="float32", cache="float32")
    graphs = compile_graphs(replace(order, recipe=recipe), folder, weights)
    copy_tokenizer(order.source, folder)
    check_unchanged(order.source, order.export)  # the weights have been read now
    files = {path.name: FileEntry(path.stat().st_size, "") for path in folder.iterdir()}  # a temporary copy
    stand_in = replace(manifest, recipe=recipe, cache="float32", graphs=graphs, engine=None, files=files)
    write_manifest(stand_in, folder)
    return folder
