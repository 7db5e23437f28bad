"""Memory of each stage from a checkpoint, an export or a bundle to tokens, held against what there is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from llmc.bundle import EXPORT_MANIFEST, TOKENIZER_FILE, Geometry, Limits, Manifest, read_bundle
from llmc.errors import BundleError, MissingExtraError, UsageError
from llmc.optimize.recipe import LARGEST_BATCH, Request, check_context, find_recipe, read_recipe, resolve
from llmc.optimize.targets import capabilities
from llmc.runtime.host import probe
from llmc.runtime.host.machine import Available
from llmc.runtime.kv.budget import (
    GPU,
    MB,
    MemoryEstimate,
    Verdict,
    device_bytes,
    memory_to_use,
    plan_device,
    plan_load,
    plan_run,
    rounded_up,
    what_fits,
)

# torch, its graph exporter and onnxscript once imported, and what a layer's nodes take; weights are never read.
EXPORTER, EXPORTED_LAYER = 380_000_000, 3_000_000
EXPORT = "export"
ONE_MEMORY = "run in one memory"  # the stage that stands for both of a run where CPU and GPU share their memory
LARGER_MACHINE = "free memory or export on a larger machine"  # no precision makes the exporter smaller


@dataclass(frozen=True)
class Stage:
    """A plan and its verdict, None where nobody knows what there is."""

    plan: MemoryEstimate
    verdict: Verdict | None


@dataclass(frozen=True)
class Memories:
    """The memory that stages are held against: the machine's and the GPU's, None where no GPU can be asked.

    ``unified`` tells that both are the same bytes, as on a Jetson.
    """

    machine: Available
    gpu: Available | None
    unified: bool

    def stage(self, plan: MemoryEstimate) -> Stage:
        """Hold a plan against the memory that it is for; without a verdict for a GPU that cannot be asked."""
        memory = self.gpu if plan.stage == GPU else self.machine
        return Stage(plan, None if memory is None else plan.verdict(memory.bytes))


@dataclass(frozen=True)
class Ahead:
    """The stages that lie ahead of a folder, in their order, and the memory there is; ``on_gpu`` of a run on a GPU."""

    stages: tuple[Stage, ...]
    memories: Memories
    on_gpu: bool


def plan_ahead(
    path: Path,
    geometry: Geometry | None,
    *,
    context: int | None = None,
    batch: int = 1,
    precision: str | None = None,
    recipe: str | None = None,
    target: str = "cpu",
    memory: int | None = None,
    gpu_memory: int | None = None,
    unified: bool | None = None,
) -> Ahead:
    """MemoryEstimate what lies ahead of the bundle ``path``, or of an export or a checkpoint with this ``geometry``.

    Args:
        context, batch: tokens in the cache, and sequences at a time.
        precision, recipe, target: of the build.
        memory, gpu_memory: bytes, in place of what machine and GPU have.
        unified: true if both are the same memory; by default, what the GPU here says.

    Raises:
        UsageError: a value is out of range, or has no meaning here.
        LlmcError: the folder is broken.
    """
    manifest = read_bundle(path) if geometry is None else None
    on_gpu = capabilities(target).has_gpu if manifest is None else manifest.device is not None
    if not on_gpu and (gpu_memory is not None or unified is not None):
        given = "--gpu-memory" if gpu_memory is not None else f"--{'unified' if unified else 'separate'}-memory"
        raise UsageError(f"{given} is for a GPU, and none is planned for; leave it out, or give a --target with a GPU")
    found = memories(memory, gpu_memory, unified) if on_gpu else Memories(memory_to_use(memory), None, False)
    if geometry is None:
        assert manifest is not None
        if precision or recipe or target != "cpu":
            raise UsageError(f"{path} is built already; precision, recipe and target are for an export or a checkpoint")
        plans = _of_bundle(manifest, context, batch, found.unified)
    else:
        asked = Request(precision=precision, max_context=context, max_batch=batch)
        file = find_recipe(recipe)
        asked = asked.over(read_recipe(file)) if file else asked
        if context is not None:
            check_context("context", context, geometry.max_positions)
        plans = [] if (path / EXPORT_MANIFEST).exists() else [export_plan(geometry)]
        plans += _of_build(path, geometry, asked, target, found.unified)
    if found.unified:
        plans = [*plans[:-2], in_one_memory(*plans[-2:])]
    return Ahead(tuple(found.stage(plan) for plan in plans), found, on_gpu)


def export_plan(geometry: Geometry) -> MemoryEstimate:
    """Exporting with fake tensors: libraries and the graph, whatever the weights weigh."""
    parts = {"exporter": EXPORTER, "graph": EXPORTED_LAYER * geometry.layers}
    limits = Limits(geometry.max_positions, LARGEST_BATCH, 1)
    total = sum(parts.values())
    return MemoryEstimate(EXPORT, parts, geometry.max_positions, 1, limits, lambda context, batch: total)


def _of_bundle(manifest: Manifest, context: int | None, batch: int, unified: bool) -> list[MemoryEstimate]:
    limits = manifest.limits
    for name, value, most in (("context", context, limits.max_context), ("batch", batch, limits.max_batch)):
        if value is not None and value > most:
            raise UsageError(f"{name} is {value}, the bundle was built for {most}; build with a larger --max-{name}")
    run = plan_load(manifest, context, batch)
    if manifest.device is None:
        return [run]
    # An engine's cache has the size that it was built for, whatever the context.
    device = plan_device(manifest.device, limits, rounded_up(manifest.engine, run.context), batch)
    return [*_rebuilding(manifest, unified), run, replace(device, needed=partial(device_bytes, manifest))]


def _rebuilding(manifest: Manifest, unified: bool) -> list[MemoryEstimate]:
    """Making the engine that a bundle lacks; none where what builds is not installed."""
    if manifest.engine is None or manifest.engine.file:
        return []
    try:
        from llmc.optimize.plan.memory import plan_rebuild
    except MissingExtraError:
        return []
    return [plan_rebuild(manifest, unified)]


def _of_build(path: Path, geometry: Geometry, asked: Request, target: str, unified: bool) -> list[MemoryEstimate]:
    """Building with the defaults of a build, and running what it gives."""
    from llmc.optimize.calibrate.request import DEFAULT_LENGTH, DEFAULT_SAMPLES
    from llmc.optimize.plan.device import device_plan, host_plan
    from llmc.optimize.plan.memory import memory_plan, plan_build

    abilities = capabilities(target)
    chosen, limits = resolve(asked, abilities, geometry.max_positions, "plan")
    tokenizer, calibrated, batch = _tokenizer_bytes(path), (DEFAULT_SAMPLES, DEFAULT_LENGTH), limits.max_batch
    wider = replace(limits, max_batch=LARGEST_BATCH)
    if not abilities.has_gpu:
        build = plan_build(geometry, chosen, limits, tokenizer, *calibrated, judged=bool(chosen.budget))
        return [build, plan_run(memory_plan(geometry, limits, chosen, tokenizer), wider, limits.max_context, batch)]
    device = device_plan(geometry, limits, chosen)
    one_memory = unified and abilities.makes_engine  # the engine's builder runs kernels on the GPU
    return [
        plan_build(geometry, chosen, limits, tokenizer, *calibrated, device=device, one_memory=one_memory),
        plan_run(host_plan(geometry, tokenizer), wider, limits.max_context, batch),
        plan_device(device, wider, limits.max_context, batch),
    ]


def _tokenizer_bytes(path: Path) -> int:
    try:
        return (path / TOKENIZER_FILE).stat().st_size
    except OSError as error:
        raise BundleError(f"{path / TOKENIZER_FILE} cannot be read ({error.strerror}); it is needed") from error


# --------------------------------------------------------------------------------------------------------------- memory


def memories(memory: int | None, gpu_memory: int | None, unified: bool | None) -> Memories:
    """The memory that a plan for a GPU is held against: bytes that are given, or else what is free.

    Whether CPU and GPU share one memory is asked of the first GPU, unless ``unified`` tells, or ``gpu_memory`` tells of
    another one. Free in one memory is what its driver or the system calls free, whatever is more, as for sessions.

    Raises:
        UsageError: two sizes of one memory.
    """
    here = memory_to_use(memory)
    there, integrated = _first_gpu() if gpu_memory is None else (Available(gpu_memory, "--gpu-memory"), False)
    if unified is False or not (unified or integrated):
        return Memories(here, there, False)
    if memory is not None and gpu_memory is not None:
        raise UsageError("one memory has one size: give --memory or --gpu-memory, or --separate-memory")
    if there is None or memory is not None or not (integrated or gpu_memory):
        return Memories(here, here, True)
    one = there if gpu_memory else max(there, here, key=lambda size: size.bytes)
    return Memories(one, one, True)


def _first_gpu() -> tuple[Available | None, bool]:
    """Its free memory, None where it cannot be asked; true if that is the machine's."""
    gpu = next(iter(probe.probe().driver.devices), None)
    if gpu is None:
        return None, False
    return (None if gpu.free_memory is None else Available(gpu.free_memory, gpu.name)), gpu.integrated


def in_one_memory(host: MemoryEstimate, device: MemoryEstimate) -> MemoryEstimate:
    """Running a bundle whose GPU uses the machine's own memory: what both plans take, together."""
    assert device.stage == GPU
    parts = {name: size for name, size in host.parts.items() if size}
    parts |= {f"GPU {name}": size for name, size in device.parts.items()}

    def needed(context: int, batch: int) -> int:
        return host.needed(context, batch) + device.needed(context, batch)

    return replace(device, stage=ONE_MEMORY, parts=parts, needed=needed)


def refusal(stages: Sequence[Stage]) -> str:
    """A sentence that says what is missing, and another one what can be done; what the parts are is in the table.

    Empty where no stage is known not to fit.
    """
    lacks, advice = [], dict[str, list[str]]()
    for stage in stages:
        plan, verdict = stage.plan, stage.verdict
        if verdict is None or verdict.fits:
            continue
        needed, missing = -(-plan.total // MB), -(-verdict.missing // MB)
        lacks.append(f"to {plan.stage} it needs {needed} MB, {missing} MB are missing")
        what = LARGER_MACHINE if plan.stage == EXPORT else what_fits(plan, verdict)
        advice.setdefault(what, []).append(f"to {plan.stage}")
    if len(advice) <= 1:
        return "".join(f"{'; '.join(lacks)}. Advice: {what}" for what in advice)
    each = [f"{' and '.join(names)}: {what}" for what, names in advice.items()]
    return f"{'; '.join(lacks)}. Advice {'; '.join(each)}"
