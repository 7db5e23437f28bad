"""A machine's diagnosis: what each target would do on it, what could be better, and whether a bundle runs here."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmc.bundle import Manifest, build_command, read_bundle, unbuilt
from llmc.errors import LlmcError, text_of
from llmc.plans import version
from llmc.runtime.host.jetson import Jetson
from llmc.runtime.host.machine import Available, cpu_features, cpu_model, memory_here, usable_threads
from llmc.runtime.host.probe import Library, Probe
from llmc.runtime.host.targets import NEEDS, REBUILD, RUN, Obstacle, Outlook, first_device, judges, outlook, upgrade
from llmc.runtime.kv.budget import check_load, next_capacity
from llmc.runtime.sessions.onnxruntime.cpu import usable_graphs

MB = 1_000_000
DEFERRED = "it has no engine yet (--deferred)"
# What a manifest may hold that no build writes shows itself as one of these.
UNREADABLE = (LlmcError, ArithmeticError, LookupError, OSError, TypeError, ValueError)


@dataclass(frozen=True)
class BundleOutlook:
    """Whether one bundle runs here; if not, why, and the one command (or deed) that mends it.

    ``instead`` is what can be done without that: run a GPU's graph on the CPU; empty where that cannot be done either.
    """

    path: Path
    target: str
    reasons: tuple[str, ...]
    remedy: str
    instead: str = ""

    @property
    def runs(self) -> bool:
        """Whether nothing speaks against it."""
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
    """All that is to be said of a machine; ``advice`` is for what works and could work better."""

    machine: Machine
    probe: Probe
    targets: dict[str, Outlook]
    advice: tuple[str, ...]
    bundle: BundleOutlook | None


def this_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(cpu_model(), tuple(sorted(cpu_features())), usable_threads(), memory_here())


def diagnose(probe: Probe, machine: Machine, bundle: Path | None = None) -> Diagnosis:
    """Judge each target by what a probe found, and ``bundle`` if there is one."""
    targets = {name: outlook(name, probe) for name in NEEDS}
    judged = None if bundle is None else judge_bundle(bundle, probe, targets)
    return Diagnosis(machine, probe, targets, tuple(_advice(probe.jetson)), judged)


def _advice(jetson: Jetson | None) -> Iterator[str]:
    """What makes a Jetson faster."""
    if jetson is None:
        return
    fastest = next((mode for mode in jetson.power_modes if mode.name == "MAXN_SUPER"), None)
    fastest = fastest or next((mode for mode in jetson.power_modes if mode.name.startswith("MAXN")), None)
    if fastest is not None and jetson.power_mode is not None and jetson.power_mode != fastest:
        yield (
            f"power mode {jetson.power_mode.name or jetson.power_mode.number}: sudo nvpmodel -m {fastest.number} "
            f"chooses {fastest.name}, the fastest"
        )
    yield "clocks follow the load: sudo jetson_clocks holds them at their highest while you measure"


# -------------------------------------------------------------------------------------------------------------- bundles


def judge_bundle(folder: Path, probe: Probe, targets: dict[str, Outlook]) -> BundleOutlook:
    """Whether the bundle in ``folder`` runs here, by what its manifest says; nothing is loaded."""
    try:
        return _judged(folder, read_bundle(folder), probe, targets)
    except UNREADABLE as error:
        reason = str(error) if isinstance(error, LlmcError) else text_of(error)
        rebuild = f"{REBUILD} {folder}" if _only_engine_damaged(folder) else None
        remedy = rebuild or build_command(folder if unbuilt(folder) else "CHECKPOINT")
        return BundleOutlook(folder, "", (reason,), remedy)


def _only_engine_damaged(folder: Path) -> bool:
    """Whether a bundle that cannot be read could be if its engine were made anew."""
    try:
        read_bundle(folder, engine_matters=False)
    except UNREADABLE:
        return False
    try:
        read_bundle(folder)
    except UNREADABLE:
        return True
    return False


def _judged(folder: Path, manifest: Manifest, probe: Probe, targets: dict[str, Outlook]) -> BundleOutlook:
    target = manifest.target.name
    if target not in targets:
        return BundleOutlook(folder, target, (f"its target {target!r} is unknown to this llmc",), "pip install -U llmc")
    blocking = [obstacle for obstacle in targets[target].obstacles if RUN in obstacle.blocks]
    found = [*blocking, *_misfits(folder, manifest, probe)]
    remedy = found[0].remedy if found else ""
    if blocking and manifest.engine is not None and not manifest.engine.file:  # as where it was built for elsewhere
        found.sort(key=lambda obstacle: obstacle.found != DEFERRED)
        remedy += f", then {REBUILD} {folder}; or take it to the machine that is to run it, and rebuild it there"
    reasons = tuple(f"{obstacle.found}: {obstacle.remedy}" for obstacle in found)
    emulates = bool(found) and manifest.device is not None and judges(probe.libraries["onnxruntime"])
    instead = f"llmc run {folder} --emulate, which runs its graph on the CPU, slowly" if emulates else ""
    return BundleOutlook(folder, target, reasons, remedy, instead)


def _misfits(folder: Path, manifest: Manifest, probe: Probe) -> Iterator[Obstacle]:
    """What speaks against this bundle on a machine where its target runs."""
    library = probe.libraries[NEEDS[manifest.target.name].library]
    if library.state == "ok" and version(library.version) < version(manifest.target.engine_minimum):
        found = f"it needs {manifest.target.engine} {manifest.target.engine_minimum}, {library.version} is installed"
        yield Obstacle((RUN,), found, upgrade(manifest.target.name, NEEDS[manifest.target.name], probe))
    yield from _engine(folder, manifest, probe, library)
    yield from _device_memory(manifest, probe)
    try:
        check_load(folder, manifest, manifest.limits.max_context)
        if manifest.device is None:
            usable_graphs(manifest)
    except LlmcError as error:
        yield Obstacle((RUN,), str(error), f"llmc plan {folder}")


def _engine(folder: Path, manifest: Manifest, probe: Probe, library: Library) -> Iterator[Obstacle]:
    """An engine belongs to one platform, one version of its library, and some GPUs."""
    plan, built = manifest.engine, manifest.target.engine_version
    if plan is None:
        return
    again, device = f"{REBUILD} {folder}", first_device(probe)
    if not plan.file:
        yield Obstacle((RUN,), DEFERRED, again)
        return
    if plan.platform != probe.platform:
        yield Obstacle((RUN,), f"its engine was built for {plan.platform}, this is {probe.platform}", again)
    if library.state == "ok" and not plan.fits_version(library.version, built):
        found = f"its engine was built by {manifest.target.engine} {built}, {library.version} is installed"
        yield Obstacle((RUN,), found, again)
    if device is not None and not plan.fits_gpu(device.compute_capability):
        found = f"its engine is for compute capability {plan.gpus}, {device.name} has {device.compute_capability}"
        yield Obstacle((RUN,), found, again)


def _device_memory(manifest: Manifest, probe: Probe) -> Iterator[Obstacle]:
    """One row with the cache that is taken first must fit."""
    device, plan, engine = first_device(probe), manifest.device, manifest.engine
    if device is None or device.free_memory is None or plan is None:
        return
    positions = next_capacity(1, manifest.limits.max_context)
    if engine is not None:
        positions = engine.capacity or engine.buckets[0]
    needed = plan.total(positions)
    if needed > device.free_memory:
        found = (
            f"it needs {needed // MB} MB of the GPU's memory for one row of {positions} positions, "
            f"{device.free_memory // MB} MB of {device.name} are free"
        )
        yield Obstacle((RUN,), found, "end what fills the GPU's memory, or build with a smaller precision or context")
