"""A bundle's engine compiled anew, on the machine that is to run it: the graph and its weights are in the bundle."""

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from llmc.bundle import (
    BUNDLE_MANIFEST,
    CHUNKS_FILE,
    EngineConfig,
    FileEntry,
    Manifest,
    Target,
    read_bundle,
    verify_files,
    write_chunks,
    write_manifest,
)
from llmc.errors import BundleError, GpuError, MissingExtraError, ResourceError, UsageError
from llmc.optimize.build import BuildReport
from llmc.optimize.judge.rows import check_rows
from llmc.optimize.order import runs_here
from llmc.optimize.plan.device import with_engine
from llmc.optimize.plan.memory import plan_rebuild
from llmc.optimize.progress import Progress, silent
from llmc.optimize.recipe.engine import EngineRequest
from llmc.optimize.targets import capabilities
from llmc.optimize.tensorrt.engine import compile_engine
from llmc.optimize.tensorrt.ladder import rewrite_border, try_borders
from llmc.optimize.tensorrt.spec import EngineSpec, resolve_engine
from llmc.publish import file_entries, link, refuse_to_overwrite, staging_folder
from llmc.runtime import load
from llmc.runtime.kv.budget import usable_memory
from llmc.runtime.selftest import replay
from llmc.runtime.sessions.tensorrt.library import lists_gpu, nameable_gpus

log = logging.getLogger(__name__)


def rebuild(source: Path, output: Path, *, force: bool = False, progress: Progress = silent) -> BuildReport:
    """Compile the engine of the bundle ``source`` for this machine, replay its golden prompts, and publish ``output``.

    Args:
        source: a bundle for TensorRT or TensorRT-RTX, from any machine.
        output: bundle folder to write; may be ``source`` itself with ``force``.
        force: replace an existing bundle, and only when the new one has passed.
        progress: called with each step and how far it is.

    Raises:
        UsageError: the bundle has no engine.
        BundleError: a file is corrupt, or the new engine computes something else than the bundle recorded.
        BuildError: the library here cannot make an engine of this bundle's graph.
        MissingExtraError, GpuError: the library is not installed, too old or broken, or there is no GPU to build on.
        ResourceError: memory or disk does not suffice.
    """
    start = time.perf_counter()
    manifest = read_bundle(source, engine_matters=False)
    if manifest.engine is None:
        raise UsageError(
            "bundle", f"{source} is for {manifest.target.name}, whose graphs need no engine", "it runs as it is"
        )
    _check_place(source, output, manifest)
    refuse_to_overwrite(output, force)
    for name in verify_files(source, replace(manifest, files=_list_kept(manifest))):
        progress(f"hashed {name}")
    _check_memory(source, manifest)
    with staging_folder(output, force=force) as folder:
        made = _rebuild_engine(source, manifest, manifest.engine, folder, progress)
    return BuildReport(output, made, time.perf_counter() - start)


def _list_kept(manifest: Manifest) -> dict[str, FileEntry]:
    return {name: entry for name, entry in manifest.files.items() if name not in manifest.engine_files()}


def _check_place(source: Path, output: Path, manifest: Manifest) -> None:
    """Refuse to replace a bundle that has additional files, and to write into a bundle."""
    place, bundle = (Path(os.path.realpath(path)) for path in (output, source))
    if place != bundle:
        if place.is_relative_to(bundle):
            raise UsageError("output", f"{output} lies in the bundle {source}", "choose another output folder")
        return
    known = {*manifest.files, BUNDLE_MANIFEST}
    others = sorted(path.name for path in source.iterdir() if path.name not in known)
    if others:
        raise UsageError(
            "bundle",
            f"{source} also holds {others[0]!r}, which is no part of it and would go with the old one",
            "move that away, or write the bundle elsewhere with -o",
        )


def _rebuild_engine(source: Path, manifest: Manifest, old: EngineConfig, folder: Path, progress: Progress) -> Manifest:
    target = capabilities(manifest.target.name)
    asked = EngineRequest(workspace=old.workspace, optimization_level=old.optimization_level)
    spec = resolve_engine(target, manifest.geometry, manifest.recipe, manifest.limits, asked, here=True)
    spec = _for_same_gpus(spec, old)
    kept = _list_kept(manifest)
    for name in kept:
        link(source / name, folder / name)

    def attempt(border: str) -> Manifest:
        return _compile(spec, manifest, replace(old, border=border), folder, progress)

    return try_borders(old, attempt, (_WrongEngineError,))


class _WrongEngineError(BundleError):
    """An engine on its GPU computes something else than the bundle recorded."""


def _compile(spec: EngineSpec, manifest: Manifest, old: EngineConfig, folder: Path, progress: Progress) -> Manifest:
    """Compile the engine in ``folder``, with the border of ``old``, and replay the golden prompts."""
    assert manifest.engine is not None
    kept, target = _list_kept(manifest), manifest.target
    graph = folder / manifest.graphs["decode"].file
    rewritten = [graph.name] if old.border != manifest.engine.border else []
    if rewritten:
        rewrite_border(graph, old.border, old.compute)
    plan = replace(compile_engine(spec, graph, manifest.geometry, progress), border=old.border)
    if old.verified in ("cpu", "float32"):  # golden prompts of this very graph
        plan = replace(plan, verified=old.verified)
    write_chunks(folder, [*kept, plan.file])
    chunks = [CHUNKS_FILE] if (folder / CHUNKS_FILE).exists() else []
    names = [plan.file, plan.log, *rewritten, *chunks]
    files = kept | file_entries(folder, names)
    here = Target(target.name, target.engine, spec.version, manifest.target.engine_minimum)
    device = manifest.device and with_engine(manifest.device, folder, plan)
    runs = runs_here(spec, plan)
    made = replace(manifest, target=here, engine=plan, device=device, files=files)
    write_manifest(made, folder)
    verified = _replay(folder, made, here=runs, progress=progress)
    if verified is not None:
        made = replace(made, engine=replace(plan, verified=verified))
        write_manifest(made, folder)
    return made


def _replay(folder: Path, made: Manifest, *, here: bool, progress: Progress) -> str | None:
    """Replay the golden prompts on the GPU if the engine runs ``here``, else, if possible, the graph on the CPU.
    Returns which one, as in :attr:`EngineConfig.verified`."""
    if not made.golden:
        log.warning("%s has no golden prompts, so nothing was replayed; verify it by hand", made.source.name)
        return None
    try:
        with load(folder, self_test=False, emulate=not here) as model:
            try:
                replay(model, progress)
            except BundleError as error:
                raise (_WrongEngineError(error.problem, error.advice, path=error.path) if here else error) from error
            if here:
                check_rows(model.runner.session, made)
    except (GpuError, MissingExtraError, ResourceError) as error:
        if here:
            raise
        log.warning("the golden prompts were not replayed (%s); llmc verify does so on the GPU", error)
        return None
    return "device" if here else "cpu"


def _for_same_gpus(spec: EngineSpec, old: EngineConfig) -> EngineSpec:
    """Name the same GPUs as the first build if the library builds for named ones, or the GPU here if its engines run
    there."""
    named, possible = old.compute_capabilities, nameable_gpus(spec.library)
    here = spec.gpu and spec.gpu.compute_capability
    if not named or not set(named) <= set(possible) or (here and here not in named and lists_gpu(spec.library, here)):
        return spec
    return replace(spec, config=replace(spec.config, compute_capabilities=named))


def _check_memory(source: Path, manifest: Manifest) -> None:
    plan = plan_rebuild(manifest)
    plan.check(source, usable_memory(plan.parts["engine"]))
