"""Print results: tables and JSON on stdout, progress on stderr if it is a terminal."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from llmc.bundle import Geometry, PhaseQuality, Quality, Ranking, Recipe, Similarity, Source
from llmc.errors import printable

Report = Callable[..., None]
_DIGITS = {"B": 0, "kB": 1, "MB": 1, "GB": 2}  # decimal places by unit


def print_json(report: Any) -> None:
    """Print a report, a dataclass of any depth including its properties, as indented JSON.

    A number that JSON cannot express, such as the logarithm of 0, becomes null.
    """
    click.echo(json.dumps(_plain(report), indent=2, ensure_ascii=False, allow_nan=False))


def as_dict(report: Any) -> dict[str, Any]:
    members = {name: member for kind in reversed(type(report).__mro__) for name, member in vars(kind).items()}
    computed = [name for name, member in members.items() if isinstance(member, property)]
    return {name: getattr(report, name) for name in [*(f.name for f in dataclasses.fields(report)), *computed]}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = as_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    print_table((), rows)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> None:
    """Print aligned columns, with an optional header; if ``numbers``, all but the first are right-aligned."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    table = Table(box=None, show_header=bool(columns), pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index in range(len(rows[0]) if rows else 0):
        justify = "right" if numbers and index else "left"
        table.add_column(columns[index] if columns else "", justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # names are untrusted
    # Do not wrap lines in a pipe: a program reads or searches them.
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False)
    with console.capture() as capture:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def size(count: int) -> str:
    """Bytes in decimal units, like disk sizes and bandwidths: 1536 -> 1.5 kB, 1086 million -> 1.09 GB."""
    value, units = float(count), iter(_DIGITS)
    unit = next(units)
    for larger in units:
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.{_DIGITS[unit]}f} {unit}"


def minutes(seconds: float) -> str:
    """A rough time, in tens of seconds or in minutes."""
    return f"about {max(1, round(seconds / 10)) * 10} s" if seconds < 95 else f"about {round(seconds / 60)} min"


def amount(count: int) -> str:
    """A number of parameters: 494032768 -> 494.0 million."""
    if count >= 1_000_000_000:
        return f"{count / 1e9:.2f} billion"
    return f"{count / 1e6:.1f} million" if count >= 1_000_000 else f"{count:,}"


def weights_of(source: Source, geometry: Geometry, built: bool = False) -> str:
    """The number of parameters and their type, or the bits of their codes."""
    codes = [*(linear.codes for linear in geometry.linears), *(item.codes for item in geometry.mixtures)]
    codes += [geometry.table_codes, geometry.per_layer_codes]
    bits = sorted({each.bits for each in codes if each})
    stored = f"codes of {', '.join(map(str, bits))} bits" if bits else source.dtype
    return f"{amount(source.parameters)} parameters, {'made from ' if built else ''}{stored}"


@contextmanager
def progress() -> Iterator[Report]:
    """Show steps and their progress on stderr, if it is a terminal, from the first step on.

    The callback takes the step's name and, if known, the fraction that is done.
    """
    if not sys.stderr.isatty():
        yield lambda step, fraction=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bars.add_task("starting", total=None)

    def report(step: str, fraction: float | None = None) -> None:
        bars.start()
        bars.update(task, description=step, total=None if fraction is None else 1.0, completed=fraction or 0.0)

    try:
        yield report
    finally:
        bars.stop()


def recipe(recipe: Recipe) -> str:
    """A recipe in a few words, without the usual settings."""
    parts = {
        recipe.precision: True,
        f"by {recipe.scheme}": recipe.scheme != "rtn",
        f"blocks of {recipe.block_size}": recipe.block_size > 0,
        "zero points": not recipe.symmetric,
        f"head {recipe.head}": recipe.head != recipe.precision,
        f"{recipe.phases} phases": True,
        "static activations": recipe.activations == "static",
        f"{recipe.sparsity} zeros by {recipe.pruning}": recipe.sparsity != "",
        f"cache {recipe.cache}": recipe.cache != "float32",
        f"layers {', '.join(f'{pattern} {precision}' for pattern, precision in recipe.layers.items())}": bool(
            recipe.layers
        ),
    }
    return f"{recipe.name}: {', '.join(part for part, shown in parts.items() if shown)}"


def calibration_rows(recipe: Recipe) -> list[tuple[str, str]]:
    """The calibration text; or that there was none, for weights that could have used one."""
    used = recipe.calibration
    if used is None:
        return [("calibrated on", "nothing: rounded to nearest")] if "int4" in recipe.precisions() else []
    origin = f"{used.text}, which comes with llmc" if used.default else used.text
    every = used.experts + used.nearest
    experts = f"; {used.experts} of {every} experts, of the others not the last product" if every else ""
    return [("calibrated on", f"{origin}: {used.samples} x {used.length} tokens{experts}")]


# With SmolLM2-135M, texts make no sense at 1.03, and have whole sentences at 0.36.
FAR_KL = 0.5
FAR_ADVICE = "its texts may make no sense; build with --recipe int4-quality, or with --int8"


def quality_rows(quality: Quality | None) -> list[tuple[str, str]]:
    """The distance from the unquantized model, one row per path; empty if it was not measured."""
    if quality is None:
        return []
    rows = [("judged on", f"{quality.text}, {quality.positions} positions")]
    rows += [(f"{name} quality", _phase(phase)) for name, phase in quality.phases.items()]
    if quality.reference_perplexity is not None:
        rows.append(("unquantized model", f"perplexity {quality.reference_perplexity:.3f}"))
    if quality.greedy_match is not None:
        rows.append(("greedy match", f"{quality.greedy_match:.1f} of {quality.greedy_tokens} tokens"))
    furthest = max((phase.mean_kl or 0.0 for phase in quality.phases.values()), default=0.0)
    if furthest > FAR_KL:
        rows.append(("warning", f"KL {furthest:.2f} is far from the unquantized model: {FAR_ADVICE}"))
    return rows


def similarity_rows(similarity: Similarity | None, name: str = "against unquantized") -> list[tuple[str, str]]:
    """The distance of vectors or scores from the unquantized model's; empty if it was not measured."""
    if similarity is None:
        return []
    cosine = "" if similarity.mean is None else f"cosine {similarity.mean:.5f}, at least {similarity.smallest:.5f}, "
    return [(name, f"{cosine}values differ by up to {similarity.largest_difference:.2g}")]


def ranking_rows(ranking: Ranking | None) -> list[tuple[str, str]]:
    """The order of documents compared with the unquantized model's; empty if it was not measured."""
    if ranking is None:
        return []
    counts = f"{ranking.queries} queries, {ranking.documents} documents"
    return [("retrieval", f"nDCG@10 {ranking.ndcg:.4f}, same first result {ranking.top1_agreement:.1%} ({counts})")]


def _phase(phase: PhaseQuality) -> str:
    perplexity = f"perplexity {phase.perplexity:.3f}"
    if phase.mean_kl is None or phase.p99_kl is None or phase.top1_agreement is None:
        return perplexity
    divergence = f"KL {phase.mean_kl:.5f} mean, {phase.p99_kl:.4f} p99"
    return f"{divergence}, same first choice {phase.top1_agreement:.1%}, {perplexity}"
