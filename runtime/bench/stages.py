"""Memory of the stages ahead, compared with what there is; planning a bundle needs no more than a device has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from llmc.bundle import Geometry, Limits, Manifest
from llmc.errors import UsageError
from llmc.runtime.host import probe
from llmc.runtime.host.machine import Available, memory_here
from llmc.runtime.kv.budget import (
    GPU,
    MB,
    MemoryEstimate,
    Verdict,
    device_bytes,
    plan_device,
    plan_load,
    round_up,
    what_fits,
)

# torch, its graph exporter and onnxscript once imported, and what a layer's nodes take; weights are never read.
EXPORTER, EXPORTED_LAYER = 380_000_000, 3_000_000
# The tokenizers library keeps vocabulary and merges in hash maps: 10 ... 16 bytes for each of tokenizer.json's, most in
# files without indentation.
TOKENIZER_FACTOR = 13
EXPORT = "export"
ONE_MEMORY = "run in one memory"  # the stage that stands for both of a run where CPU and GPU share their memory
LARGER_MACHINE = "free memory or export on a larger machine"  # no precision makes the exporter smaller
LARGEST_BATCH = 1024  # that a build can be asked for


@dataclass(frozen=True)
class Stage:
    """A plan and its verdict; None if the available memory is unknown."""

    plan: MemoryEstimate
    verdict: Verdict | None


@dataclass(frozen=True)
class Memories:
    """The machine's memory and the GPU's, None where no GPU can be asked; ``unified`` where both are the same bytes."""

    machine: Available
    gpu: Available | None
    unified: bool

    def stage(self, plan: MemoryEstimate) -> Stage:
        """Compare a plan with the memory that it is for; without a verdict for a GPU that cannot be asked."""
        memory = self.gpu if plan.stage == GPU else self.machine
        return Stage(plan, None if memory is None else plan.verdict(plan.box or memory.bytes))


@dataclass(frozen=True)
class Ahead:
    """The stages that lie ahead of a folder, in their order, and the memory there is; ``on_gpu`` of a run on a GPU."""

    stages: tuple[Stage, ...]
    memories: Memories
    on_gpu: bool


def hold(plans: list[MemoryEstimate], found: Memories, on_gpu: bool) -> Ahead:
    """Compare plans with the memory there is; the last two are one where CPU and GPU share it."""
    if found.unified:
        plans = [*plans[:-2], in_one_memory(*plans[-2:])]
    return Ahead(tuple(found.stage(plan) for plan in plans), found, on_gpu)


def export_plan(geometry: Geometry, tokenizer_bytes: int, copied: int = 0) -> MemoryEstimate:
    """Exporting with fake tensors: libraries, graph and tokenizer, whatever the weights weigh.

    Args:
        tokenizer_bytes: of tokenizer.json, which is read to try it.
        copied: bytes of weights that are converted and written.
    """
    tokenizer, writes = TOKENIZER_FACTOR * tokenizer_bytes, tokenizer_bytes + copied
    parts = {"exporter": EXPORTER, "graph": EXPORTED_LAYER * geometry.layers, "tokenizer": tokenizer}
    limits = Limits(geometry.max_positions, LARGEST_BATCH, 1)
    total = sum(parts.values())
    return MemoryEstimate(EXPORT, parts, geometry.max_positions, 1, limits, lambda context, batch: total, writes=writes)


def plan_bundle(manifest: Manifest, context: int | None, batch: int) -> list[MemoryEstimate]:
    """Running a bundle, on the machine and on its GPU. Raises UsageError: context or batch is beyond the bundle's."""
    limits = manifest.limits
    for name, value, most in (("max_context", context, limits.max_context), ("max_batch", batch, limits.max_batch)):
        if value is not None and value > most:
            raise UsageError(name, f"is {value}, the bundle was built for {most}", "build with a larger one")
    run = plan_load(manifest, context, batch)
    if manifest.stage.borders[1:]:
        run = run.of_stage(manifest.stage.number, manifest.list_layers())
    if manifest.device is None:
        return [run]
    # An engine's cache has the size that it was built for, whatever the context.
    device = plan_device(manifest.device, limits, round_up(manifest.engine, run.context), batch)
    return [run, replace(device, needed=partial(device_bytes, manifest))]


def find_memories(on_gpu: bool, memory: int | None, gpu_memory: int | None, unified: bool | None) -> Memories:
    """The memory to plan for: bytes that are given, or else what the machine or the cgroup leaves.

    The first GPU tells if it shares the machine's memory, unless ``unified`` does, or ``gpu_memory`` is of another one.
    Free in one memory is what its driver or the system calls free, whichever is more.

    Raises:
        UsageError: a GPU's memory without a GPU, or two sizes of one memory.
    """
    if not on_gpu and (gpu_memory is not None or unified is not None):
        given = "gpu_memory" if gpu_memory is not None else "unified"
        raise UsageError(given, "is for a GPU, and none is planned for", "leave it out, or give a --target with a GPU")
    here = memory_here() if memory is None else Available(memory, "--memory")
    if not on_gpu:
        return Memories(here, None, False)
    there, integrated = _first_gpu() if gpu_memory is None else (Available(gpu_memory, "--gpu-memory"), False)
    if unified is False or not (unified or integrated):
        return Memories(here, there, False)
    if memory is not None and gpu_memory is not None:
        raise UsageError(
            "gpu_memory", "is given beside memory, and they are one memory", "give one of them, or --separate-memory"
        )
    if there is None or memory is not None or not (integrated or gpu_memory):
        return Memories(here, here, True)
    one = there if gpu_memory else max(there, here, key=lambda size: size.bytes)
    return Memories(one, one, True)


def _first_gpu() -> tuple[Available | None, bool]:
    """Its free memory, None where it cannot be asked; true if that is the machine's."""
    gpu = next(iter(probe.probe_driver().devices), None)
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
    """A sentence that says what is missing, and one that says what can be done; empty where nothing is missing."""
    lacks, advice = [], dict[str, list[str]]()
    for stage in stages:
        plan, verdict = stage.plan, stage.verdict
        if verdict is None or verdict.fits:
            continue
        needed, missing = -(-plan.total // MB), -(-verdict.missing // MB)
        lacks.append(f"to {plan.stage} it needs {needed} MB, {missing} MB are missing")
        what = LARGER_MACHINE if plan.stage == EXPORT else what_fits(plan, verdict)
        advice.setdefault(what, []).append(f"to {plan.stage}")
    each = [f" {' and '.join(names)}: {what}" if len(advice) > 1 else f": {what}" for what, names in advice.items()]
    return f"{'; '.join(lacks)}. Advice{';'.join(each)}" if lacks else ""
