"""Builds an engine from a lowered graph, for TensorRT and TensorRT-RTX alike: the library is injected.

TensorRT-RTX builds without a GPU; TensorRT itself was not at hand: these calls were checked against the interfaces of
its versions, not run.

Weights are mapped and the engine is written in pieces, yet the library keeps copies of what it rearranges. With layers
of an 8B model's sizes and two profiles, TensorRT-RTX 1.7.1 held for each byte of weights 1.7 bytes in float16, 1.1 in
int8 and 2.0 in int4, and 0.3 GB besides.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmc.errors import BuildError, ResourceError
from llmc.optimize.progress import Progress, silent
from llmc.optimize.tensorrt.flags import use_flags
from llmc.optimize.tensorrt.messages import failure, lacks_fused_attention
from llmc.optimize.tensorrt.monitor import STEP, Monitor, Writer
from llmc.optimize.tensorrt.network import Network, Ranges, profile_shapes, read_graph
from llmc.optimize.tensorrt.sizes import check_size
from llmc.optimize.tensorrt.spec import EngineSpec
from llmc.optimize.tensorrt.timings import keep_timings
from llmc.runtime.sessions.tensorrt.library import INFO, Message, logger, make_object, nameable_gpus

PARSING = "reading the graph"
FUSED, DECOMPOSED, BASIC = "fused", "decomposed", "basic"


@dataclass(frozen=True)
class EngineReport:
    """The in-place updates of a built engine (output -> input), all that the library logged, in order, and how it
    computes attention, as in :attr:`llmc.bundle.EngineConfig.attention`."""

    aliases: dict[str, str]
    messages: tuple[Message, ...]
    attention: str


@dataclass(frozen=True)
class _Work:
    spec: EngineSpec
    builder: Any
    network: Network
    output: Path
    profiles: Sequence[Ranges]


def build_engine(
    spec: EngineSpec, graph: Path, output: Path, profiles: Sequence[Ranges], *, progress: Progress = silent
) -> EngineReport:
    """Build an engine with one profile for each of ``profiles`` and write it, or write nothing.

    Args:
        graph: lowered ONNX file; its weights lie beside it.
        output: the engine's file; its folder must be there.
        profiles: sizes of the graph's named dimensions.
    """
    progress(PARSING)
    model = read_graph(graph, spec.config.buckets[-1])
    with use_flags(spec.config.flags):
        builder = make_object(spec.library, spec.library.Builder)
        network = Network(spec.library, builder, graph, model)
        logged = list(network.messages)
        attention = _build_fused(_Work(spec, builder, network, output, profiles), logged, progress)
    return EngineReport(network.aliases(), tuple(logged), attention)


def _build_fused(work: _Work, logged: list[Message], progress: Progress) -> str:
    """Build with one kernel for each attention, or, where the library has none, with several; which of them it was.

    Collects the library's messages in ``logged``.
    """
    attentions = work.network.refine()
    for decomposable in (False, True):
        for attention in attentions:
            attention.decomposable = decomposable
        if _build(work, logged, progress, may_decompose=decomposable):
            break
    return BASIC if not attentions else DECOMPOSED if decomposable else FUSED


def _build(work: _Work, logged: list[Message], progress: Progress, *, may_decompose: bool) -> bool:
    """Build and write the engine; a failed build leaves no file.

    Returns False if an attention has no kernel of its own and must not be decomposed.
    """
    monitor = Monitor(progress)
    progress(STEP, 0.0)
    config = _config(work, monitor)
    staged = work.output.with_name(f".{work.output.name}.part")
    try:
        with keep_timings(work.spec, config), logger(work.spec.library).collect_messages() as messages:
            built = monitor.watch(partial(_serialize, work, config, staged))
        failed = not built or any(message.severity == "INTERNAL_ERROR" for message in messages)
        if failed and not may_decompose and lacks_fused_attention(messages):
            logged += [Message(INFO, message.text) for message in messages]
            return False
        logged += messages
        if failed:
            raise failure(f"building {work.output.name}", messages, work.spec.config.workspace)
        check_size(staged.stat().st_size, work.network.graph)
        staged.replace(work.output)
    except OSError as error:
        raise ResourceError(f"{work.output} cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            staged.unlink()
    progress(STEP, 1.0)
    return True


def _serialize(work: _Work, config: Any, path: Path) -> bool:
    """Write the engine to ``path``; False if the build gave none."""
    writer = Writer(path)
    try:
        native = writer.native(work.spec.library)
        done = work.builder.build_serialized_network_to_stream(work.network.native, config, native)
    finally:
        writer.close()
    if writer.error is not None:
        raise writer.error
    return bool(done) and writer.size > 0  # it says True of a build that failed


def _config(work: _Work, monitor: Monitor) -> Any:
    library, asked = work.spec.library, work.spec.config
    config = work.builder.create_builder_config()
    config.clear_flag(library.BuilderFlag.TF32)  # on by default; who asks for float32 does not want 10 bits of it
    if work.spec.sparse:
        config.set_flag(library.BuilderFlag.SPARSE_WEIGHTS)
    if asked.workspace is not None:
        config.set_memory_pool_limit(library.MemoryPoolType.WORKSPACE, asked.workspace)
    if asked.optimization_level is not None:
        config.builder_optimization_level = asked.optimization_level
    named = asked.compute_capabilities if nameable_gpus(library) else ()
    if named:  # else TensorRT-RTX builds for all from Ampere on
        config.num_compute_capabilities = len(named)
    for index, capability in enumerate(named):
        config.set_compute_capability(getattr(library.ComputeCapability, f"SM{capability.replace('.', '')}"), index)
    config.progress_monitor = monitor.native(library)
    for ranges in work.profiles:
        profile = work.builder.create_optimization_profile()
        present = {tensor.name for tensor in work.network.inputs()}
        for name, (least, best, most) in profile_shapes(work.network.graph, ranges).items():
            if name in present:
                profile.set_shape(name, least, best, most)
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(f"the builder refuses the profile {dict(ranges)}")
    return config
