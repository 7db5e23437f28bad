"""Compare the memory that later steps of a build need with the memory of a machine; planning needs little memory."""

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

# torch, its graph exporter and onnxscript after import, and the nodes of a layer; weights are never read.
EXPORTER, EXPORTED_LAYER = 380_000_000, 3_000_000
# The tokenizers library keeps vocabulary and merges in hash maps: 10 to 16 bytes per byte of tokenizer.json, most for
# files without indentation.
TOKENIZER_FACTOR = 13
EXPORT = "export"
ONE_MEMORY = "run in one memory"  # stands for both runs if CPU and GPU share their memory
LARGER_MACHINE = "free memory or export on a larger machine"  # a lower precision does not help the exporter
LARGEST_BATCH = 1024  # the largest that a build accepts


@dataclass(frozen=True)
class Phase:
    """A memory plan and its verdict; None if the available memory is unknown."""

    plan: MemoryEstimate
    verdict: Verdict | None


@dataclass(frozen=True)
class Memories:
    """The machine's memory and the GPU's (None if no GPU can be queried); ``unified`` if both are the same memory."""

    machine: Available
    gpu: Available | None
    unified: bool

    def judge(self, plan: MemoryEstimate) -> Phase:
        """Compare a plan with its memory; without a verdict if the GPU cannot be queried."""
        memory = self.gpu if plan.phase == GPU else self.machine
        return Phase(plan, None if memory is None else plan.verdict(plan.box or memory.bytes))


@dataclass(frozen=True)
class Ahead:
    """The steps that remain for a folder, in order, and the memory; ``on_gpu`` if the run is on a GPU."""

    phases: tuple[Phase, ...]
    memories: Memories
    on_gpu: bool


def hold(plans: list[MemoryEstimate], memories: Memories, on_gpu: bool) -> Ahead:
    """Compare plans with the memory; the last two are combined if CPU and GPU share it."""
    if memories.unified:
        plans = [*plans[:-2], in_one_memory(*plans[-2:])]
    return Ahead(tuple(memories.judge(plan) for plan in plans), memories, on_gpu)


def export_plan(geometry: Geometry, tokenizer_bytes: int, copied: int = 0) -> MemoryEstimate:
    """Memory to export with fake tensors: libraries, graph and tokenizer, independent of the weights' size.

    Args:
        tokenizer_bytes: size of tokenizer.json, which is read to try it.
        copied: bytes of weights that are converted and written.
    """
    tokenizer, writes = TOKENIZER_FACTOR * tokenizer_bytes, tokenizer_bytes + copied
    parts = {"exporter": EXPORTER, "graph": EXPORTED_LAYER * geometry.layers, "tokenizer": tokenizer}
    limits = Limits(geometry.max_positions, LARGEST_BATCH, 1)
    total = sum(parts.values())
    return MemoryEstimate(EXPORT, parts, geometry.max_positions, 1, limits, lambda context, batch: total, writes=writes)


def plan_bundle(manifest: Manifest, context: int | None, batch: int) -> list[MemoryEstimate]:
    """Memory to run a bundle, on machine and GPU. Raises UsageError: context or batch exceeds the bundle's."""
    limits = manifest.limits
    for name, value, most in (("max_context", context, limits.max_context), ("max_batch", batch, limits.max_batch)):
        if value is not None and value > most:
            raise UsageError(name, f"is {value}, the bundle was built for {most}", "build with a larger one")
    run = plan_load(manifest, context, batch)
    if manifest.stage.borders[1:]:
        run = run.of_part(f"stage {manifest.stage.number}", manifest.list_layers())
    if manifest.device is None:
        return [run]
    # An engine's cache has the size that it was built for, whatever the context.
    device = plan_device(manifest.device, limits, round_up(manifest.engine, run.context), batch)
    return [run, replace(device, needed=partial(device_bytes, manifest))]


def find_memories(on_gpu: bool, memory: int | None, gpu_memory: int | None, unified: bool | None) -> Memories:
    """The memory to plan for: the given bytes, or else what the machine or the cgroup has free.

    The first GPU determines whether it shares the machine's memory, unless ``unified`` is given or ``gpu_memory`` is
    for another GPU. The free part of a shared memory is the larger of the driver's and the system's value.

    Raises:
        UsageError: a GPU's memory without a GPU, or two sizes for one memory.
    """
    if not on_gpu and (gpu_memory is not None or unified is not None):
        argument = "gpu_memory" if gpu_memory is not None else "unified"
        raise UsageError(
            argument, "is for a GPU, and none is planned for", "leave it out, or give a --target with a GPU"
        )
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
    """The first GPU's free memory (None if it cannot be queried); True if it is the machine's memory."""
    gpu = next(iter(probe.probe_driver().devices), None)
    if gpu is None:
        return None, False
    return (None if gpu.free_memory is None else Available(gpu.free_memory, gpu.name)), gpu.integrated


def in_one_memory(host: MemoryEstimate, device: MemoryEstimate) -> MemoryEstimate:
    """Memory to run a bundle whose GPU uses the machine's memory: the sum of both plans."""
    assert device.phase == GPU
    parts = {name: size for name, size in host.parts.items() if size}
    parts |= {f"GPU {name}": size for name, size in device.parts.items()}

    def needed(context: int, batch: int) -> int:
        return host.needed(context, batch) + device.needed(context, batch)

    return replace(device, phase=ONE_MEMORY, parts=parts, needed=needed)


def refusal(phases: Sequence[Phase]) -> str:
    """A sentence about the missing memory, and one with advice; empty if nothing is missing."""
    lacks, advice = [], dict[str, list[str]]()
    for phase in phases:
        plan, verdict = phase.plan, phase.verdict
        if verdict is None or verdict.fits:
            continue
        needed, missing = -(-plan.total // MB), -(-verdict.missing // MB)
        lacks.append(f"to {plan.phase} it needs {needed} MB, {missing} MB are missing")
        remedy = LARGER_MACHINE if plan.phase == EXPORT else what_fits(plan, verdict)
        advice.setdefault(remedy, []).append(f"to {plan.phase}")
    each = [
        f" {' and '.join(names)}: {remedy}" if len(advice) > 1 else f": {remedy}" for remedy, names in advice.items()
    ]
    return f"{'; '.join(lacks)}. Advice{';'.join(each)}" if lacks else ""
