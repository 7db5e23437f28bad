"""``llmc plan``: memory of each phase that lies ahead, before anything is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.bundle import read_bundle, read_export
from llmc.cli import output as show
from llmc.cli.options import (
    SectionCommand,
    debug_option,
    json_option,
    make_request,
    memory_option,
    precision_options,
    recipe_option,
    size,
    small_option,
    source_argument,
    stages_option,
)
from llmc.errors import MissingExtraError, ResourceError, UsageError
from llmc.sources import Kind, Located

if TYPE_CHECKING:
    from llmc.bundle import Geometry
    from llmc.runtime.bench.phases import Ahead, Phase

NO_GPU = "GPU: none can be asked here; say with --gpu-memory what the one has that it is for"
UNKNOWN = "not known whether it fits"


@click.command("plan", short_help="Say what memory each phase from PATH to tokens takes.", cls=SectionCommand)
@source_argument("path")
@click.option("--max-context", type=click.IntRange(min=1), help="Tokens in the cache.  [default: the most possible]")
@click.option("--max-batch", type=click.IntRange(min=1), default=1, help="Sequences at a time.")
@click.option("--target", default="cpu", help="Plan a build for cpu, cuda, tensorrt or tensorrt-rtx.")
@precision_options
@small_option
@recipe_option
@stages_option
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
def plan_command(path: Located, as_json: bool, **asked: Any) -> None:
    """Say what memory each phase from PATH to tokens takes at its peak.

    Exits with 1 if a phase does not fit into what is available, or into --memory and --gpu-memory. Peaks are resident
    memory. Beside them stand the bytes that PATH takes on disk.
    """
    from llmc.cli.inspect import disk_row
    from llmc.cli.summary import summarize
    from llmc.runtime.bench.phases import refusal

    with _open_tokenizer(path) as (folder, geometry, copied):
        ahead = _ahead(folder, geometry, copied, **asked)
    summary = summarize(path)
    on_disk, elsewhere = summary.disk, [stage for stage in summary.stages if stage.memory is None]
    if as_json:
        machine = ahead.memories.machine
        report: dict[str, object] = {"path": path.path, "available": machine.bytes, "source": machine.source}
        report |= {"gpu": ahead.memories.gpu, "unified_memory": ahead.memories.unified} if ahead.on_gpu else {}
        report |= {"elsewhere": elsewhere} if elsewhere else {}
        show.print_json({**report, "disk": on_disk, "phases": [numbers(phase) for phase in ahead.phases]})
    else:
        click.echo(f"on disk: {disk_row(on_disk)}")
        if writes := [f"{it.plan.phase} {show.size(it.plan.writes)}" for it in ahead.phases if it.plan.writes]:
            precision = next(phase.plan.precision for phase in ahead.phases if phase.plan.precision)
            words = "the checkpoint's own" if precision == "source" else precision
            click.echo(f"writes: {', '.join(writes).replace('build', 'bundle')}, precision {words}")
        click.echo()
        print_phases(ahead)
        for stage in elsewhere:
            click.echo(f"elsewhere: stage {stage.number}, layers {stage.first} to {stage.last}")
    if problem := refusal(ahead.phases):
        raise ResourceError(problem, path=path.path)


def _ahead(
    path: Path,
    geometry: Geometry | None,
    copied: int,
    *,
    memory: int | None,
    gpu_memory: int | None,
    unified: bool | None,
    **how: Any,
) -> Ahead:
    from llmc.runtime.bench.phases import find_memories, hold, plan_bundle
    from llmc.runtime.sessions.staged import find_stages

    if geometry is not None:
        from llmc.optimize.plan.phases import plan_phases
        from llmc.optimize.targets import capabilities

        on_gpu = capabilities(how["target"]).has_gpu
        memories = find_memories(on_gpu, memory, gpu_memory, unified)
        size = gpu_memory or (memory if memories.unified else None)
        request = make_request(path, **how)
        plans = plan_phases(request, geometry, unified=memories.unified, gpu_memory=size, copied=copied)
        return hold(plans, memories, on_gpu)
    context, batch = how.pop("max_context"), how.pop("max_batch")
    manifest = read_bundle(path)
    on_gpu = manifest.device is not None
    memories = find_memories(on_gpu, memory, gpu_memory, unified)
    if any(value for name, value in how.items() if (name, value) != ("target", "cpu")):
        raise UsageError(
            "path",
            f"{path} is built already",
            "precision, small, recipe, target and stages are for an export or a checkpoint",
        )
    parts = find_stages(path, manifest).values()
    plans = [plan for part in parts if part for plan in plan_bundle(part, context, batch)]
    if manifest.engine is not None and not manifest.engine.file:
        with suppress(MissingExtraError):
            from llmc.optimize.plan.memory import plan_rebuild

            plans = [plan_rebuild(manifest, memories.unified), *plans]
    return hold(plans, memories, on_gpu)


@contextmanager
def _open_tokenizer(source: Located) -> Iterator[tuple[Path, Geometry | None, int]]:
    """The folder of a source's tokenizer, its geometry (None for a bundle), and the bytes of weights that an export
    would copy."""
    if source.kind in (Kind.BUNDLE, Kind.EXPORT):
        yield source.path, read_export(source.path).geometry if source.kind is Kind.EXPORT else None, 0
        return
    from llmc.export.sources.checkpoint import read_checkpoint
    from llmc.sources.built import open_tokenizer

    checkpoint = read_checkpoint(source.path)
    with open_tokenizer(checkpoint) as folder:
        yield folder, checkpoint.geometry, checkpoint.made_bytes


def numbers(phase: Phase) -> dict[str, object]:
    """A phase in JSON; None for all that follows from a limit that is not known."""
    plan, verdict = phase.plan, phase.verdict
    known = ("fits", "missing", "largest_context", "largest_batch")
    return {
        "phase": plan.phase,
        **({"layers": [plan.layers[0], plan.layers[-1]]} if plan.layers else {}),
        "context": plan.context,
        "batch": plan.batch,
        "parts": plan.parts,
        "total": plan.total,
        "per_layer_table": plan.per_layer_table,
        **({"seconds": round(plan.seconds)} if plan.seconds else {}),
        **({"writes": plan.writes} if plan.writes else {}),
        **({"precision": plan.precision} if plan.precision else {}),
        **({"graphs": {name: asdict(each) for name, each in plan.graphs.items()}} if plan.graphs else {}),
        **{name: getattr(verdict, name) if verdict else None for name in known},
    }


def print_phases(ahead: Ahead) -> None:
    for phase in ahead.phases:
        plan, verdict = phase.plan, phase.verdict
        at = f" {plan.context} tokens x {plan.batch}" if plan.phase.startswith("run") else ""
        at = f": layers {plan.layers[0]} to {plan.layers[-1]},{at}" if plan.layers else at
        rows = [(name, show.size(count)) for name, count in plan.parts.items() if count]
        state = UNKNOWN
        if verdict is not None:
            state = "fits" if verdict.fits else f"{show.size(verdict.missing)} missing"
        rows.append(("peak", f"{show.size(plan.total)}  {state}"))
        if plan.per_layer_table:
            rows.append(("per-layer table", f"{show.size(plan.per_layer_table)}  beside: rows are read from its file"))
        if plan.seconds:
            rows.append(("time", f"{show.minutes(plan.seconds)} if nothing else computes here"))
        show.print_table((plan.phase + at, ""), rows)
        click.echo()
        if plan.graphs:
            sizes = [(name, show.size(it.disk), show.size(it.memory)) for name, it in plan.graphs.items()]
            show.print_table((plan.phase + at, "on disk", "at its peak"), sizes)
            click.echo()
    memories = ahead.memories
    shared = ", CPU and GPU together" if memories.unified else ""
    click.echo(f"available: {show.size(memories.machine.bytes)} ({memories.machine.source}){shared}")
    if ahead.on_gpu and not memories.unified:
        click.echo(f"GPU: {show.size(memories.gpu.bytes)} ({memories.gpu.source})" if memories.gpu else NO_GPU)
