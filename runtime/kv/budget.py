"""Plan memory before it is taken: the growth of the cache, its limit, and what a phase of a build or a run needs."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from llmc.bundle import EngineConfig, Limits, Manifest, MemoryPlan
from llmc.errors import ResourceError
from llmc.runtime.host.machine import available_memory, resident_bytes, saturates

FIRST_STEP = 256
LARGE_STEP = 1024
MB = 1_000_000
# Bytes beside, for each of weights that become uint8 while a graph is opened: 272 MB for 168 (ONNX Runtime 1.32).
CONVERSION = 1.65
GPU = "run on the GPU"  # the phase whose memory is not the machine's


def next_capacity(needed: int, maximum: int) -> int:
    """Positions to reserve for ``needed`` ones: multiples of 256, above 1,024 of 1,024, at most ``maximum``.

    Every growth copies the cache once; with these steps that stays far below the cost of the tokens in between.
    """
    step = FIRST_STEP if needed <= LARGE_STEP else LARGE_STEP
    return min(maximum, -(-needed // step) * step)


def round_up(engine: EngineConfig | None, positions: int) -> int:
    """Positions that a session makes room for for: a TensorRT engine has one capacity."""
    return positions if engine is None else engine.buckets[-1]


def device_bytes(manifest: Manifest, positions: int, rows: int) -> int:
    """Bytes of the GPU's memory with room for ``positions`` in each of ``rows`` rows; 0 for a bundle without a GPU."""
    if manifest.device is None:
        return 0
    return manifest.device.total(round_up(manifest.engine, positions), rows)


@dataclass(frozen=True)
class _Share:
    """A memory's bytes that may be taken, and those that positions in rows take; ``what`` names it."""

    needed: Callable[[int, int], int]
    limit: int
    what: str


class CacheBudget:
    """Bounds the rows and positions of a cache by the bytes that may be taken.

    Args:
        manifest: of the bundle; its plans say what rows take of the process's memory and of the GPU's.
        memory: bytes for the whole process.
        others: bytes of them that the prefix cache was promised.
        device_memory: bytes of the GPU's memory for the session; None where it has none.
    """

    def __init__(self, manifest: Manifest, memory: int, others: int = 0, device_memory: int | None = None) -> None:
        plan = manifest.memory
        self._shares = [_Share(lambda positions, rows: plan.total(positions, rows) + others, memory, "MB")]
        if device_memory is not None:
            self._shares.append(_Share(partial(device_bytes, manifest), device_memory, "MB of the GPU's memory"))

    def fits(self, positions: int, rows: int) -> bool:
        return self._find_lacking(positions, rows) is None

    def refusal(self, positions: int, rows: int) -> ResourceError:
        """The error for a request that does not fit even alone."""
        share = self._find_lacking(positions, rows) or self._shares[0]
        return ResourceError(
            f"the request may grow to {positions} positions in {rows} row(s), for which "
            f"{share.needed(positions, rows) // MB} {share.what} are needed in all, and {share.limit // MB} MB may be "
            "taken; shorten its prompt, ask for fewer tokens or free memory"
        )

    def _find_lacking(self, positions: int, rows: int) -> _Share | None:
        return next((share for share in self._shares if share.needed(positions, rows) > share.limit), None)


@dataclass(frozen=True)
class Verdict:
    """The answer whether a plan fits into so many bytes."""

    missing: int  # bytes that lack, 0 where it fits
    # that fit beside the plan's other one; 0 where none do
    largest_context: int
    largest_batch: int

    @property
    def fits(self) -> bool:
        return self.missing == 0


# Names of the rows of a plan, by the phases of a recipe.
GRAPHS = {"split": "two graphs", "shared": "one graph"}


@dataclass(frozen=True)
class Sizes:
    """Bytes that a bundle takes on disk, and in memory at its peak."""

    disk: int
    memory: int


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of one phase at its peak: resident bytes by name, pages of mapped files included."""

    phase: str  # export, build, run or GPU
    parts: dict[str, int]
    # cached tokens of a row, and rows, that the parts are for
    context: int
    batch: int
    limits: Limits  # the largest of both that the model or the bundle can serve
    needed: Callable[[int, int], int] = field(repr=False, compare=False)  # total bytes for another context and batch
    seconds: float = 0.0  # that it takes, roughly; 0 where nobody asks
    per_layer_table: int = 0  # bytes of a table beside, of whose file rows are read; the system takes their pages back
    # what a bundle takes with one graph and with two, where that is a choice: see GRAPHS
    graphs: dict[str, Sizes] = field(default_factory=dict)
    box: int = 0  # bytes of the box that it is for, 0 where that is this machine
    layers: range | None = None  # that it runs; None for all
    writes: int = 0  # bytes that the phase writes to disk, 0 for none; `precision` of the weights among them
    precision: str = ""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def of_part(self, name: str, layers: range, box: int = 0) -> "MemoryEstimate":
        """This estimate for a part of a model."""
        return replace(self, phase=f"run {name}", layers=layers, box=box)

    def verdict(self, available: int) -> Verdict:
        context = largest(self.limits.max_context, lambda n: self.needed(n, self.batch), available)
        batch = largest(self.limits.max_batch, lambda n: self.needed(self.context, n), available)
        return Verdict(max(0, self.total - available), context, batch)

    def check(self, what: Path, available: int) -> None:
        """Raise ResourceError, with what is missing and what would fit, if more than ``available`` bytes are needed."""
        verdict = self.verdict(available)
        if verdict.fits:
            return
        parts = ", ".join(f"{size // MB} {name}" for name, size in self.parts.items() if size >= MB)
        raise ResourceError(
            f"to {self.phase} it needs {_round_to_mb(self.total)} MB ({parts}), {available // MB} MB "
            f"are available, {_round_to_mb(verdict.missing)} MB are missing",
            what_fits(self, verdict),
            path=what,
        )


def what_fits(plan: MemoryEstimate, verdict: Verdict) -> str:
    """One graph if it fits, or the largest context and batch that do, each beside the plan's other one."""
    once = plan.graphs.get(GRAPHS["shared"])
    if once and once.memory <= plan.total - verdict.missing:
        return f"build with --small, which holds the weights once and takes {_round_to_mb(once.memory)} MB"
    if not verdict.largest_context and not verdict.largest_batch:
        return "no context or batch is small enough: free memory or use a smaller precision or model"
    fits = {
        f"a context of {verdict.largest_context} tokens fits with a batch of {plan.batch}": verdict.largest_context,
        f"a batch of {verdict.largest_batch} fits with a context of {plan.context}": verdict.largest_batch,
    }
    found = ", ".join(words for words, size in fits.items() if size)
    return f"{found}: lower them, free memory or use a smaller precision"


def _round_to_mb(size: int) -> int:
    return -(-size // MB)


def largest(limit: int, needed: Callable[[int], int], available: int) -> int:
    """The largest number up to ``limit`` that needs no more than ``available``, 0 if none; ``needed`` never falls."""
    return bisect_right(range(1, limit + 1), available, key=needed)


def plan_run(plan: MemoryPlan, limits: Limits, context: int | None = None, batch: int = 1) -> MemoryEstimate:
    """Loading a bundle and running it until ``context`` (default: the longest) tokens are cached in each of ``batch``
    rows; what is reserved beyond takes no memory before it is written."""
    context = limits.max_context if context is None else context
    parts = plan.parts(context, batch)
    return MemoryEstimate(
        "run", parts, context, batch, limits, plan.total, per_layer_table=plan["per-layer table"].fixed
    )


def plan_load(manifest: Manifest, context: int | None = None, batch: int = 1) -> MemoryEstimate:
    """:func:`plan_run` of a bundle."""
    return plan_run(manifest.memory, manifest.limits, context, batch)


def plan_device(plan: MemoryPlan, limits: Limits, context: int | None = None, batch: int = 1) -> MemoryEstimate:
    """The GPU's memory that a bundle takes, with ``context`` (default: the longest) positions in each row."""
    context = limits.max_context if context is None else context
    return MemoryEstimate(GPU, plan.parts(context, batch), context, batch, limits, plan.total)


def check_load(folder: Path, manifest: Manifest, context: int, memory: int | None = None) -> None:
    """Refuse to load what cannot fit: the cache's first step or, with ``memory`` bytes promised, the whole ``context``.

    Raises:
        ResourceError: with the number missing, and the context and batch that fit.
    """
    tokens = min(context, next_capacity(1, context)) if memory is None else context
    plan = plan_load(manifest, tokens)
    if (opening := opening_bytes(manifest)) > plan.total:
        plan = replace(plan, parts={"opening": opening}, needed=lambda context, rows: opening)
    plan.check(folder, usable_memory(manifest.memory["engine"].fixed, memory))


def opening_bytes(manifest: Manifest) -> int:
    """The peak while graphs are opened, without cache and workspace, where weights become uint8 then; else 0."""
    converts = manifest.recipe.activations != "none" and not manifest.target.unsigned and saturates()
    if manifest.device is not None or not converts:
        return 0
    plan = manifest.memory
    held = sum(plan[name].fixed for name in ("engine", "tokenizer", "weights"))
    return int(held + CONVERSION * manifest.graphs["prefill"].weight_bytes)


def usable_memory(held: int, memory: int | None = None) -> int:
    """Bytes that this process may take: ``memory``, or what is free and what it ``held`` already by its libraries."""
    return available_memory() + min(held, resident_bytes()[0]) if memory is None else memory


def check_growth(
    manifest: Manifest, held: tuple[int, int], wanted: tuple[int, int], device_memory: int | None = None
) -> None:
    """Refuse to grow a cache from ``held`` to ``wanted`` rows x positions where memory does not suffice.

    Args:
        device_memory: bytes of the GPU's memory that may be taken in all; None for any.
    """
    plan, (rows, positions) = manifest.memory, wanted
    needed, available = plan.total(positions, rows) - plan.total(held[1], max(1, held[0])), available_memory()
    if needed > available:
        raise ResourceError(
            f"the cache for {positions} tokens needs {needed // MB} MB more, {available // MB} MB are available; "
            "free memory, or use a shorter prompt or fewer new tokens"
        )
    limit = device_memory if manifest.device is not None else None
    if limit is not None and (taken := device_bytes(manifest, positions, rows)) > limit:
        raise ResourceError(
            f"with a cache for {positions} tokens in {rows} row(s) the model takes {taken // MB} MB of the GPU's "
            f"memory, {limit // MB} MB may be taken; free memory of the GPU, or use shorter prompts, fewer new tokens "
            "or fewer requests at once"
        )
