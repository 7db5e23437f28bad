"""The targets on a machine that was probed: one table of checks, each with what was found and its remedy."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from llmc.bundle import version
from llmc.errors import install_command
from llmc.runtime.host.probe import Probe
from llmc.runtime.host.probe_steps import Library

# Running, compiling (which --rebuild does too), and judging, which a build from an export does beside.
RUN, BUILD, JUDGE = "run", "build", "judge"
BOTH = (BUILD, RUN)
GPU, JUDGING = ("gpu",), ("judging",)  # what a target cannot do without them is said by its Needs
REBUILD = "llmc build --rebuild"

# The oldest driver of each major version of CUDA: https://docs.nvidia.com/deploy/cuda-compatibility
OLDEST_DRIVER = {"12": "525", "13": "580"}
# What TensorRT-RTX lists; "and later" beyond them: https://docs.nvidia.com/deeplearning/tensorrt-rtx
RTX_GPUS = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
# The first compute capability that has a precision, by target; not run on any. Sources: the support matrices of
# TensorRT and of TensorRT-RTX 1.5 (https://docs.nvidia.com/deeplearning); for int4 of TensorRT, of which its own says
# nothing, that of NVIDIA's Model Optimizer.
PRECISIONS = {
    "cuda": {"fp32": "7.5", "fp16": "7.5", "int8": "7.5", "int4": "7.5"},
    "tensorrt": {"fp32": "7.5", "fp16": "7.5", "bf16": "8.0", "int8": "7.5", "int4": "8.0", "fp8": "8.9"},
    "tensorrt-rtx": {"fp32": "7.5", "fp16": "7.5", "bf16": "8.0", "int8": "8.0", "int4": "8.0", "fp8": "8.9"},
}
# The oldest ONNX Runtime that runs the exported graph, which a build is judged by; Python 3.10 has no such version.
JUDGE_MINIMUM = "1.28"
OLD_PYTHON = "3.10"
BUILD_PACKAGES = ("onnx", "onnx-ir", "ml_dtypes")
NEW_JETPACK = (
    "on a Jetson it comes with JetPack 7.2 or newer (python3-libnvinfer), for the system's Python in a virtual "
    "environment with --system-site-packages, as recipes/jetson.md says; or use the target cpu"
)
NO_WHEEL = "PyPI has onnxruntime-gpu for x86-64 only: use the target tensorrt"
NO_GPU = (
    "see that nvidia-smi lists a GPU, that CUDA_VISIBLE_DEVICES does not hide it, and that a container "
    "was started with --gpus all or --runtime nvidia"
)
BROKEN_BINDINGS = "cuda-bindings cannot be used: {f.bindings.problem}"
SEE_GPU = "see that nvidia-smi works and that the GPU has free memory"
# What a failing driver says, and what to do.
DRIVER_REMEDIES = {
    "NO_DEVICE": NO_GPU,
    "MISMATCH": "the driver's library and kernel module are of different versions: restart the machine",
    "OUT_OF_MEMORY": "end what fills the GPU's memory (nvidia-smi lists it)",
    "": "restart the machine, then see that nvidia-smi works",
}


@dataclass(frozen=True)
class Issue:
    """Something that stands in the way, the remedy, and what cannot be done: ``build``, ``run`` or ``judge``."""

    blocks: tuple[str, ...]
    found: str
    remedy: str


@dataclass(frozen=True)
class Outlook:
    """One target's abilities here; ``defers``: its bundles can be built without their engines."""

    obstacles: tuple[Issue, ...]
    notes: tuple[str, ...]
    defers: bool = False

    @property
    def runs(self) -> bool:
        """True if bundles of the target run here."""
        return not self._is_blocked(RUN)

    @property
    def builds(self) -> bool:
        """True if bundles of the target can be built here, from an export."""
        return self.rebuilds and not self._is_blocked(JUDGE)

    @property
    def rebuilds(self) -> bool:
        """True if the engines of bundles can be compiled here."""
        return not self._is_blocked(BUILD)

    @property
    def state(self) -> str:
        if self.builds:
            return "ready" if self.runs else "can build, not run"
        if self.rebuilds:
            return "can run and rebuild" if self.runs else "can rebuild, not run"
        if self.defers:
            return f"can {'run, and ' if self.runs else ''}build with --deferred"
        return "can run, not build" if self.runs else "not possible"

    def _is_blocked(self, what: str) -> bool:
        return any(what in issue.blocks for issue in self.obstacles)


# -------------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Needs:
    """Requirements of a target: the engine's library, its oldest version, and the extra that brings it.

    Attributes:
        gpu, judging: what cannot be done without a GPU, and without an ONNX Runtime that judges.
        gpus, later: compute capabilities, or their major numbers, that the library has code for, as for all beyond
            ``later``; ``instead`` is what to do with another GPU.
    """

    library: str
    minimum: str
    extra: str
    gpu: tuple[str, ...] = ()
    judging: tuple[str, ...] = (BUILD,)
    gpus: tuple[str, ...] = ()
    later: str = "99"
    instead: str = ""

    def supports(self, capability: str) -> bool:
        """True if the library has code for a GPU of this compute capability."""
        return not {capability, capability.partition(".")[0]}.isdisjoint(self.gpus) or (
            version(capability) > version(self.later)
        )


NEEDS = {
    "cpu": Needs("onnxruntime", "1.23", "cpu"),
    # onnxruntime-gpu has machine code for these and no PTX, so that it runs on no other architecture.
    "cuda": Needs(
        "onnxruntime", "1.28", "gpu", (RUN,), gpus=("7.5", "8", "9", "12"), instead="use the target tensorrt"
    ),
    "tensorrt": Needs("tensorrt", "10.15", "tensorrt", BOTH, (JUDGE,), ("7.5",), "7.5", "use the target cpu"),
    "tensorrt-rtx": Needs(
        "tensorrt-rtx", "1.7", "tensorrt-rtx", (RUN,), (JUDGE,), RTX_GPUS, "12.1", "use the target tensorrt or cuda"
    ),
}
ALL, CUDA, ENGINES = tuple(NEEDS), ("cuda",), ("tensorrt", "tensorrt-rtx")
GPUS = (*CUDA, *ENGINES)


def list_absent_precisions(target: str, capability: str) -> dict[str, str]:
    """The precisions that a GPU of this compute capability does not have on a target, and the first one that has."""
    known = PRECISIONS.get(target, {}) if capability else {}
    return {precision: first for precision, first in known.items() if version(capability) < version(first)}


class Facts:
    """A probe as one target sees it: what the checks ask, and the words that they need."""

    def __init__(self, target: str, probe: Probe) -> None:
        self.target, self.probe, self.needs = target, probe, NEEDS[target]
        self.blocked: dict[tuple[str, ...], tuple[str, ...]] = {GPU: self.needs.gpu, JUDGING: self.needs.judging}
        self.name, self.library = self.needs.library, probe.libraries[self.needs.library]
        self.judge, self.bindings = probe.libraries["onnxruntime"], probe.libraries["cuda-bindings"]
        self.driver, self.jetson = probe.driver, probe.jetson
        self.works = self.library.state == "ok"
        self.too_old = version(self.library.version) < version(self.needs.minimum)
        self.device = next(iter(probe.driver.devices), None)  # the first GPU is the one that is used
        self.capability = "" if self.device is None else self.device.compute_capability
        self.absent = ", ".join(
            f"{name} (from {first} on)" for name, first in list_absent_precisions(target, self.capability).items()
        )
        self.python = ".".join(probe.python.split(".")[:2])
        self.lacking = ", ".join(name for name in BUILD_PACKAGES if name not in probe.packages)
        self.judges = self.judge.state == "ok" and version(self.judge.version) >= version(JUDGE_MINIMUM)
        # A build without its engine takes what lowers and what judges, and neither a GPU nor the engine's library.
        self.defers = target in ENGINES and self.judges and not self.lacking
        words = {"ok": f"{self.judge.version} is installed", "missing": "none is installed"}
        self.judge_words = words.get(self.judge.state, f"the one installed {self.judge.state}")
        module = probe.kernel_module
        self.driver_words = f"the driver (driver {module})" if module else "the driver"
        self.hidden_gpu = f"NVIDIA's module {module}" if module else "a Jetson" if self.jetson else ""
        self.reason = self.library.problem or "it does not say why"

    def lacks(self, ability: str) -> bool:
        """True if the engine's library is without ``ability``."""
        return ability not in self.library.abilities

    def too_new(self, library: Library) -> bool:
        """True for a library of a later major version of CUDA than the driver's; within one, all are served."""
        return bool(library.cuda and self.driver.version) and int(library.cuda) > version(self.driver.version)[0]


# ------------------------------------------------------------------------------------------------------------- remedies


def _install(f: Facts) -> str:
    if f.target == "tensorrt":
        return _install_tensorrt(f)
    if f.target == "cuda" and not f.probe.platform.endswith("x86_64"):
        return NO_WHEEL
    if f.target == "cuda" and f.python == OLD_PYTHON:
        return f"use Python 3.11 or newer: onnxruntime-gpu {f.needs.minimum} has no wheel for 3.10"
    return install_command(f.needs.extra)


def _install_tensorrt(f: Facts) -> str:
    """TensorRT is not on PyPI: a Jetson has it in its system, any other machine gets it from NVIDIA."""
    if f.jetson:
        return NEW_JETPACK
    major = f.driver.version.partition(".")[0]
    cuda = major if major in OLDEST_DRIVER else max(OLDEST_DRIVER)
    return f"pip install --extra-index-url https://pypi.nvidia.com tensorrt-cu{cuda}"


def _reinstall(f: Facts) -> str:
    install = _install(f)
    return f"uninstall it, then {install}" if install.startswith("pip") else "install it again"


def _exchange(f: Facts) -> str:
    """The packages onnxruntime and onnxruntime-gpu have one name when imported; only the second one has CUDA."""
    install = _install(f)
    return f"pip uninstall -y onnxruntime; {install}" if install.startswith("pip") else install


def upgrade(f: Facts) -> str:
    if f.jetson and f.target == "tensorrt":
        return NEW_JETPACK
    if f.name == "onnxruntime" and f.python == OLD_PYTHON:
        return "use Python 3.11 or newer, for which newer ones exist"
    return _install(f).replace("pip install", "pip install -U")


def _mend_driver(f: Facts) -> str:
    return next(remedy for said, remedy in DRIVER_REMEDIES.items() if said in f.driver.problem)


def _newer_driver(f: Facts) -> str:
    oldest = OLDEST_DRIVER.get(f.library.cuda, "of that CUDA")
    return f"install the driver {oldest} or newer, or the library for the present one"


def _get_judge(f: Facts) -> str:
    """For Python 3.10 there is none."""
    old = f.python == OLD_PYTHON
    if old and f.target in ENGINES:
        return f"build with --deferred on another machine, then {REBUILD} BUNDLE on this one, which needs none"
    if f.judge.state == "ok" or old:
        package = "onnxruntime-gpu" if "CUDAExecutionProvider" in f.judge.abilities else "onnxruntime"
        return f"{'use Python 3.11 or newer and ' if old else ''}pip install -U {package}"
    with_cuda = f.target == "cuda" and _install(f) != NO_WHEEL
    get = _install if f.judge.state == "missing" else _reinstall
    return get(Facts("cuda" if with_cuda else "cpu", f.probe))


# --------------------------------------------------------------------------------------------------------------- checks

F = TypeVar("F", bound=Facts)


@dataclass(frozen=True)
class Subject:
    """Something to check; only the first of its checks that applies is reported.

    Attributes:
        blocks: what cannot be done if a check applies; nothing for notes.
        unless: report it only if nothing before it blocks this, which would explain it.
    """

    name: str
    targets: tuple[str, ...]
    blocks: tuple[str, ...] = ()
    unless: str = ""


@dataclass(frozen=True)
class Check(Generic[F]):
    """A condition, what was found where it holds, with facts ``f`` in braces, and the remedy, or a function for it."""

    subject: Subject
    holds: Callable[[F], object]
    found: str
    remedy: str | Callable[[F], str] = ""


LIBRARY, PROVIDER = Subject("library", ALL, BOTH), Subject("library", CUDA, (RUN,))
DRIVER, DEVICE, BINDINGS = Subject("driver", GPUS, GPU), Subject("GPU", GPUS, GPU), Subject("bindings", GPUS, (RUN,))
RUNTIME, BUILDER = Subject("runtime", ENGINES, (RUN,), BUILD), Subject("builder", ENGINES, (BUILD,), BUILD)
PACKAGES, JUDGES = Subject("packages", ALL, (BUILD,)), Subject("judge", ALL, JUDGING)
AHEAD, LESS = Subject("other GPUs", ("tensorrt-rtx",)), Subject("precisions", GPUS)
DEFERRED, WARNING = Subject("deferred", ("tensorrt",)), Subject("warning", GPUS)

# fmt: off
CHECKS: tuple[Check[Facts], ...] = (
    Check(LIBRARY, lambda f: f.library.state == "missing", "{f.name} is not installed", _install),
    Check(LIBRARY, lambda f: f.library.state != "ok", "{f.name} {f.library.state}: {f.library.problem}", _reinstall),
    Check(PROVIDER, lambda f: f.lacks("CUDAExecutionProvider"),
          "onnxruntime {f.library.version} is the package without CUDA", _exchange),
    Check(LIBRARY, lambda f: f.too_old,
          "{f.name} is {f.library.version}, {f.needs.minimum} is the oldest for this target", upgrade),
    Check(PROVIDER, lambda f: f.lacks("cuda") and f.driver.state == "ok",
          "ONNX Runtime cannot load its CUDA provider: {f.library.problem}",
          "pip install 'onnxruntime-gpu[cuda,cudnn]', which brings CUDA's libraries"),
    Check(DRIVER, lambda f: f.driver.state == "missing" and f.hidden_gpu,
          "there is {f.hidden_gpu}, but no libcuda.so.1", "start the container with --runtime nvidia or --gpus all"),
    Check(DRIVER, lambda f: f.driver.state == "missing",
          "there is no NVIDIA driver (libcuda.so.1)",
          f"on a machine with an NVIDIA GPU install the driver {max(OLDEST_DRIVER.values())} or newer"),
    Check(DRIVER, lambda f: f.driver.state != "ok",
          "the CUDA driver {f.driver.state}: {f.driver.problem}", _mend_driver),
    Check(DRIVER, lambda f: f.device is None, "the CUDA driver sees no GPU", NO_GPU),
    Check(DRIVER, lambda f: f.too_new(f.library),
          "{f.name} {f.library.version} is for CUDA {f.library.cuda}, {f.driver_words} serves {f.driver.version}",
          _newer_driver),
    Check(DEVICE, lambda f: f.capability and not f.needs.supports(f.capability),
          "{f.name} does not list compute capability {f.capability} ({f.device.name})", "{f.needs.instead}"),
    Check(BINDINGS, lambda f: f.bindings.state == "missing",
          "cuda-bindings is not installed", lambda f: install_command(f.needs.extra)),
    Check(BINDINGS, lambda f: f.bindings.state == "ok" and f.too_new(f.bindings),
          "cuda-bindings {f.bindings.version} is for CUDA {f.bindings.cuda}, the driver serves CUDA {f.driver.version}",
          "pip install 'cuda-bindings<{f.bindings.cuda}'"),
    Check(BINDINGS, lambda f: f.bindings.state != "ok", BROKEN_BINDINGS, "install it again"),
    Check(BINDINGS, lambda f: f.driver.state == "ok" and "initialised" not in f.bindings.abilities,
          BROKEN_BINDINGS, "install it again"),
    Check(RUNTIME, lambda f: f.lacks("runtime"),
          "{f.name} {f.library.version} cannot make a runtime here: {f.reason}", SEE_GPU),
    Check(BUILDER, lambda f: f.lacks("builder"),
          "{f.name} {f.library.version} cannot make a builder here: {f.reason}", SEE_GPU),
    Check(PACKAGES, lambda f: f.lacking,
          "building needs {f.lacking}", lambda f: f"{install_command('build')}, which brings no torch"),
    Check(JUDGES, lambda f: not f.judges,
          f"an export is built beside ONNX Runtime {JUDGE_MINIMUM} or newer, which judges; {{f.judge_words}}",
          _get_judge),
    Check(AHEAD, lambda f: f.works and f.device is None,
          f"builds ahead of time for GPUs of compute capability {', '.join(RTX_GPUS)}"),
    Check(LESS, lambda f: f.capability and f.absent,
          "no {f.absent}: {f.device.name} has compute capability {f.capability}"),
    Check(DEFERRED, lambda f: f.defers and not (f.works and f.device),
          "builds with --deferred: the engine is compiled where it is to run"),
    Check(WARNING, lambda f: f.works and f.library.problem, "{f.name} says: {f.library.problem}"),
)
# fmt: on


def issues(checks: Iterable[Check[F]], f: F) -> list[Issue]:
    """The checks that hold, notes among them."""
    told: dict[str, Issue] = {}
    for check in checks:
        subject, remedy = check.subject, check.remedy
        explained = subject.name in told or any(subject.unless in issue.blocks for issue in told.values())
        if f.target in subject.targets and not explained and check.holds(f):
            blocks = f.blocked.get(subject.blocks, subject.blocks)
            words = remedy.format(f=f) if isinstance(remedy, str) else remedy(f)
            told[subject.name] = Issue(blocks, check.found.format(f=f), words)
    return list(told.values())


def outlook(target: str, probe: Probe) -> Outlook:
    """Judge ``target`` by what was probed; the first obstacle is the one to remove first."""
    f = Facts(target, probe)
    found = issues(CHECKS, f)
    notes = tuple(issue.found for issue in found if not issue.blocks)
    return Outlook(tuple(issue for issue in found if issue.blocks), notes, f.defers)
