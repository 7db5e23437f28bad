"""``llmc build --auto``: build candidates, measure them on this machine, keep the fastest or the best that fits.

Candidates and measurements stay in the cache: an interrupted search goes on, a repeated one only chooses.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path

from llmc import __version__, bundle
from llmc.bundle import Budget, Manifest, Recipe, decode, read_bundle, verify_files
from llmc.errors import BuildError, BundleError, UsageError
from llmc.exported import weights_identity
from llmc.inventory import SENSITIVE
from llmc.optimize.build import build
from llmc.optimize.calibrate.request import CalibrationRequest
from llmc.optimize.judge.gate import find_broken_limits
from llmc.optimize.progress import Progress, silent
from llmc.optimize.recipe import Request, needs_calibration, read_recipe, settle
from llmc.optimize.recipe.engine import EngineRequest
from llmc.optimize.targets import capabilities
from llmc.publish import stage_folder
from llmc.runtime.bench.benchmark import benchmark
from llmc.runtime.host import disk_cache
from llmc.runtime.host.machine import available_memory, cpu_model, usable_threads

# Tokens of the timed prompt (a page) and answer (a paragraph).
PROMPT_TOKENS = 512
NEW_TOKENS = 128
# New tokens that are timed: all would take most of the search, and a quarter has the same median.
TIMED_TOKENS = 32
REPEATS = 3
# Candidates within this share of the best time count as equally fast: timing is not more precise.
SAME_SPEED = 0.02
KEPT_BYTES = 20_000_000_000
# A candidate's folder in its cache entry.
BUILT = Path("built") / "bundle"


# From the smallest to the safest. Schemes that need calibration are skipped where it is not available.
CANDIDATES: dict[str, Request] = {
    "int4-small": Request(precision="int4", scheme="gptq", block_size=128, phases="shared"),
    "int4": Request(precision="int4", scheme="gptq", block_size=64),
    "int4-sensitive8": Request(precision="int4", scheme="gptq", block_size=64, layers={SENSITIVE: "int8"}),
    "int4-quality": Request(precision="int4", scheme="gptq", block_size=32, layers={SENSITIVE: "int8"}),
    "int4-uncalibrated": Request(precision="int4", scheme="rtn"),
    "int8-small": Request(precision="int8", phases="shared", activations="per-token"),
    "int8": Request(precision="int8"),
    "int8-exact": Request(precision="int8", block_size=32, phases="shared"),
    "fp32": Request(precision="fp32"),
}
# Tried first for quantized checkpoints: their own integers.
OF_CODES: dict[str, Request] = {
    "source": Request(precision="source"),
    "source-shared": Request(precision="source", phases="shared"),
}


@dataclass(frozen=True)
class Trial:
    """Measurement of one candidate with one number of threads; ``reason`` says why it is out, empty if it is not."""

    name: str
    threads: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    memory: int
    size: int
    mean_kl: float
    top1_agreement: float
    perplexity_increase: float
    reason: str = ""

    @property
    def seconds(self) -> float:
        """Time for :data:`PROMPT_TOKENS` of prompt and :data:`NEW_TOKENS` new tokens."""
        return PROMPT_TOKENS / self.prefill_tokens_per_s + NEW_TOKENS / self.decode_tokens_per_s


@dataclass(frozen=True)
class AutoReport:
    """All trials in order, and the published one."""

    output: Path
    chosen: Trial
    trials: tuple[Trial, ...]
    manifest: Manifest

    @property
    def judged_on(self) -> str:
        return self.manifest.quality.text if self.manifest.quality is not None else ""


def choose(trials: Sequence[Trial], closest: bool = False) -> Trial | None:
    """The fastest trial without a ``reason``; of equally fast ones the smallest, then the first. ``closest`` takes the
    closest to the unquantized model instead, of equals the fastest."""
    fit = [trial for trial in trials if not trial.reason]
    if not fit:
        return None
    if closest:
        return min(fit, key=lambda trial: (trial.mean_kl, trial.seconds))
    limit = min(trial.seconds for trial in fit) * (1 + SAME_SPEED)
    return min((trial for trial in fit if trial.seconds <= limit), key=lambda trial: trial.memory)


def automatic(
    source: Path,
    output: Path,
    *,
    target: str = "cpu",
    precision: str | None = None,
    max_context: int | None = None,
    max_batch: int | None = None,
    adapters: int | None = None,
    rank: int | None = None,
    head: Path | None = None,
    budget: Budget | None = None,
    recipe: Path | None = None,
    calibration: CalibrationRequest | None = None,
    engine: EngineRequest | None = None,
    text: Path | None = None,
    memory: int | None = None,
    max_size: int | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> AutoReport:
    """Measure :data:`CANDIDATES` and publish the fastest within ``budget``, ``memory`` and ``max_size``.

    Takes what :func:`llmc.optimize.build.build` takes. ``memory`` is in bytes, for running with the whole context;
    default: what is available. ``max_size`` is the bytes of the bundle's files; without a budget the closest to the
    unquantized model that is no larger is published.

    Raises:
        UsageError: neither a budget nor a size is given, or an option that a search does not take.
        BuildError: no candidate fits; the message names the nearest.
    """
    if capabilities(target).has_gpu or engine not in (None, EngineRequest()):
        raise UsageError(
            f"--auto measures candidates on the CPU, the target is {target}; leave it out, and --target cpu"
        )
    asked = Request(precision=precision, max_context=max_context, max_batch=max_batch, budget=budget)
    asked = replace(asked, adapters=adapters, rank=rank)
    asked = asked.over(read_recipe(recipe)) if recipe is not None else asked
    limits = asked.budget or Budget()
    if not limits and max_size is None:
        raise UsageError(
            "--auto needs a budget or a size: give --max-kl, --min-agreement, --max-perplexity-increase or --max-size"
        )

    def make(candidate: Request, folder: Path) -> None:
        # The text is given only to candidates that use it, for a build refuses unused options.
        unused = calibration is not None and needs_calibration(resolved(candidate)) is None
        helped = replace(calibration, text=None, samples=None, length=None) if calibration and unused else calibration
        order = {
            "target": target,
            "head": head,
            "recipe": candidate,
            "calibration": helped,
            "text": text,
            "judged": True,
        }
        build(source, folder, progress=progress, **order)  # type: ignore[arg-type]

    export = bundle.read_export(source)
    if export.geometry.encoder or export.geometry.diffusion or export.geometry.head:
        raise UsageError("--auto times prompts and tokens in order, and this model has none; build it with a precision")

    def resolved(candidate: Request) -> Recipe:
        return settle(candidate, export.geometry, capabilities(target), "auto", calibrates)[0]

    calibrates = calibration is not None and calibration.is_possible
    limit = available_memory() if memory is None else memory
    trials: list[Trial] = []
    folders: dict[str, Path] = {}
    holds: list[disk_cache.Hold] = []  # a search may outlast the age at which cache entries are removed
    key = [export.source.fingerprint, str(weights_identity(source)), target, _identity(text), _identity(calibration)]
    key.append(_identity(head and head / bundle.EXPORT_MANIFEST))
    open_request, coded = replace(asked, budget=None), bool(export.geometry.coded)
    for name, candidate in _candidates(open_request, calibrates, resolved, coded).items():
        folders[name] = disk_cache.entry("auto", _key(candidate, key))
        folders[name].mkdir(parents=True, exist_ok=True)
        holds.append(disk_cache.Hold(folders[name]))
        measured = _measure(name, folders[name], candidate, make, progress)
        trials += [_within(trial, limits, limit, max_size) for trial in measured]
    chosen = choose(trials, closest=not limits)
    if chosen is None:
        raise BuildError(_explain_nothing_fits(trials))
    manifest = _publish(folders[chosen.name] / BUILT, output, chosen, limits, force)
    disk_cache.prune("auto", KEPT_BYTES)
    return AutoReport(output, chosen, tuple(trials), manifest)


def _identity(what: Path | CalibrationRequest | None) -> str:
    """The part of a text, or of a calibration, that changes a candidate."""
    if isinstance(what, CalibrationRequest):
        return f"{_identity(what.text)} {what.samples} {what.length}"
    return bundle.sha256_file(what) if what is not None else ""


def _candidates(
    request: Request, calibrates: bool, resolved: Callable[[Request], Recipe], coded: bool = False
) -> dict[str, Request]:
    """Candidates with the request's choices applied, without duplicates and contradictions."""
    found: dict[str, Request] = {}
    refused: UsageError | None = None
    for name, candidate in {**(OF_CODES if coded else {}), **CANDIDATES}.items():
        if _contradicts(request, candidate):
            continue
        whole = request.over(candidate)
        try:
            wish = needs_calibration(resolved(whole))
        except UsageError as error:
            refused = error
            continue
        if whole not in found.values() and (calibrates or wish is None):
            found[name] = whole
    if not found:
        raise refused or UsageError("no candidate of --auto is like what is asked for; leave some of it open")
    return found


def _contradicts(request: Request, candidate: Request) -> bool:
    """True if the request overrides a choice that the candidate is named after."""
    pairs = ((getattr(request, f.name), getattr(candidate, f.name)) for f in fields(Request))
    return any(asked is not None and own is not None and asked != own for asked, own in pairs)


def _key(candidate: Request, rest: list[str]) -> str:
    text = json.dumps([__version__, asdict(candidate), *rest])  # not sorted: of patterns of layers the last one wins
    return sha256(text.encode()).hexdigest()[:32]


def _measure(
    name: str, folder: Path, candidate: Request, make: Callable[[Request, Path], None], progress: Progress
) -> list[Trial]:
    """Build the candidate unless cached, and time it with each number of threads unless known."""
    target = folder / BUILT
    progress(f"candidate {name}")
    try:
        manifest = read_bundle(target)
    except BundleError:
        disk_cache.remove(target.parent)
        with disk_cache.publish_entry(target.parent) as room:  # a concurrent search may have finished first
            make(candidate, room / target.name)
        manifest = read_bundle(target)
    rows = candidate.max_batch or 1  # a bundle may serve more rows than are asked for
    most = usable_threads()
    counts = sorted({most, max(1, most // 2)}, reverse=True)  # more threads than memory bandwidth feeds are waste
    return [_time_trial(name, folder, manifest, threads, rows, progress) for threads in counts]


def _time_trial(name: str, folder: Path, manifest: Manifest, threads: int, rows: int, progress: Progress) -> Trial:
    machine = sha256(f"{cpu_model()} {manifest.target.engine_version} {threads}".encode()).hexdigest()[:12]
    path = folder / f"trial-{machine}.json"
    with suppress(OSError, ValueError, BundleError):  # not measured yet, or half-written: measure again
        known: Trial = decode(Trial, json.loads(path.read_text()))
        return known
    progress(f"timing {name} with {threads} threads")
    context = manifest.limits.max_context
    prompt = max(1, min(PROMPT_TOKENS, context - TIMED_TOKENS))
    new_tokens = min(TIMED_TOKENS, context - prompt)
    report = benchmark(folder / BUILT, prompt_length=prompt, new_tokens=new_tokens, repeats=REPEATS, threads=threads)
    quality = manifest.quality
    # The builder judged it, with the export as the reference.
    assert quality is not None and quality.reference_perplexity is not None
    assert quality.mean_kl is not None and quality.top1_agreement is not None
    trial = Trial(
        name=name,
        threads=threads,
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        decode_tokens_per_s=report.decode_tokens_per_s,
        memory=manifest.memory.total(manifest.limits.max_context, rows),
        size=sum(entry.size for entry in manifest.files.values()),
        mean_kl=quality.mean_kl,
        top1_agreement=quality.top1_agreement,
        perplexity_increase=quality.perplexity / quality.reference_perplexity - 1,
    )
    with disk_cache.write_entry(path) as staging:
        staging.write_text(json.dumps(asdict(trial)))
    return trial


def _within(trial: Trial, budget: Budget, memory: int, size: int | None = None) -> Trial:
    broken = find_broken_limits(trial.mean_kl, trial.top1_agreement, trial.perplexity_increase, budget)
    reasons = list(broken.values())
    if trial.memory > memory:
        reasons.append(f"{trial.memory / 1e6:.0f} MB of {memory / 1e6:.0f}")
    if size is not None and trial.size > size:
        reasons.append(f"{trial.size / 1e6:.1f} MB of files, at most {size / 1e6:.1f}")
    return replace(trial, reason="; ".join(reasons))


def _explain_nothing_fits(trials: Sequence[Trial]) -> str:
    best = min(trials, key=lambda trial: trial.mean_kl)
    small = min(trials, key=lambda trial: (trial.memory, trial.size))
    return (
        f"none of {len(trials)} trials fits: the closest to the unquantized model is {best.name} ({best.reason}), "
        f"the smallest {small.name} ({small.reason}); give a larger budget or more room, or a smaller --max-context"
    )


def _publish(source: Path, output: Path, chosen: Trial, budget: Budget, force: bool) -> Manifest:
    """Copy the chosen bundle's files into place; its manifest then says with how many threads it was fastest."""
    found = read_bundle(source)
    try:
        for _ in verify_files(source, found):
            pass
    except BundleError as error:
        disk_cache.remove(source.parent)
        raise BuildError(f"the cache held a broken {chosen.name} ({error}); it was removed: run again") from error
    recipe = replace(found.recipe, name=f"auto: {chosen.name}", threads=chosen.threads, budget=budget)
    manifest = replace(found, recipe=recipe)
    with stage_folder(output, force=force) as folder:
        for name in manifest.files:
            shutil.copyfile(source / name, folder / name)
        bundle.write_manifest(manifest, folder)
    return manifest
