"""What each target would do on a machine that was probed: what stands in the way, and the remedy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmc.plans import version
from llmc.runtime.host.jetson import Jetson
from llmc.runtime.host.probe import Device, Library, Probe

# Running, compiling (which --rebuild does too), and judging, which a build from an export does beside.
RUN, BUILD, JUDGE = "run", "build", "judge"
BOTH = (BUILD, RUN)
REBUILD = "llmc build --rebuild"
REBUILD_HERE = f"build with --deferred on another machine, then {REBUILD} BUNDLE on this one, which needs none"

# The oldest driver of each major version of CUDA: https://docs.nvidia.com/deploy/cuda-compatibility
OLDEST_DRIVER = {"12": "525", "13": "580"}
# What TensorRT-RTX lists; "and later" beyond them: https://docs.nvidia.com/deeplearning/tensorrt-rtx
RTX_GPUS = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
# onnxruntime-gpu has machine code for these and no PTX, so that it runs on no other architecture.
CUDA_GPUS = ("7.5", "8", "9", "12")
OLDEST_TENSORRT_GPU, OLDEST_FP8_GPU = "7.5", "8.9"
# The oldest ONNX Runtime that runs the exported graph, which a build is judged by; Python 3.10 has no such version.
JUDGE_MINIMUM = "1.28"
BUILD_PACKAGES = ("onnx", "onnx-ir", "ml_dtypes")
NO_WHEEL = "PyPI has onnxruntime-gpu for x86-64 only: use the target tensorrt"
# What a failing driver says, and what to do.
DRIVER_REMEDIES = {
    "NO_DEVICE": "see that nvidia-smi lists a GPU, that CUDA_VISIBLE_DEVICES does not hide it, and that a container "
    "was started with --gpus all or --runtime nvidia",
    "MISMATCH": "the driver's library and kernel module are of different versions: restart the machine",
    "NOT_READY": "start nvidia-fabricmanager",
    "OUT_OF_MEMORY": "end what fills the GPU's memory (nvidia-smi lists it)",
}


@dataclass(frozen=True)
class Obstacle:
    """Why something cannot be done, and the remedy.

    ``blocks`` holds what cannot be done: ``build``, ``run``, or ``judge`` where engines can be rebuilt and no export
    can be built.
    """

    blocks: tuple[str, ...]
    found: str
    remedy: str


@dataclass(frozen=True)
class Outlook:
    """What one target would do here.

    ``defers`` tells that its bundles can be built here without their engines, which ``--rebuild`` makes elsewhere.
    """

    obstacles: tuple[Obstacle, ...]
    notes: tuple[str, ...]
    defers: bool = False

    @property
    def runs(self) -> bool:
        """Whether bundles of the target run here."""
        return not self._blocked(RUN)

    @property
    def builds(self) -> bool:
        """Whether bundles of the target can be built here, from an export."""
        return not self._blocked(BUILD) and not self._blocked(JUDGE)

    @property
    def rebuilds(self) -> bool:
        """Whether the engines of bundles can be compiled here."""
        return not self._blocked(BUILD)

    @property
    def state(self) -> str:
        """In words."""
        if self.builds:
            return "ready" if self.runs else "can build, not run"
        if self.rebuilds:
            return "can run and rebuild" if self.runs else "can rebuild, not run"
        if self.defers:
            return f"can {'run, and ' if self.runs else ''}build with --deferred"
        return "can run, not build" if self.runs else "not possible"

    def _blocked(self, what: str) -> bool:
        return any(what in obstacle.blocks for obstacle in self.obstacles)


@dataclass(frozen=True)
class Needs:
    """What a target needs.

    Attributes:
        library, minimum: the engine's library, and its oldest version.
        extra: that brings what pip can bring.
        gpu: what cannot be done without a GPU.
        supports: whether the library has code for a GPU of this compute capability.
        instead: what to do where it has none.
    """

    library: str
    minimum: str
    extra: str
    gpu: tuple[str, ...]
    supports: Callable[[str], bool]
    instead: str


def _in_tensorrt_rtx(capability: str) -> bool:
    return capability in RTX_GPUS or version(capability) > version(RTX_GPUS[-1])


def _in_onnxruntime(capability: str) -> bool:
    return capability in CUDA_GPUS or capability.partition(".")[0] in CUDA_GPUS


def _in_tensorrt(capability: str) -> bool:
    return version(capability) >= version(OLDEST_TENSORRT_GPU)


NEEDS = {
    "cpu": Needs("onnxruntime", "1.23", "cpu", (), lambda capability: True, ""),
    "cuda": Needs("onnxruntime", "1.28", "gpu", (RUN,), _in_onnxruntime, "use the target tensorrt"),
    "tensorrt": Needs("tensorrt", "10.3", "tensorrt", BOTH, _in_tensorrt, "use the target cpu"),
    "tensorrt-rtx": Needs(
        "tensorrt-rtx", "1.7", "tensorrt-rtx", (RUN,), _in_tensorrt_rtx, "use the target tensorrt or cuda"
    ),
}


def outlook(target: str, probe: Probe) -> Outlook:
    """What ``target`` would do here; the first obstacle is the one to remove first."""
    needs = NEEDS[target]
    obstacles = [*_library(target, needs, probe)]
    if needs.gpu:
        obstacles += [*_driver(needs, probe), *_gpu(needs, probe), *_bindings(needs, probe)]
    if target.startswith("tensorrt") and not any(BUILD in obstacle.blocks for obstacle in obstacles):
        obstacles += _abilities(target, probe.libraries[needs.library])
    obstacles += _build(target, probe)
    return Outlook(tuple(obstacles), tuple(_notes(target, needs, probe)), _defers(target, probe))


def _defers(target: str, probe: Probe) -> bool:
    """A build without its engine takes what lowers and what judges, and neither a GPU nor the engine's library."""
    able = judges(probe.libraries["onnxruntime"]) and all(name in probe.packages for name in BUILD_PACKAGES)
    return able and target.startswith("tensorrt")


def _library(target: str, needs: Needs, probe: Probe) -> Iterator[Obstacle]:
    library = probe.libraries[needs.library]
    if library.state == "missing":
        yield Obstacle(BOTH, f"{needs.library} is not installed", _install(target, needs, probe))
    elif library.state != "ok":
        yield Obstacle(BOTH, f"{needs.library} {library.state}: {library.problem}", _again(target, needs, probe))
    elif target == "cuda" and "CUDAExecutionProvider" not in library.abilities:
        yield _without_cuda(library, probe)
    elif version(library.version) < version(needs.minimum):
        yield Obstacle(
            BOTH,
            f"{needs.library} is {library.version}, {needs.minimum} is the oldest for this target",
            upgrade(target, needs, probe),
        )
    elif target == "cuda" and "cuda" not in library.abilities and probe.driver.state == "ok":
        yield Obstacle(
            (RUN,),
            f"ONNX Runtime cannot load its CUDA provider: {library.problem}",
            "pip install 'onnxruntime-gpu[cuda,cudnn]', which brings CUDA's libraries",
        )


def _install(target: str, needs: Needs, probe: Probe) -> str:
    if target == "tensorrt":
        return _install_tensorrt(probe)
    if target == "cuda" and not probe.platform.endswith("x86_64"):
        return NO_WHEEL
    if target == "cuda" and probe.python.startswith("3.10."):
        return f"use Python 3.11 or newer: onnxruntime-gpu {needs.minimum} has no wheel for 3.10"
    return f"pip install '.[{needs.extra}]' in llmc's folder"


def _again(target: str, needs: Needs, probe: Probe) -> str:
    """What to do about an installation that is broken."""
    install = _install(target, needs, probe)
    return f"uninstall it, then {install}" if install.startswith("pip") else "install it again"


def upgrade(target: str, needs: Needs, probe: Probe) -> str:
    """How to get a newer version of the target's library."""
    if probe.jetson is not None and target == "tensorrt":
        return "install JetPack 6.2 or newer, which brings it"
    if needs.library == "onnxruntime" and probe.python.startswith("3.10."):
        return "use Python 3.11 or newer, for which newer ones exist"
    return _install(target, needs, probe).replace("pip install", "pip install -U")


def _install_tensorrt(probe: Probe) -> str:
    """TensorRT is not on PyPI: a Jetson has it in its system, any other machine gets it from NVIDIA."""
    if probe.jetson is None:
        major = probe.driver.version.partition(".")[0]
        cuda = major if major in OLDEST_DRIVER else max(OLDEST_DRIVER)
        return f"pip install --extra-index-url https://pypi.nvidia.com tensorrt-cu{cuda}"
    jetpack, here = probe.jetson.jetpack, ".".join(probe.python.split(".")[:2])
    if jetpack is not None and version(jetpack.tensorrt) < version(NEEDS["tensorrt"].minimum):
        return f"JetPack {jetpack.name} has TensorRT {jetpack.tensorrt}: install JetPack 6.2 or newer"
    pythons = probe.system_tensorrt or ((jetpack.python,) if jetpack is not None else (here,))
    if here not in pythons:
        return f"TensorRT's module is for Python {pythons[0]}, this is {here}: use the system's python{pythons[0]}"
    if here in probe.system_tensorrt:
        return f"the system has it and this environment hides it: python{here} -m venv --system-site-packages ENV"
    return "sudo apt-get install python3-libnvinfer, then a venv with --system-site-packages"


def _without_cuda(library: Library, probe: Probe) -> Obstacle:
    """The packages onnxruntime and onnxruntime-gpu have one name when imported; only the second one has CUDA."""
    remedy = _install("cuda", NEEDS["cuda"], probe)
    if remedy.startswith("pip"):
        remedy = f"pip uninstall -y onnxruntime; {remedy}"
    return Obstacle((RUN,), f"onnxruntime {library.version} is the package without CUDA", remedy)


def _abilities(target: str, library: Library) -> Iterator[Obstacle]:
    """Whether the library could make what runs and what builds, where nothing else explains that it could not."""
    for ability, blocked in (("runtime", RUN), ("builder", BUILD)):
        if ability not in library.abilities:
            found = (
                f"{target} {library.version} cannot make a {ability} here: {library.problem or 'it does not say why'}"
            )
            yield Obstacle((blocked,), found, "see that nvidia-smi works and that the GPU has free memory")


def _driver(needs: Needs, probe: Probe) -> Iterator[Obstacle]:
    driver = probe.driver
    if driver.state == "missing":
        yield Obstacle(needs.gpu, *_no_driver(probe))
    elif driver.state != "ok":
        remedy = next((text for name, text in DRIVER_REMEDIES.items() if name in driver.problem), "")
        found = f"the CUDA driver {driver.state}: {driver.problem}"
        yield Obstacle(needs.gpu, found, remedy or "restart the machine, then see that nvidia-smi works")
    elif not driver.devices:
        yield Obstacle(needs.gpu, "the CUDA driver sees no GPU", DRIVER_REMEDIES["NO_DEVICE"])
    elif needs_newer_driver(probe.libraries[needs.library], driver.version):
        library = probe.libraries[needs.library]
        of = f" (driver {probe.kernel_module})" if probe.kernel_module else ""
        yield Obstacle(
            needs.gpu,
            f"{needs.library} {library.version} is for CUDA {library.cuda}, the driver{of} serves {driver.version}",
            _newer_driver(library.cuda, probe.jetson),
        )


def _no_driver(probe: Probe) -> tuple[str, str]:
    if probe.kernel_module is not None or probe.jetson is not None:
        kernel = f"NVIDIA's module {probe.kernel_module}" if probe.kernel_module else "a Jetson"
        return f"there is {kernel}, but no libcuda.so.1", "start the container with --runtime nvidia or --gpus all"
    newest = max(OLDEST_DRIVER)
    return (
        "there is no NVIDIA driver (libcuda.so.1)",
        f"on a machine with an NVIDIA GPU install the driver {OLDEST_DRIVER[newest]} or newer",
    )


def needs_newer_driver(library: Library, driver: str) -> bool:
    """Whether the library is for a later major version of CUDA than the driver serves; within one all are served."""
    return bool(library.cuda and driver) and int(library.cuda) > version(driver)[0]


def _newer_driver(cuda: str, jetson: Jetson | None) -> str:
    if jetson is not None:
        return f"install a JetPack with CUDA {cuda}, or the library for the present one"
    return f"install the driver {OLDEST_DRIVER.get(cuda, 'of that CUDA')} or newer, or the library for the present one"


def _gpu(needs: Needs, probe: Probe) -> Iterator[Obstacle]:
    """The first GPU is the one that is used."""
    device = first_device(probe)
    if device is not None and not needs.supports(device.compute_capability):
        found = f"{needs.library} does not list compute capability {device.compute_capability} ({device.name})"
        yield Obstacle(needs.gpu, found, needs.instead)


def first_device(probe: Probe) -> Device | None:
    """The GPU that is used, if there is one."""
    return probe.driver.devices[0] if probe.driver.devices else None


def _bindings(needs: Needs, probe: Probe) -> Iterator[Obstacle]:
    bindings, driver = probe.libraries["cuda-bindings"], probe.driver
    if bindings.state == "missing":
        remedy = f"pip install '.[{needs.extra}]' in llmc's folder"
        yield Obstacle((RUN,), "cuda-bindings is not installed", remedy)
    elif bindings.state == "ok" and needs_newer_driver(bindings, driver.version):
        found = f"cuda-bindings {bindings.version} is for CUDA {bindings.cuda}, the driver serves CUDA {driver.version}"
        yield Obstacle((RUN,), found, f"pip install 'cuda-bindings<{bindings.cuda}'")
    elif bindings.state != "ok" or ("initialised" not in bindings.abilities and driver.state == "ok"):
        yield Obstacle((RUN,), f"cuda-bindings cannot be used: {bindings.problem}", "install it again")


def _build(target: str, probe: Probe) -> Iterator[Obstacle]:
    lacking = [name for name in BUILD_PACKAGES if name not in probe.packages]
    if lacking:
        remedy = "pip install '.[build]' in llmc's folder, which brings no torch"
        yield Obstacle((BUILD,), f"building needs {', '.join(lacking)}", remedy)
    judge = probe.libraries["onnxruntime"]
    if not judges(judge):
        installed = {"ok": f"{judge.version} is installed", "missing": "none is installed"}.get(
            judge.state, f"the one installed {judge.state}"
        )
        found = f"an export is built beside ONNX Runtime {JUDGE_MINIMUM} or newer, which judges; {installed}"
        makes_engine = target.startswith("tensorrt")
        yield Obstacle((JUDGE,) if makes_engine else (BUILD,), found, _judge(target, makes_engine, probe))


def _judge(target: str, makes_engine: bool, probe: Probe) -> str:
    """How to get an ONNX Runtime that judges; for Python 3.10 there is none."""
    library, old_python = probe.libraries["onnxruntime"], probe.python.startswith("3.10.")
    if old_python and makes_engine:
        return REBUILD_HERE
    if library.state == "ok" or old_python:
        package = "onnxruntime-gpu" if "CUDAExecutionProvider" in library.abilities else "onnxruntime"
        return f"{'use Python 3.11 or newer and ' if old_python else ''}pip install -U {package}"
    with_cuda = target == "cuda" and _install(target, NEEDS[target], probe) != NO_WHEEL
    needed = "cuda" if with_cuda else "cpu"
    get = _install if library.state == "missing" else _again
    return get(needed, NEEDS[needed], probe)


def judges(library: Library) -> bool:
    """Whether this ONNX Runtime runs the exported graph."""
    return library.state == "ok" and version(library.version) >= version(JUDGE_MINIMUM)


def _notes(target: str, needs: Needs, probe: Probe) -> Iterator[str]:
    library, device = probe.libraries[needs.library], first_device(probe)
    if target.startswith("tensorrt") and library.state == "ok":
        if "native" in library.abilities:
            yield "engines of the form native: the cache is updated in place"
        else:
            yield f"engines of the form primitives: TensorRT {library.version} has no cache update and no attention"
    if target == "tensorrt-rtx" and library.state == "ok" and device is None:
        yield f"builds ahead of time for GPUs of compute capability {', '.join(RTX_GPUS)}"
    if target == "tensorrt" and device is not None and version(device.compute_capability) < version(OLDEST_FP8_GPU):
        yield f"no fp8: it needs compute capability {OLDEST_FP8_GPU}, {device.name} has {device.compute_capability}"
    if target == "tensorrt" and _defers(target, probe) and (library.state != "ok" or device is None):
        yield "builds with --deferred: the engine is compiled where it is to run"
    if library.state == "ok" and library.problem and target != "cpu":
        yield f"{needs.library} says: {library.problem}"
