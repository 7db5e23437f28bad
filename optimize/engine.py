"""From a lowered graph to the engine in a bundle: what is asked for, which form it takes, and what it then is.

The engine's library is found once and handed on, so every version of TensorRT and TensorRT-RTX takes one path.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from llmc.bundle import EnginePlan, Geometry, Limits, Profile, Recipe
from llmc.errors import BuildError, GpuError, UsageError
from llmc.optimize.engine_request import EngineRequest
from llmc.optimize.progress import Progress
from llmc.optimize.targets import Capabilities
from llmc.optimize.tensorrt.abilities import abilities
from llmc.optimize.tensorrt.builder import build_engine
from llmc.optimize.tensorrt.order import HARDWARE_COMPATIBILITY, EngineOrder, Options
from llmc.optimize.tensorrt.select import build_select
from llmc.plans import version
from llmc.runtime.host import disk_cache
from llmc.runtime.host.probe import Device, probe_driver
from llmc.runtime.sessions.tensorrt.engine import platform_name as platform_name
from llmc.runtime.sessions.tensorrt.library import library_version, load_library, make_builder

T = TypeVar("T")

ENGINE_FILE = "engine.plan"
SELECT_FILE = "select.plan"
INSPECTOR_FILE = "engine.json"
# Graph forms by preference.
FORMS = ("native", "primitives")
# The first bucket, and the largest of what follows: each doubles, so at most half of what attention looks at is empty.
FIRST_BUCKET = 256
BLOCK = 64
# Logits of one prefill call: drafts to verify and logits of a prompt come in pieces of this many.
PREFILL_OUTPUTS = 32
# More candidates than top-k is usually asked for; the device sorts these few, and a row of them is 512 bytes.
CANDIDATES = 64
# The first GPUs with products in float8.
FLOAT8_FROM = (8, 9)
# Bytes of the largest temporary that a kernel may want.
WORKSPACE = 1 << 30
TIMING = "timing"
TIMING_CACHE_BYTES = 1_000_000_000


@dataclass(frozen=True)
class EngineSpec:
    """An engine to be built, everything resolved. ``library`` is the module, ``gpu`` None where there is none."""

    library: Any
    version: str
    form: str
    capacity: int
    buckets: tuple[int, ...]
    decode: Profile
    prefill: Profile
    compute_capabilities: tuple[str, ...]
    hardware_compatibility: str
    version_compatible: bool
    stripped: bool
    workspace: int
    optimization_level: int | None
    gpu: Device | None


def resolve_engine(
    target: Capabilities,
    limits: Limits,
    request: EngineRequest,
    *,
    float8: bool = False,
    lowered: Path | None = None,
) -> EngineSpec:
    """Fill in the defaults and refuse what the library here cannot do.

    Args:
        target: what the engine is for.
        limits: of the bundle.
        request: what was asked for.
        float8: whether weights are stored so.
        lowered: a bundle whose graph is to be compiled; it has the form of ``request``, and can get no other one.

    Raises:
        MissingExtraError, GpuError: the library is not installed, too old or broken, or finds no GPU and needs one.
        UsageError: a value is out of range, or not for this library.
        BuildError: the library does not take the form of the bundle ``lowered``.
    """
    library = None if request.deferred else load_library(target.engine)
    form = _form(request.form, library, target, lowered)
    level = _hardware_compatibility(request.hardware_compatibility, library, target)
    if level != "none" and request.compute_capabilities is not None:
        raise UsageError(f"hardware_compatibility is {level!r} and GPUs are named; give one of them")
    if level == "ampere" and float8:
        raise UsageError("hardware_compatibility is 'ampere', but GPUs before 8.9 know no float8; leave it out")
    buckets = bucket_sizes(limits.max_context)
    wanted = _compute_capabilities(request.compute_capabilities, library, target, float8)
    gpu = next(iter(probe_driver().devices), None) if library is not None else None
    if library is not None and not nameable_gpus(library):  # TensorRT builds on the GPU that it builds for
        make_builder(library)  # so without one it refuses now, and not after hours of calibration
        wanted = (gpu.compute_capability,) if gpu is not None else ()
    elif library is not None and request.stripped and gpu is None:
        raise GpuError(f"{target.engine} leaves weights out of engines only beside a GPU; leave --stripped out")
    return EngineSpec(
        library=library,
        version=library_version(library) if library is not None else "none",
        form=form,
        capacity=0 if form == "primitives" else buckets[-1],
        buckets=buckets,
        decode=Profile(limits.max_batch, 1, 1),
        prefill=Profile(1, limits.prefill_chunk, min(limits.prefill_chunk, PREFILL_OUTPUTS)),
        compute_capabilities=wanted,
        hardware_compatibility=level,
        version_compatible=bool(request.version_compatible),
        stripped=bool(request.stripped),
        workspace=_between("workspace", request.workspace, 1 << 20, 1 << 50, WORKSPACE),
        optimization_level=_between("optimization_level", request.optimization_level, 0, 5, None),
        gpu=gpu,
    )


def _form(asked: str | None, library: Any, target: Capabilities, lowered: Path | None) -> str:
    """The form that was asked for, or the best that the library knows; without a library all are possible."""
    possible = FORMS if library is None else abilities(library).forms
    form = asked or possible[0]
    if form not in possible and lowered is not None:
        raise BuildError(
            f"{lowered} holds a graph of the form {form}, {target.engine} here takes {', '.join(possible)}; build the "
            f"bundle again from its export with --form {possible[0]}"
        )
    if form not in possible:
        raise UsageError(f"form is {form!r}, expected one of {', '.join(possible)} for {target.engine} here")
    return form


def _hardware_compatibility(asked: str | None, library: Any, target: Capabilities) -> str:
    """What was asked for, if the library has it: hours of calibration may come before the builder is asked."""
    possible = [
        name
        for name, member in HARDWARE_COMPATIBILITY.items()
        if library is None or hasattr(library.HardwareCompatibilityLevel, member)
    ]
    level = "none" if asked is None else asked
    if level not in possible:
        raise UsageError(
            f"hardware_compatibility is {level!r}, expected one of {', '.join(possible)} for {target.engine} here"
        )
    return level


def _between(name: str, value: int | None, low: int, high: int, default: T) -> int | T:
    if value is None:
        return default
    if not low <= value <= high:
        raise UsageError(f"{name} is {value}, expected {low} ... {high}")
    return value


def bucket_sizes(max_context: int) -> tuple[int, ...]:
    """How many cache positions calls look at: 256, twice that, ... and the longest context, rounded up to whole
    blocks of :data:`BLOCK`, so that every row of the cache is aligned."""
    sizes = []
    size = FIRST_BUCKET
    while size < max_context:
        sizes.append(size)
        size *= 2
    return (*sizes, -(-max_context // BLOCK) * BLOCK)


def nameable_gpus(library: Any) -> tuple[str, ...]:
    """Compute capabilities that engines can be built for without such a GPU, as 8.6; none where the library is bound to
    the GPU that it runs on, or where there is no library."""
    names = dir(library.ComputeCapability) if library is not None and abilities(library).compute_capabilities else []
    numbers = sorted(int(name[2:]) for name in names if name.startswith("SM"))
    return tuple(f"{number // 10}.{number % 10}" for number in numbers)


def _compute_capabilities(asked: str | None, library: Any, target: Capabilities, float8: bool) -> tuple[str, ...]:
    possible = tuple(gpu for gpu in nameable_gpus(library) if not float8 or version(gpu) >= FLOAT8_FROM)
    if asked is None:
        return possible if float8 else ()
    if library is None:
        raise UsageError(f"compute_capabilities is {asked!r}, but a deferred engine is for the GPU where it is built")
    if not possible:
        raise UsageError(f"compute_capabilities is {asked!r}, but {target.engine} builds for the GPU it runs on")
    found = tuple(dict.fromkeys(part.strip() for part in asked.split(",")))
    for part in found:
        if part not in possible:
            stored = " with weights in float8" if float8 else ""
            raise UsageError(
                f"compute_capabilities has {part!r}, {target.engine} builds{stored} for {', '.join(possible)}"
            )
    return found


def compile_engine(spec: EngineSpec, graph: Path, geometry: Geometry, recipe: Recipe, progress: Progress) -> EnginePlan:
    """Compile the lowered ``graph`` of a decoder of this ``geometry`` into its folder.

    Raises:
        BuildError: the library refuses a part of the graph, or finds no kernels.
        ResourceError: memory does not suffice.
    """
    files = ("", "", "")
    if spec.library is not None:
        files = _compile(spec, graph, geometry, progress)
    return EnginePlan(
        file=files[0],
        form=spec.form,
        compute=recipe.compute,
        capacity=spec.capacity,
        buckets=spec.buckets,
        decode=spec.decode,
        prefill=spec.prefill,
        select=files[1],
        candidates=min(CANDIDATES, geometry.vocab_size) if files[1] else 0,
        platform=platform_name(),
        compute_capabilities=spec.compute_capabilities,
        version_compatible=spec.version_compatible,
        hardware_compatibility=spec.hardware_compatibility,
        stripped=spec.stripped,
        verified="no",
        inspector=files[2],
        workspace=spec.workspace,
        optimization_level=spec.optimization_level,
    )


def _compile(spec: EngineSpec, graph: Path, geometry: Geometry, progress: Progress) -> tuple[str, str, str]:
    """Write the engine, the one that selects candidates, and a summary of the layers; their names."""
    folder = graph.parent
    options = Options(
        workspace=spec.workspace,
        optimization_level=spec.optimization_level,
        timing_cache=timing_cache(spec),
        version_compatible=spec.version_compatible,
        hardware_compatibility=spec.hardware_compatibility,
        stripped=spec.stripped,
        compute_capabilities=spec.compute_capabilities if nameable_gpus(spec.library) else (),
    )
    order = EngineOrder(
        output=folder / ENGINE_FILE,
        buckets=spec.buckets,
        decode=spec.decode,
        prefill=spec.prefill,
        form=spec.form,
        capacity=spec.capacity or None,
        options=options,
        inspector=folder / INSPECTOR_FILE,
    )
    report = build_engine(spec.library, graph, order, progress=progress)
    _check_layers(len(report.aliases), spec, geometry)
    vocab = geometry.vocab_size
    build_select(
        spec.library,
        folder / SELECT_FILE,
        vocab_size=vocab,
        candidates=min(CANDIDATES, vocab),
        rows=spec.decode.batch,
        options=replace(options, stripped=False),
        progress=progress,
    )
    disk_cache.prune(TIMING, TIMING_CACHE_BYTES)
    return ENGINE_FILE, SELECT_FILE, INSPECTOR_FILE


def timing_cache(spec: EngineSpec) -> Path:
    """Where measured kernel times are kept for the next build with this library, for these GPUs, on this machine."""
    gpu = f"{spec.gpu.name}-{spec.gpu.compute_capability}" if spec.gpu else "none"
    key = f"{spec.library.__name__}-{spec.version}-{gpu}-{'+'.join(spec.compute_capabilities)}"
    return disk_cache.entry(TIMING, key.replace(" ", "-").replace("/", "-")) / "timing.cache"


def _check_layers(aliased: int, spec: EngineSpec, geometry: Geometry) -> None:
    """In-place caches are what the native forms are for: the parser must have kept every one of them."""
    wanted = 0 if spec.form == "primitives" else 2 * geometry.layers
    if aliased != wanted:
        raise BuildError(
            f"{spec.library.__name__} {spec.version} made {aliased} in-place cache updates of the graph, {wanted} are "
            "expected; build with form = 'primitives', and report this"
        )
