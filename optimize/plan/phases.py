"""Memory of building a bundle from an export or a checkpoint, and of running what that gives."""

from dataclasses import replace
from pathlib import Path

from llmc.bundle import EXPORT_MANIFEST, TOKENIZER_FILE, Geometry
from llmc.bundle.model.kinds import kinds_of
from llmc.errors import BundleError, UsageError
from llmc.optimize.calibrate.request import DEFAULT_LENGTH, DEFAULT_SAMPLES
from llmc.optimize.plan.borders import choose_borders
from llmc.optimize.plan.device import device_plan, host_plan
from llmc.optimize.plan.memory import bundle_bytes, memory_plan, plan_build
from llmc.optimize.plan.time import estimate_build
from llmc.optimize.recipe import BuildRequest, check_context, settle
from llmc.optimize.targets import Capabilities, capabilities_for
from llmc.runtime.bench.phases import LARGEST_BATCH, export_plan
from llmc.runtime.host.machine import usable_threads
from llmc.runtime.kv.budget import GRAPHS, MemoryEstimate, Sizes, plan_device, plan_run


def plan_phases(
    request: BuildRequest, geometry: Geometry, *, unified: bool = False, gpu_memory: int | None = None, copied: int = 0
) -> list[MemoryEstimate]:
    """Plan the memory of each phase from an export or a checkpoint to tokens.

    Args:
        unified: count what building takes on a GPU, too.
        gpu_memory: bytes of the GPU that the bundle is for; None for the one here.
        copied: bytes of weights that exporting the checkpoint copies.
    """
    path, given = request.source, request.max_context
    request = request.filled()
    if given is not None:
        check_context(given, geometry.max_positions)
    exporting = [] if (path / EXPORT_MANIFEST).exists() else [export_plan(geometry, _tokenizer_bytes(path), copied)]
    abilities = capabilities_for(request.target, request.gpu_memory if gpu_memory is None else gpu_memory)
    chosen, limits = settle(request, geometry, abilities)
    boxes = request.stages or ()
    tokenizer, windows, batch = _tokenizer_bytes(path), (DEFAULT_SAMPLES, DEFAULT_LENGTH), limits.max_batch
    wider = replace(limits, max_batch=LARGEST_BATCH)
    cuts = choose_borders(geometry, limits, chosen, tokenizer, boxes) if boxes else []
    if not abilities.has_gpu:
        on_disk = bundle_bytes(geometry, chosen, limits, tokenizer)
        judged = bool(chosen.budget)
        build = plan_build(geometry, chosen, limits, tokenizer, *windows, judged=judged)
        seconds = estimate_build(geometry, chosen, DEFAULT_SAMPLES * DEFAULT_LENGTH, usable_threads())
        run = plan_run(memory_plan(geometry, limits, chosen, tokenizer), wider, limits.max_context, batch)
        run = replace(run, graphs=_compare_graphs(geometry, request, abilities, tokenizer))
        runs = [
            plan_run(cut.memory, wider, limits.max_context, batch).of_part(f"stage {number}", cut.layers, box)
            for number, (cut, box) in enumerate(zip(cuts, boxes, strict=True))
        ]
        build = replace(build, seconds=seconds, writes=on_disk, precision=chosen.precision)
        return [*exporting, build, *(runs or [run])]
    device = device_plan(geometry, limits, chosen)
    on_disk = tokenizer + device["weights"].fixed * (2 if abilities.makes_engine else 1)  # an engine holds them again
    one_memory = unified and abilities.makes_engine  # the engine's builder runs kernels on the GPU
    build = plan_build(geometry, chosen, limits, tokenizer, *windows, device=device, one_memory=one_memory)
    return [
        *exporting,
        replace(build, writes=on_disk, precision=chosen.precision),
        plan_run(host_plan(geometry, tokenizer), wider, limits.max_context, batch),
        plan_device(device, wider, limits.max_context, batch),
    ]


def _compare_graphs(
    geometry: Geometry, request: BuildRequest, abilities: Capabilities, tokenizer: int
) -> dict[str, Sizes]:
    """Compare what a bundle takes with two graphs and with one; empty where there is no choice."""
    compared = dict[str, Sizes]()
    if any(kind.one_graph for kind in kinds_of(geometry)):
        return compared
    for phases, name in GRAPHS.items():
        try:
            recipe, limits = settle(replace(request, phases=phases), geometry, abilities)
        except UsageError:
            return {}
        parts = memory_plan(geometry, limits, recipe, tokenizer).parts(limits.max_context, limits.max_batch)
        compared[name] = Sizes(bundle_bytes(geometry, recipe, limits, tokenizer), sum(parts.values()))
    return compared


def _tokenizer_bytes(path: Path) -> int:
    try:
        return (path / TOKENIZER_FILE).stat().st_size
    except OSError as error:
        raise BundleError(f"{path / TOKENIZER_FILE} cannot be read ({error.strerror}); it is needed") from error
