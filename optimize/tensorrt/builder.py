"""Builds an engine from a lowered graph, for TensorRT and TensorRT-RTX alike: the library is injected.

What the interface lacks is left out or done the older way, see :mod:`llmc.optimize.tensorrt.abilities`. TensorRT-RTX
builds without a GPU; TensorRT itself was not at hand: these calls were checked against the interfaces of its versions,
not run.

Weights are mapped and the engine is written in pieces, yet the library keeps copies of what it rearranges. With layers
of an 8B model's sizes and two profiles, TensorRT-RTX 1.7.1 held for each byte of weights 1.7 bytes in float16, 1.1 in
int8 and 2.0 in int4, and 0.3 GB besides; :class:`~llmc.optimize.tensorrt.order.EngineReport` tells it of each build.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmc.errors import BuildError, GpuError, ResourceError, UsageError
from llmc.optimize.progress import Progress, silent
from llmc.optimize.tensorrt import timing_cache
from llmc.optimize.tensorrt.abilities import Abilities, abilities
from llmc.optimize.tensorrt.inspector import Engine, inspect_engine, write_inspector
from llmc.optimize.tensorrt.messages import dropped, failure, remarks
from llmc.optimize.tensorrt.monitor import STEP, MemoryWatch, Monitor, Writer
from llmc.optimize.tensorrt.network import Network, profile_shapes, read_graph
from llmc.optimize.tensorrt.order import HARDWARE_COMPATIBILITY, EngineOrder, EngineReport, Options, Ranges
from llmc.runtime.sessions.tensorrt.library import Message, library_version, logger, make_builder

PARSING = "reading the graph"


@dataclass(frozen=True)
class _Work:
    """One build: its library, what that can do, its builder, the parsed graph, and what to make of it."""

    library: Any
    can: Abilities
    builder: Any
    network: Network
    output: Path
    profiles: Sequence[Ranges]
    options: Options


def build_engine(library: Any, graph: Path, order: EngineOrder, *, progress: Progress = silent) -> EngineReport:
    """Build a decoder's engine with its two profiles and write it, or write nothing.

    Args:
        library: the module tensorrt or tensorrt_rtx, see :func:`llmc.runtime.sessions.tensorrt.library.load_library`.
        graph: lowered ONNX file; its weights lie beside it.
        order: what to build, and where to.
        progress: called with how far the build is.

    Raises:
        UsageError: the library has no such option.
        BuildError: the parser or the builder refuses the graph, or would leave out a part of it.
        GpuError: the library finds no GPU and needs one.
        ResourceError: memory or disk does not suffice.
        KeyboardInterrupt: Ctrl-C stopped the build.
    """
    return build_graph(
        library,
        graph,
        order.output,
        order.profiles,
        order.options,
        capacity=order.capacity,
        inspector=order.inspector,
        progress=progress,
    )


def build_graph(
    library: Any,
    graph: Path,
    output: Path,
    profiles: Sequence[Ranges],
    options: Options,
    *,
    capacity: int | None = None,
    inspector: Path | None = None,
    progress: Progress = silent,
) -> EngineReport:
    """Build any graph with one profile for each of ``profiles``. Errors are those of :func:`build_engine`."""
    start = time.perf_counter()
    can = abilities(library)
    _check(library, can, options)
    progress(PARSING)
    model = read_graph(graph, capacity)
    builder = make_builder(library)
    network = Network(library, builder, graph, model)
    network.allow_decomposition()
    work = _Work(library, can, builder, network, output, profiles, options)
    memory = MemoryWatch()
    messages = _build(work, memory, progress)
    engine = inspect_engine(library, output) if can.inspector else None
    if inspector is not None:
        write_inspector(inspector, library, network, profiles, engine)
    return _report(work, messages, engine, memory.peak, time.perf_counter() - start)


def _report(
    work: _Work, messages: Sequence[Message], engine: Engine | None, host_memory: int | None, seconds: float
) -> EngineReport:
    return EngineReport(
        output=work.output,
        size=work.output.stat().st_size,
        seconds=seconds,
        version=library_version(work.library),
        layers=work.network.summary(),
        aliases=work.network.aliases(),
        host_memory=host_memory,
        device_memory=engine.device_memory if engine else None,
        warnings=remarks(messages),
    )


def _check(library: Any, can: Abilities, options: Options) -> None:
    """Refuse options that this library does not know."""
    wanted = {
        "stripped": (options.stripped, can.strip),
        "refittable": (options.refittable, can.refit),
        "version compatible": (options.version_compatible, can.version_compatible),
        "for named compute capabilities": (bool(options.compute_capabilities), can.compute_capabilities),
    }
    for name, (asked, possible) in wanted.items():
        if asked and not possible:
            raise UsageError(f"{library.__name__} {library_version(library)} builds no engine that is {name}")


def _build(work: _Work, memory: MemoryWatch, progress: Progress) -> list[Message]:
    """Build and write the engine; a failed build leaves no file."""
    monitor = Monitor(progress)
    progress(STEP, 0.0)
    config = _config(work, monitor)
    native = logger(work.library)
    staged = work.output.with_name(f".{work.output.name}.part")
    try:
        with native.collected() as messages, memory:
            built = monitor.watch(partial(_serialize, work, config, staged))
        lost = dropped(messages)
        if not built or any(message.severity == "INTERNAL_ERROR" for message in messages):
            raise failure(f"building {work.output.name}", messages)
        if lost:
            raise BuildError(f"building {work.output.name} left out part of the graph: {'; '.join(lost)}")
        staged.replace(work.output)
    except OSError as error:
        raise ResourceError(f"{work.output} cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            staged.unlink()
    if work.can.timing_cache and work.options.timing_cache is not None:
        timing_cache.keep(config, work.options.timing_cache)
    progress(STEP, 1.0)
    return messages


def _serialize(work: _Work, config: Any, path: Path) -> bool:
    """Write the engine to ``path``; whether there was one."""
    if not work.can.stream_writer:
        engine = work.builder.build_serialized_network(work.network.native, config)
        if engine is not None:
            path.write_bytes(memoryview(engine))
        return engine is not None
    writer = Writer(path)
    try:
        native = writer.native(work.library)
        done = work.builder.build_serialized_network_to_stream(work.network.native, config, native)
    finally:
        writer.close()
    if writer.error is not None:
        raise writer.error
    return bool(done) and writer.size > 0  # it says True of a build that failed


def _config(work: _Work, monitor: Monitor) -> Any:
    """The builder's configuration."""
    library, options, can = work.library, work.options, work.can
    config = work.builder.create_builder_config()
    for flag in _flags(options, can):
        config.set_flag(getattr(library.BuilderFlag, flag))
    config.clear_flag(library.BuilderFlag.TF32)  # on by default; who asks for float32 does not want 10 bits of it
    if options.workspace is not None:
        config.set_memory_pool_limit(library.MemoryPoolType.WORKSPACE, options.workspace)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    level = HARDWARE_COMPATIBILITY[options.hardware_compatibility]
    if level != "NONE":
        config.hardware_compatibility_level = _member(library, "HardwareCompatibilityLevel", level)
    verbosity = library.ProfilingVerbosity
    config.profiling_verbosity = verbosity.DETAILED if options.detailed else verbosity.LAYER_NAMES_ONLY
    _set_gpus(config, library, options.compute_capabilities)
    if can.progress_monitor:
        config.progress_monitor = monitor.native(library)
    if can.timing_cache and options.timing_cache is not None:
        timing_cache.use(library, config, options.timing_cache)
    for ranges in work.profiles:
        _add_profile(work, config, ranges)
    return config


def _flags(options: Options, can: Abilities) -> list[str]:
    """Names of the builder's flags. A stripped engine holds what its weights must be set to, and nothing else."""
    flags = []
    if options.version_compatible:
        flags.append("VERSION_COMPATIBLE")
        if can.compute_capabilities:
            flags.append("EXCLUDE_LEAN_RUNTIME")  # TensorRT-RTX's package has no lean runtime to include
    if options.stripped:
        flags.append("STRIP_PLAN")
    if options.refittable or options.stripped:
        flags.append("REFIT_IDENTICAL")  # the same weights again: no kernel need be ready for others
    return flags


def _set_gpus(config: Any, library: Any, wanted: Sequence[str]) -> None:
    """Name the GPUs to build for (TensorRT-RTX)."""
    if not wanted:
        return
    config.num_compute_capabilities = len(wanted)
    for index, capability in enumerate(wanted):
        member = _member(library, "ComputeCapability", f"SM{capability.replace('.', '')}")
        config.set_compute_capability(member, index)


def _member(library: Any, enumeration: str, name: str) -> Any:
    """A member of one of the library's enumerations.

    Raises:
        GpuError: it has none of this name.
    """
    members = getattr(library, enumeration)
    if not hasattr(members, name):
        known = ", ".join(sorted(members.__members__))
        raise GpuError(
            f"{library.__name__} {library_version(library)} does not build for {name}; {enumeration} has {known}"
        )
    return getattr(members, name)


def _add_profile(work: _Work, config: Any, ranges: Ranges) -> None:
    profile = work.builder.create_optimization_profile()
    present = {tensor.name for tensor in work.network.inputs()}
    for name, (least, best, most) in profile_shapes(work.network.graph, ranges).items():
        if name in present:
            profile.set_shape(name, least, best, most)
    if config.add_optimization_profile(profile) < 0:
        raise BuildError(f"the builder refuses the profile {dict(ranges)}")
