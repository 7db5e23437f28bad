"""Fill in an engine's defaults, and refuse what the library on this machine cannot make, before any work.

The library is found once and handed on, so every version of TensorRT and TensorRT-RTX takes one path.
"""

import logging
from dataclasses import dataclass
from typing import Any

from llmc.bundle import TWO_OF_FOUR, EngineConfig, Geometry, Limits, Profile, Recipe, version
from llmc.errors import UsageError
from llmc.optimize.recipe import check_between
from llmc.optimize.recipe.engine import EngineRequest
from llmc.optimize.targets import Capabilities
from llmc.optimize.tensorrt.flags import compiler_flags, use_flags
from llmc.runtime.diagnose.targets import list_absent_precisions
from llmc.runtime.host.probe import Device, probe_driver
from llmc.runtime.sessions.tensorrt.engine import platform_name
from llmc.runtime.sessions.tensorrt.library import library_version, lists_gpu, load_library, make_object, nameable_gpus

log = logging.getLogger(__name__)

# The first bucket, and the largest of what follows: each doubles, so at most half of what attention looks at is empty.
FIRST_BUCKET = 256
BLOCK = 64
# Logits of one prefill call: drafts to verify and logits of a prompt come in pieces of this many.
PREFILL_OUTPUTS = 32
# Names of the types of activations among precisions.
COMPUTES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
AMPERE = (8, 0)


@dataclass(frozen=True)
class EngineSpec:
    """An engine to be built, everything resolved."""

    library: Any  # the module tensorrt or tensorrt_rtx; None where building is left to another machine
    version: str  # of the library; none where there is none
    gpu: Device | None  # the GPU here, None where there is none
    config: EngineConfig  # what the manifest will say of the engine, as yet without its files
    sparse: bool = False  # weights are pruned to 2:4, for which the library may choose sparse kernels


def resolve_engine(
    target: Capabilities,
    geometry: Geometry,
    recipe: Recipe,
    limits: Limits,
    request: EngineRequest,
    *,
    here: bool = False,
) -> EngineSpec:
    """Fill in the defaults and refuse what the library here cannot do.

    Args:
        target: what the engine is for.
        geometry, recipe, limits: of the bundle.
        request: what was asked for.
        here: the engine is for this machine, as one that is compiled again.

    Raises:
        MissingExtraError, GpuError: the library is not installed, too old or broken, or finds no GPU and needs one.
        UsageError: a value is out of range, or not for this library.
    """
    stored = recipe.precisions()
    own = {f"int{it.codes.bits}" for it in geometry.linears if it.codes} if "source" in stored else set()
    precisions = (stored - {"source"}) | own | {COMPUTES[recipe.compute]}
    library: Any = None if request.deferred else load_library(target.engine)
    buckets = bucket_sizes(limits.max_context)
    gpu = next(iter(probe_driver().devices), None) if library is not None else None
    wanted = _compute_capabilities(request.compute_capabilities, library, target, precisions, gpu)
    bound = library is not None and not nameable_gpus(library)  # to the GPU that it builds on, as TensorRT is
    flags = ""
    if bound or here:
        _refuse_old(target, gpu, precisions)
    if bound:
        flags = compiler_flags(library_version(library), gpu.compute_capability) if gpu is not None else ""
        with use_flags(flags):  # a library that cannot make a builder is refused before hours of calibration
            make_object(library, library.Builder)
        wanted = (gpu.compute_capability,) if gpu is not None else ()
    effort, memory = request.optimization_level, request.workspace
    config = EngineConfig(
        file="",
        compute=recipe.compute,
        buckets=buckets,
        decode=Profile(limits.max_batch, 1, 1),
        prefill=Profile(1, limits.prefill_chunk, min(limits.prefill_chunk, PREFILL_OUTPUTS)),
        platform=platform_name(),
        compute_capabilities=wanted,
        verified="no",
        workspace=memory if memory is None else check_between("workspace", memory, 1 << 20, 1 << 50),
        optimization_level=effort and check_between("optimization_level", effort, 0, 5),
        flags=flags,
    )
    if gpu is not None:
        _warn_of_other(gpu, config, library, target)
    installed = library_version(library) if library is not None else "none"
    return EngineSpec(library, installed, gpu, config, recipe.sparsity == TWO_OF_FOUR)


def bucket_sizes(max_context: int) -> tuple[int, ...]:
    """Numbers of cache positions that calls look at: 256, twice that, ... and the longest context, rounded up to whole
    blocks of :data:`BLOCK`, so that every row of the cache is aligned."""
    sizes = []
    size = FIRST_BUCKET
    while size < max_context:
        sizes.append(size)
        size *= 2
    return (*sizes, -(-max_context // BLOCK) * BLOCK)


def _compute_capabilities(
    asked: str | None, library: Any, target: Capabilities, wanted: set[str], here: Device | None
) -> tuple[str, ...]:
    """Compute capabilities to build for; none leaves the choice to the library (Ampere and newer). An older GPU
    ``here`` is added if it supports what is asked."""
    known = nameable_gpus(library) if library is not None else ()
    possible = tuple(gpu for gpu in known if wanted.isdisjoint(list_absent_precisions(target.name, gpu)))
    if asked is None:
        older = here is not None and here.compute_capability in possible and version(here.compute_capability) < AMPERE
        return possible if older else ()
    if library is None:
        raise UsageError(
            "compute_capabilities", f"is {asked!r}, but a deferred engine is for the GPU where it is built"
        )
    if not known:
        raise UsageError("compute_capabilities", f"is {asked!r}, but {target.engine} builds for the GPU it runs on")
    listed = tuple(dict.fromkeys(part.strip() for part in asked.split(",")))
    for part in listed:
        if part not in possible:
            raise UsageError(
                "compute_capabilities",
                f"has {part!r}, {target.engine} builds {', '.join(sorted(wanted))} for {', '.join(possible)}",
            )
    return listed


def _warn_of_other(gpu: Device, config: EngineConfig, library: Any, target: Capabilities) -> None:
    if not lists_gpu(library, gpu.compute_capability):
        gpus = f"{target.engine} lists compute capability {', '.join(nameable_gpus(library))} and newer"
    elif not config.fits_gpu(gpu.compute_capability):
        gpus = f"the engine is for compute capability {config.gpus}"
    else:
        return
    log.warning(
        "%s, %s has %s: the engine does not run here, its graph is judged on the CPU",
        *(gpus, gpu.name, gpu.compute_capability),
    )


def _refuse_old(target: Capabilities, gpu: Device | None, wanted: set[str]) -> None:
    """Refuse to build if the GPU here, which the engine is for, lacks one of the precisions."""
    if gpu is None:
        return
    for precision, first in list_absent_precisions(target.name, gpu.compute_capability).items():
        if precision in wanted:
            raise UsageError(
                "target",
                f"is {target.name}, which has {precision} from compute capability {first} on, {gpu.name} has "
                f"{gpu.compute_capability}",
                "build with another precision",
            )
