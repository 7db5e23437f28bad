"""``llmc plan``: will it fit? Memory of each stage that lies ahead, before anything is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmc import bundle
from llmc.cli import output as show
from llmc.cli.build import PRECISIONS, chosen_precision, find_recipe
from llmc.cli.options import EXISTING_FOLDER, debug_option, json_option, memory_option, size
from llmc.errors import BundleError, LlmcError, MissingExtraError, ResourceError, UsageError

if TYPE_CHECKING:
    from llmc.bundle import Geometry, Manifest
    from llmc.runtime.host.machine import Available
    from llmc.runtime.kv.budget import Plan, Verdict

# torch, its graph exporter and onnxscript once imported, and what a layer's nodes take; weights are never read.
EXPORTER, EXPORTED_LAYER = 380_000_000, 3_000_000
EXPORT = "export"
ONE_MEMORY = "run in one memory"  # the stage that stands for both of a run where CPU and GPU share their memory
NO_GPU = "GPU: none can be asked here; say with --gpu-memory what the one has that it is for"
UNKNOWN = "not known whether it fits"
LARGER_MACHINE = "free memory or export on a larger machine"  # no precision makes the exporter smaller
MIN_CONTEXT, LARGEST_BATCH = 2, 1024  # what a build can be asked for


@dataclass(frozen=True)
class Stage:
    """A plan and whether it fits: None where nobody knows what there is."""

    plan: Plan
    verdict: Verdict | None

    def to_json(self) -> dict[str, object]:
        """Numbers only; None for all that follows from a limit that is not known."""
        plan = self.plan
        known = ("fits", "missing", "largest_context", "largest_batch")
        return {
            "stage": plan.stage,
            "context": plan.context,
            "batch": plan.batch,
            "parts": plan.parts,
            "total": plan.total,
            **{name: getattr(self.verdict, name) if self.verdict else None for name in known},
        }


@dataclass(frozen=True)
class Memories:
    """What stages are held against: the machine's memory and the GPU's, None where no GPU can be asked.

    ``unified`` tells that both are the same bytes, as on a Jetson.
    """

    machine: Available
    gpu: Available | None
    unified: bool

    def stage(self, plan: Plan) -> Stage:
        """A plan held against the memory that it is for; without a verdict for a GPU that cannot be asked."""
        from llmc.runtime.kv.budget import GPU

        memory = self.gpu if plan.stage == GPU else self.machine
        return Stage(plan, None if memory is None else plan.verdict(memory.bytes))

    def to_json(self) -> dict[str, object]:
        """Of a bundle for a GPU."""
        return {"gpu": self.gpu, "unified_memory": self.unified}


@click.command("plan")
@click.argument("path", type=EXISTING_FOLDER)
@click.option("--context", type=click.IntRange(min=1), help="Tokens in the cache.  [default: the maximum]")
@click.option("--batch", type=click.IntRange(min=1), default=1, help="Sequences at a time.")
@click.option("--target", default="cpu", help="Plan a build for cpu, cuda, tensorrt or tensorrt-rtx.")
@click.option("--fp32", is_flag=True, help="Plan a build in full precision.")
@click.option("--fp16", is_flag=True, help="Plan a build in 16 bits.")
@click.option("--bf16", is_flag=True, help="Plan a build in bfloat16.")
@click.option("--int8", is_flag=True, help="Plan a build with 8-bit weights.  [default]")
@click.option("--int4", is_flag=True, help="Plan a build with 4-bit weights.")
@click.option("--fp8", is_flag=True, help="Plan a build with weights in float8.")
@click.option("--recipe", help="Plan a build by this TOML file, or by a recipe that comes with llmc.")
@memory_option
@click.option("--gpu-memory", type=size, help="Memory that the GPU has, as 8GB.  [default: what it says]")
@click.option(
    "--unified-memory/--separate-memory",
    "unified",
    default=None,
    help="Whether CPU and GPU share one memory, as on a Jetson.  [default: what the GPU here says]",
)
@json_option
@debug_option
def plan_command(
    path: Path,
    target: str,
    context: int | None,
    batch: int,
    recipe: str | None,
    memory: int | None,
    gpu_memory: int | None,
    unified: bool | None,
    as_json: bool,
    **precisions: bool,
) -> None:
    """Say what memory each stage from PATH, a checkpoint, an export or a bundle, to tokens takes at its peak.

    Exits with 1 if a stage does not fit into what is available, or into --memory and --gpu-memory. Peaks are resident
    memory: of a compiled bundle, weights and embedding are pages of its files, which processes share and the system may
    drop.
    """
    from llmc.runtime.kv.budget import memory_to_use

    precision = chosen_precision(tuple(precisions[name] for name in PRECISIONS))
    on_gpu = runs_on_gpu(path, target)
    if not on_gpu and (gpu_memory is not None or unified is not None):
        given = "--gpu-memory" if gpu_memory is not None else f"--{'unified' if unified else 'separate'}-memory"
        raise UsageError(f"{given} is for a GPU, and none is planned for; leave it out, or give a --target with a GPU")
    found = memories(memory, gpu_memory, unified) if on_gpu else Memories(memory_to_use(memory), None, False)
    plans = plans_of(path, context, batch, precision, find_recipe(recipe), target, found.unified)
    if found.unified:
        plans = [*plans[:-2], in_one_memory(*plans[-2:])]
    stages = [found.stage(plan) for plan in plans]
    if as_json:
        report: dict[str, object] = {"path": path, "available": found.machine.bytes, "source": found.machine.source}
        report |= found.to_json() if on_gpu else {}
        show.print_json({**report, "stages": [stage.to_json() for stage in stages]})
    else:
        print_stages(stages, found, on_gpu)
    if problem := refusal(stages):
        raise ResourceError(f"{path}: {problem}")


def refusal(stages: list[Stage]) -> str:
    """What is missing, in a sentence, and what can be done, in another; what the parts are is in the table.

    Empty where no stage is known not to fit.
    """
    from llmc.runtime.kv.budget import MB, what_fits

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


def memories(memory: int | None, gpu_memory: int | None, unified: bool | None) -> Memories:
    """What a plan for a GPU is held against: bytes that are given, or else what is free.

    Whether CPU and GPU share one memory is asked of the first GPU, unless ``unified`` tells, or ``gpu_memory`` tells of
    another one. Free in one memory is what its driver or the system calls free, whatever is more, as for sessions.

    Raises:
        UsageError: two sizes of one memory.
    """
    from llmc.runtime.host.machine import Available
    from llmc.runtime.kv.budget import memory_to_use

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
    """What is free on it, None where it cannot be asked; and whether its memory is the machine's."""
    from llmc.runtime.host.machine import Available
    from llmc.runtime.host.probe import probe

    gpu = next(iter(probe().driver.devices), None)
    if gpu is None:
        return None, False
    return (None if gpu.free_memory is None else Available(gpu.free_memory, gpu.name)), gpu.integrated


def in_one_memory(host: Plan, device: Plan) -> Plan:
    """Running a bundle whose GPU uses the machine's own memory: what both plans take, together."""
    from dataclasses import replace

    from llmc.runtime.kv.budget import GPU

    assert device.stage == GPU
    parts = {name: size for name, size in host.parts.items() if size}
    parts |= {f"GPU {name}": size for name, size in device.parts.items()}

    def needed(context: int, batch: int) -> int:
        return host.needed(context, batch) + device.needed(context, batch)

    return replace(device, stage=ONE_MEMORY, parts=parts, needed=needed)


def runs_on_gpu(path: Path, target: str) -> bool:
    """Whether a bundle is for a GPU, or the target that a bundle is to be built for."""
    if (path / bundle.BUNDLE_MANIFEST).exists():
        return bundle.read_bundle(path).device is not None
    from llmc.optimize.targets import capabilities

    return capabilities(target).has_gpu


def plans_of(
    path: Path,
    context: int | None,
    batch: int,
    precision: str | None,
    recipe: Path | None,
    target: str = "cpu",
    unified: bool = False,
) -> list[Plan]:
    """Plans of the stages that lie ahead of ``path``, in their order; ``unified`` counts what building takes on a GPU
    in with what it takes of the machine's memory.

    Raises:
        UsageError: context or batch is beyond the bundle's, or the recipe is wrong.
        LlmcError: the folder is none of llmc's, or broken.
    """
    if (path / bundle.BUNDLE_MANIFEST).exists():
        if precision or recipe or target != "cpu":
            raise UsageError(f"{path} is built already; precision, recipe and target are for an export or a checkpoint")
        return _run_plans(path, context, batch, unified)
    if (path / bundle.EXPORT_MANIFEST).exists():
        return _build_plans(path, bundle.read_export(path).geometry, context, batch, precision, recipe, target, unified)
    if (path / bundle.CONFIG_FILE).exists():
        from llmc.export.sources.checkpoint import read_checkpoint

        geometry = read_checkpoint(path).config.geometry
        return [
            export_plan(geometry),
            *_build_plans(path, geometry, context, batch, precision, recipe, target, unified),
        ]
    raise BundleError(
        f"{path}: neither {bundle.BUNDLE_MANIFEST} (a bundle), {bundle.EXPORT_MANIFEST} (an export) nor "
        f"{bundle.CONFIG_FILE} (a Hugging Face checkpoint) is here"
    )


def _run_plans(path: Path, context: int | None, batch: int, unified: bool) -> list[Plan]:
    from dataclasses import replace
    from functools import partial

    from llmc.runtime.kv.budget import device_bytes, plan_device, plan_load, rounded_up

    manifest = bundle.read_bundle(path)
    limits = manifest.limits
    for flag, value, most in (("context", context, limits.max_context), ("batch", batch, limits.max_batch)):
        if value is not None and value > most:
            raise UsageError(f"--{flag} is {value}, the bundle was built for {most}; build with a larger --max-{flag}")
    run = plan_load(manifest, context, batch)
    if manifest.device is None:
        return [run]
    # An engine's cache has the size that it was built for, whatever the context.
    positions = rounded_up(manifest.engine, run.context)
    device = plan_device(manifest.device, limits, positions, batch)
    return [*_rebuild_plans(manifest, unified), run, replace(device, needed=partial(device_bytes, manifest))]


def _rebuild_plans(manifest: Manifest, unified: bool) -> list[Plan]:
    """Making the engine that a bundle lacks; none where what builds is not installed."""
    if manifest.engine is None or manifest.engine.file:
        return []
    try:
        from llmc.optimize.plan.memory import plan_rebuild
    except MissingExtraError:
        return []
    return [plan_rebuild(manifest, unified)]


def _build_plans(
    path: Path,
    geometry: Geometry,
    context: int | None,
    batch: int,
    precision: str | None,
    recipe: Path | None,
    target: str,
    unified: bool,
) -> list[Plan]:
    """Building with the defaults of a build, and running what it gives."""
    from dataclasses import replace

    from llmc.optimize.calibrate.request import DEFAULT_LENGTH, DEFAULT_SAMPLES
    from llmc.optimize.plan.device import device_plan, host_plan
    from llmc.optimize.plan.memory import memory_plan, plan_build
    from llmc.optimize.recipe import Request, read_recipe, resolve
    from llmc.optimize.targets import capabilities
    from llmc.runtime.kv.budget import plan_device, plan_run

    most = geometry.max_positions
    if context is not None and not MIN_CONTEXT <= context <= most:
        raise UsageError(
            f"--context is {context}, expected {MIN_CONTEXT} ... {most}, the max_position_embeddings of the checkpoint"
        )
    asked = Request(precision=precision, max_context=context, max_batch=batch)
    asked = asked.over(read_recipe(recipe)) if recipe else asked
    abilities = capabilities(target)
    chosen, limits = resolve(asked, abilities, geometry.max_positions, "plan")
    tokenizer, calibrated = _tokenizer_bytes(path), (DEFAULT_SAMPLES, DEFAULT_LENGTH)
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
        return (path / bundle.TOKENIZER_FILE).stat().st_size
    except OSError as error:
        raise BundleError(f"{path / bundle.TOKENIZER_FILE} cannot be read ({error.strerror}); it is needed") from error


def export_plan(geometry: Geometry) -> Plan:
    """Exporting with fake tensors: libraries and the graph, whatever the weights weigh."""
    from llmc.bundle import Limits
    from llmc.runtime.kv.budget import Plan

    parts = {"exporter": EXPORTER, "graph": EXPORTED_LAYER * geometry.layers}
    limits = Limits(geometry.max_positions, LARGEST_BATCH, 1)
    total = sum(parts.values())
    return Plan(EXPORT, parts, geometry.max_positions, 1, limits, lambda context, batch: total)


def check_export(checkpoint: Path, memory: int | None = None) -> None:
    """Refuse to export where memory does not suffice. A broken checkpoint is the exporter's to report.

    Raises:
        ResourceError: with the number missing.
    """
    from llmc.export.sources.checkpoint import read_checkpoint
    from llmc.runtime.kv.budget import usable_memory

    try:
        geometry = read_checkpoint(checkpoint).config.geometry
    except LlmcError:
        return
    plan = export_plan(geometry)
    if problem := refusal([Stage(plan, plan.verdict(usable_memory(0, memory)))]):
        raise ResourceError(f"{checkpoint}: {problem}")


def print_stages(stages: list[Stage], found: Memories, on_gpu: bool) -> None:
    """A table of parts for each stage, and what is available."""
    for stage in stages:
        plan, verdict = stage.plan, stage.verdict
        at = f" {plan.context} tokens x {plan.batch}" if plan.stage.startswith("run") else ""
        rows = [(name, show.size(count)) for name, count in plan.parts.items() if count]
        state = UNKNOWN
        if verdict is not None:
            state = "fits" if verdict.fits else f"{show.size(verdict.missing)} missing"
        show.print_table((plan.stage + at, ""), [*rows, ("peak", f"{show.size(plan.total)}  {state}")])
        click.echo()
    shared = ", CPU and GPU together" if found.unified else ""
    click.echo(f"available: {show.size(found.machine.bytes)} ({found.machine.source}){shared}")
    if on_gpu and not found.unified:
        click.echo(f"GPU: {show.size(found.gpu.bytes)} ({found.gpu.source})" if found.gpu else NO_GPU)
