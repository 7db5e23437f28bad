"""Builds an engine from a lowered graph, for TensorRT and TensorRT-RTX alike: the library is injected.

What the interface lacks is left out or done the older way, see :mod:`llmc.optimize.tensorrt.abilities`. TensorRT-RTX
builds without a GPU; TensorRT itself was not at hand: these calls were checked against the interfaces of its versions,
not run.

Weights are mapped and the engine is written in pieces, yet the library keeps copies of what it rearranges. With layers
of an 8B model's sizes and two profiles, TensorRT-RTX 1.7.1 held for each byte of weights 1.7 bytes in float16, 1.1 in
int8 and 2.0 in int4, and 0.3 GB besides.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from llmc.bundle import EngineConfig
from llmc.errors import BuildError, GpuError, ResourceError
from llmc.optimize.progress import Progress, silent
from llmc.optimize.tensorrt import timing_cache
from llmc.optimize.tensorrt.abilities import Abilities, abilities
from llmc.optimize.tensorrt.flags import compiled_with
from llmc.optimize.tensorrt.inspector import inspect_engine, write_inspector
from llmc.optimize.tensorrt.messages import failure, remarks
from llmc.optimize.tensorrt.monitor import STEP, Monitor, Writer
from llmc.optimize.tensorrt.network import Layer, Network, Ranges, profile_shapes, read_graph
from llmc.optimize.tensorrt.spec import HARDWARE_COMPATIBILITY, EngineSpec
from llmc.runtime.sessions.tensorrt.library import Message, library_version, logger, made

PARSING = "reading the graph"


@dataclass(frozen=True)
class EngineReport:
    """An engine that was built.

    Attributes:
        layers: of the parsed network that compute on tensors; constants and index arithmetic are left out.
        aliases: outputs that are an input updated in place, as output -> input.
        messages: all warnings and errors of the library, in its words and in order.
    """

    layers: tuple[Layer, ...]
    aliases: dict[str, str]
    messages: tuple[Message, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings that are not known to be harmless, each once."""
        return remarks(self.messages)


@dataclass(frozen=True)
class _Work:
    """One build: what is asked for, what the library can do, its builder, the parsed graph, and where to write."""

    spec: EngineSpec
    can: Abilities
    builder: Any
    network: Network
    output: Path
    profiles: Sequence[Ranges]


def build_engine(
    spec: EngineSpec,
    graph: Path,
    output: Path,
    profiles: Sequence[Ranges],
    *,
    inspector: Path | None = None,
    decomposable: bool = True,
    progress: Progress = silent,
) -> EngineReport:
    """Build an engine with one profile for each of ``profiles`` and write it, or write nothing.

    Args:
        spec: how to build, with which library.
        graph: lowered ONNX file; its weights lie beside it.
        output: the engine's file; its folder must be there.
        profiles: sizes of the graph's named dimensions.
        inspector: file for the summary of the layers; None writes none.
        decomposable: let attention without a fused kernel be several; else it is refused.
        progress: called with how far the build is.

    Raises:
        BuildError: the parser or the builder refuses the graph, or would leave out a part of it.
        GpuError: the library finds no GPU and needs one, or does not build for one that was named.
        ResourceError: memory or disk does not suffice.
        KeyboardInterrupt: Ctrl-C stopped the build.
    """
    library = spec.library
    progress(PARSING)
    model = read_graph(graph, spec.config.capacity)
    with compiled_with(spec.config.flags):
        builder, can = made(library, library.Builder), abilities(library)
        network = Network(library, builder, graph, model, by_address=can.initializer_streaming)
        network.refine(decomposable=decomposable)
        messages = _build(_Work(spec, can, builder, network, output, profiles), progress)
    if inspector is not None:
        write_inspector(inspector, spec.config, library, network, profiles, inspect_engine(library, output))
    return EngineReport(network.summary(), network.aliases(), (*network.messages, *messages))


def build_model(
    spec: EngineSpec,
    model: onnx.ModelProto,
    output: Path,
    profiles: Sequence[Ranges],
    *,
    decomposable: bool = True,
    progress: Progress = silent,
) -> EngineReport:
    """:func:`build_engine` of a model that has its weights in itself: it is no file of the bundle, from which weights
    could be put into a stripped engine, so its engine is whole."""
    graph, whole = output.with_name(f".{output.name}.onnx"), replace(spec, config=replace(spec.config, stripped=False))
    try:
        graph.write_bytes(model.SerializeToString())
        return build_engine(whole, graph, output, profiles, decomposable=decomposable, progress=progress)
    finally:
        graph.unlink(missing_ok=True)


def _build(work: _Work, progress: Progress) -> list[Message]:
    """Build and write the engine; a failed build leaves no file."""
    monitor = Monitor(progress)
    progress(STEP, 0.0)
    times = timing_cache.place(work.spec) if work.can.timing_cache else None
    config = _config(work, monitor, times)
    staged = work.output.with_name(f".{work.output.name}.part")
    try:
        with logger(work.spec.library).collected() as messages:
            built = monitor.watch(partial(_serialize, work, config, staged))
        if not built or any(message.severity == "INTERNAL_ERROR" for message in messages):
            raise failure(f"building {work.output.name}", messages, work.network.messages, work.spec.config.workspace)
        staged.replace(work.output)
    except OSError as error:
        raise ResourceError(f"{work.output} cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            staged.unlink()
    if times is not None:
        timing_cache.keep(config, times)
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
        native = writer.native(work.spec.library)
        done = work.builder.build_serialized_network_to_stream(work.network.native, config, native)
    finally:
        writer.close()
    if writer.error is not None:
        raise writer.error
    return bool(done) and writer.size > 0  # it says True of a build that failed


def _config(work: _Work, monitor: Monitor, times: Path | None) -> Any:
    """The builder's configuration."""
    library, asked = work.spec.library, work.spec.config
    config = work.builder.create_builder_config()
    for flag in _flags(asked, work.can):
        config.set_flag(_member(library, "BuilderFlag", flag))
    config.clear_flag(library.BuilderFlag.TF32)  # on by default; who asks for float32 does not want 10 bits of it
    if asked.workspace is not None:
        config.set_memory_pool_limit(library.MemoryPoolType.WORKSPACE, asked.workspace)
    if asked.optimization_level is not None:
        config.builder_optimization_level = asked.optimization_level
    level = HARDWARE_COMPATIBILITY[asked.hardware_compatibility]
    if level != "NONE":
        config.hardware_compatibility_level = _member(library, "HardwareCompatibilityLevel", level)
    config.profiling_verbosity = library.ProfilingVerbosity.DETAILED  # for the inspector
    if work.can.compute_capabilities:
        _set_gpus(config, library, asked.compute_capabilities)
    config.progress_monitor = monitor.native(library)
    if times is not None:
        timing_cache.use(library, config, times)
    for ranges in work.profiles:
        _add_profile(work, config, ranges)
    return config


def _flags(asked: EngineConfig, can: Abilities) -> list[str]:
    """Names of the builder's flags. A stripped engine holds what its weights must be set to, and nothing else."""
    flags = []
    if asked.version_compatible:
        flags.append("VERSION_COMPATIBLE")
        if can.compute_capabilities:
            flags.append("EXCLUDE_LEAN_RUNTIME")  # TensorRT-RTX's package has no lean runtime to include
    if asked.stripped:
        flags += ["STRIP_PLAN", "REFIT_IDENTICAL"]  # the same weights again: no kernel need be ready for others
    return flags


def _set_gpus(config: Any, library: Any, wanted: Sequence[str]) -> None:
    """Name the GPUs to build for (TensorRT-RTX); without a name it builds for all from Ampere on."""
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
