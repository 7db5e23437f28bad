"""A bundle's engine compiled anew, on the machine that is to run it: the graph and its weights are in the bundle."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

from llmc.bundle import EnginePlan, ExportManifest, Manifest, Target, read_bundle, verify_files, write_manifest
from llmc.errors import BuildError, UsageError
from llmc.optimize.build import BuildReport, runs_here
from llmc.optimize.device_plan import with_engine
from llmc.optimize.engine import ALL_FORMS, compile_engine, resolve_engine
from llmc.optimize.engine_request import EngineRequest
from llmc.optimize.plan import plan_build
from llmc.optimize.progress import Progress, silent
from llmc.optimize.targets import capabilities
from llmc.publish import file_entries, refuse_to_overwrite, staged
from llmc.runtime import load
from llmc.runtime.memory import usable_memory
from llmc.runtime.selftest import replay


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
    manifest = read_bundle(source)
    if manifest.engine is None:
        raise UsageError(f"{source} is for {manifest.target.name}, whose graphs need no engine; it runs as it is")
    refuse_to_overwrite(output, force)
    for name in verify_files(source, manifest):
        progress(f"hashed {name}")
    _check_memory(source, manifest)
    with staged(output, force=force) as folder:
        made = _rebuilt(source, manifest, manifest.engine, folder, progress)
    return BuildReport(output, made, time.perf_counter() - start)


def _rebuilt(source: Path, manifest: Manifest, old: EnginePlan, folder: Path, progress: Progress) -> Manifest:
    target = capabilities(manifest.target.name)
    request = EngineRequest(
        form=_form(source, old, target.engine),
        hardware_compatibility=old.hardware_compatibility,
        version_compatible=old.version_compatible,
        stripped=old.stripped,
    )
    spec = resolve_engine(target, manifest.limits, request)
    replaced = {old.file, old.select, old.inspector}
    kept = {name: entry for name, entry in manifest.files.items() if name not in replaced}
    for name in kept:
        _link(source / name, folder / name)
    export = ExportManifest(
        manifest.schema_version,
        manifest.llmc_version,
        manifest.graph_contract,
        manifest.geometry,
        manifest.source,
        manifest.generation,
    )
    plan = compile_engine(spec, folder / manifest.graphs["decode"].file, export, manifest.recipe, progress)
    if old.verified == "cpu":  # golden prompts of this very graph
        plan = replace(plan, verified="cpu")
    files = kept | file_entries(folder, [plan.file, plan.select, plan.inspector])
    here = Target(target.name, target.engine, spec.version, manifest.target.engine_minimum)
    device = manifest.device and with_engine(manifest.device, folder, plan)
    made = replace(manifest, target=here, engine=plan, device=device, files=files)
    write_manifest(made, folder)
    if runs_here(spec, plan) and made.golden:
        with load(folder, self_test=False) as model:
            replay(model, progress)
        made = replace(made, engine=replace(plan, verified="device"))
        write_manifest(made, folder)
    return made


def _check_memory(source: Path, manifest: Manifest) -> None:
    """Refuse to build what does not fit in the machine's memory; nothing is calibrated this time."""
    recipe = replace(manifest.recipe, scheme="rtn", smoothing=0.0, sparsity="none", activations="none")
    plan = plan_build(manifest.geometry, recipe, manifest.limits, 0, device=manifest.device)
    plan.check(source, usable_memory(plan.parts["engine"]))


def _form(source: Path, old: EnginePlan, engine: str) -> str:
    """The forms native and lengths are made of one graph, primitives of another."""
    from llmc.optimize.tensorrt.abilities import abilities
    from llmc.runtime.engine_library import load_library

    possible = abilities(load_library(engine)).forms
    if old.form not in possible:
        other = next(form for form in ALL_FORMS if form in possible)
        raise BuildError(
            f"{source} holds a graph of the form {old.form}, {engine} here takes {', '.join(possible)}; build the "
            f"bundle again from its export with --form {other}"
        )
    return old.form


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
