"""A machine's diagnosis: what each target would do on it, and whether a bundle runs here."""

from dataclasses import dataclass
from pathlib import Path

from llmc.bundle import Manifest, build_command, find_unbuilt_kind, read_bundle, version
from llmc.errors import LlmcError, text_of
from llmc.runtime.diagnose.targets import (
    ALL,
    NEEDS,
    REBUILD,
    RUN,
    Check,
    Facts,
    Outlook,
    Subject,
    issues,
    outlook,
    upgrade,
)
from llmc.runtime.host.machine import Available, cpu_features, cpu_model, memory_here, usable_threads
from llmc.runtime.host.probe import Probe
from llmc.runtime.host.probe_steps import Device
from llmc.runtime.kv.budget import check_load, next_capacity, round_up
from llmc.runtime.sessions.onnxruntime.cpu import usable_graphs

MB = 1_000_000
DEFERRED = "it has no engine yet (--deferred)"
REBUILT = f"{REBUILD} {{f.folder}}"
# What a manifest may hold that no build writes shows itself as one of these.
UNREADABLE = (LlmcError, ArithmeticError, LookupError, OSError, TypeError, ValueError)


@dataclass(frozen=True)
class BundleOutlook:
    """One bundle on this machine: why it does not run, the command (or deed) that mends it, and what to do without."""

    path: Path
    target: str
    reasons: tuple[str, ...]
    remedy: str
    instead: str = ""

    @property
    def runs(self) -> bool:
        """True if nothing speaks against it."""
        return not self.reasons


@dataclass(frozen=True)
class Machine:
    """Processor and memory, as far as this process may use them."""

    cpu: str
    features: tuple[str, ...]
    threads: int
    memory: Available


@dataclass(frozen=True)
class Diagnosis:
    """All that is to be said of a machine."""

    machine: Machine
    probe: Probe
    targets: dict[str, Outlook]
    bundle: BundleOutlook | None


def this_machine() -> Machine:
    return Machine(cpu_model(), tuple(sorted(cpu_features())), usable_threads(), memory_here())


def diagnose(probe: Probe, machine: Machine, bundle: Path | None = None) -> Diagnosis:
    """Judge each target by what a probe found, and ``bundle`` if there is one."""
    targets = {name: outlook(name, probe) for name in NEEDS}
    judged = None if bundle is None else judge_bundle(bundle, probe, targets)
    return Diagnosis(machine, probe, targets, judged)


# -------------------------------------------------------------------------------------------------------------- bundles


def judge_bundle(folder: Path, probe: Probe, targets: dict[str, Outlook]) -> BundleOutlook:
    """Judge the bundle in ``folder`` by its manifest; nothing is loaded."""
    try:
        return _judge(folder, read_bundle(folder), probe, targets)
    except UNREADABLE as error:
        reason = str(error) if isinstance(error, LlmcError) else text_of(error)
        remedy = build_command(folder if find_unbuilt_kind(folder) else "CHECKPOINT")
        if _readable(folder, engine_matters=False) and not _readable(folder, engine_matters=True):
            remedy = f"{REBUILD} {folder}"
        return BundleOutlook(folder, "", (reason,), remedy)


def _readable(folder: Path, engine_matters: bool) -> bool:
    try:
        read_bundle(folder, engine_matters=engine_matters)
    except UNREADABLE:
        return False
    return True


class BundleFacts(Facts):
    """A bundle on a machine: what the checks of a bundle ask."""

    def __init__(self, folder: Path, manifest: Manifest, probe: Probe) -> None:
        super().__init__(manifest.target.name, probe)
        self.folder, self.made_for, plan = folder, manifest.target, manifest.engine
        self.deferred = plan is not None and not plan.file
        self.engine = None if self.deferred else plan
        self.shortage = _shortage(manifest, self.device)
        self.refusal = _refusal(folder, manifest)


def _shortage(manifest: Manifest, device: Device | None) -> str:
    """Words about a GPU in which one row with the cache that is taken first does not fit; nothing where it does."""
    plan, engine = manifest.device, manifest.engine
    if device is None or device.free_memory is None or plan is None:
        return ""
    positions = next_capacity(1, manifest.limits.max_context) if engine is None else round_up(engine, 1)
    needed = plan.total(positions)
    return (
        f"it needs {needed // MB} MB of the GPU's memory for one row of {positions} positions, "
        f"{device.free_memory // MB} MB of {device.name} are free"
        if needed > device.free_memory
        else ""
    )


def _refusal(folder: Path, manifest: Manifest) -> str:
    """The reason why it cannot be loaded that no other check tells."""
    try:
        check_load(folder, manifest, manifest.limits.max_context)
        if manifest.device is None:
            usable_graphs(manifest)
    except LlmcError as error:
        return str(error)
    return ""


def _about(name: str) -> Subject:
    return Subject(name, ALL, (RUN,))


# fmt: off
CHECKS: tuple[Check[BundleFacts], ...] = (
    Check(_about("library"), lambda f: f.works and version(f.library.version) < version(f.made_for.engine_minimum),
          "it needs {f.made_for.engine} {f.made_for.engine_minimum}, {f.library.version} is installed", upgrade),
    Check(_about("deferred"), lambda f: f.deferred, DEFERRED, REBUILT),
    Check(_about("platform"), lambda f: f.engine and f.engine.platform != f.probe.platform,
          "its engine was built for {f.engine.platform}, this is {f.probe.platform}", REBUILT),
    Check(_about("version"),
          lambda f: f.engine and f.works and version(f.library.version) != version(f.made_for.engine_version),
          "its engine was built by {f.made_for.engine} {f.made_for.engine_version}, {f.library.version} is installed",
          REBUILT),
    Check(_about("GPU"), lambda f: f.engine and f.capability and not f.engine.fits_gpu(f.capability),
          "its engine is for compute capability {f.engine.gpus}, {f.device.name} has {f.capability}", REBUILT),
    Check(_about("memory"), lambda f: f.shortage,
          "{f.shortage}", "end what fills the GPU's memory, or build with a smaller precision or context"),
    Check(_about("load"), lambda f: f.refusal, "{f.refusal}", "llmc plan {f.folder}"),
)
# fmt: on


def _judge(folder: Path, manifest: Manifest, probe: Probe, targets: dict[str, Outlook]) -> BundleOutlook:
    target = manifest.target.name
    if target not in targets:
        return BundleOutlook(
            folder, target, (f"its target {target!r} is unknown to this llmc",), "pip install -U llmc-deploy"
        )
    facts = BundleFacts(folder, manifest, probe)
    blocking = [issue for issue in targets[target].obstacles if RUN in issue.blocks]
    found = [*blocking, *issues(CHECKS, facts)]
    remedy = found[0].remedy if found else ""
    if blocking and facts.deferred:  # as where it was built for elsewhere
        found.sort(key=lambda issue: issue.found != DEFERRED)
        remedy += f", then {REBUILD} {folder}; or take it to the machine that is to run it, and rebuild it there"
    reasons = tuple(f"{issue.found}: {issue.remedy}" for issue in found)
    emulates = bool(found) and manifest.device is not None and facts.judges
    instead = f"llmc run {folder} --emulate, which runs its graph on the CPU, slowly" if emulates else ""
    return BundleOutlook(folder, target, reasons, remedy, instead)
