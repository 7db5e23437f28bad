"""From a lowered graph to the engines in a bundle: the decoder's, and the small one that finds the largest logits."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmc.bundle import EngineConfig, Geometry, Profile
from llmc.optimize.progress import Progress
from llmc.optimize.tensorrt.attention import decomposed
from llmc.optimize.tensorrt.builder import EngineReport, build_engine
from llmc.optimize.tensorrt.messages import ToldError, WorkspaceError, transcript
from llmc.optimize.tensorrt.network import Ranges
from llmc.optimize.tensorrt.select import build_select
from llmc.optimize.tensorrt.spec import EngineSpec
from llmc.runtime.sessions.tensorrt.library import Message

log = logging.getLogger(__name__)

ENGINE_FILE = "engine.plan"
SELECT_FILE = "select.plan"
INSPECTOR_FILE = "engine.json"
LOG_FILE = "build-log.json"
# More candidates than top-k is usually asked for; the device sorts these few, and a row of them is 512 bytes.
CANDIDATES = 64
# An integrated GPU takes its scratch memory from the machine's: room for the scores of attention in float32 and for
# their softmax, where attention has no kernel of its own, and never less than splitting a product wants.
SCORES, LEAST_WORKSPACE = 2 * 4, 1 << 30


def compile_engine(
    spec: EngineSpec, graph: Path, geometry: Geometry, progress: Progress, refused: Sequence[Message] = ()
) -> EngineConfig:
    """Compile the lowered ``graph`` of a decoder of this ``geometry`` into its folder, unless that is deferred.

    Args:
        spec: how to build, with which library.
        graph: lowered ONNX file; its weights lie beside it.
        geometry: of the decoder.
        progress: called with each step and how far it is.
        refused: messages of the library about graphs that it refused before, for the log.

    Raises:
        BuildError: the library refuses a part of the graph, or finds no kernels.
        ResourceError: memory or disk does not suffice, or the workspace that was asked for.
        GpuError: the library finds no GPU and needs one.
    """
    config, folder = spec.config, graph.parent
    if spec.library is None:
        return config
    served, report, unfit = _built(spec, graph, geometry, progress)
    # In-place caches are what the native form is for: the parser must have kept every one of them.
    wanted = 0 if config.form == "primitives" else 2 * len(geometry.caches)
    if len(report.aliases) != wanted:
        raise ToldError(
            f"{spec.library.__name__} {spec.version} made {len(report.aliases)} in-place cache updates of the graph, "
            f"{wanted} are expected; build with form = 'primitives', and report this",
            report.messages,
        )
    candidates = min(CANDIDATES, geometry.vocab_size)
    small = build_select(
        served, folder / SELECT_FILE, vocab_size=geometry.vocab_size, candidates=candidates, progress=progress
    )
    unfused = decomposed(served, folder, geometry, report.layers, profiles_of(config), progress)
    said = (*unfit, *report.messages, *small.messages)
    if notable := (*report.warnings, *small.warnings):
        log.warning("%s warned while it built (%s); all is in %s", spec.library.__name__, notable[0], LOG_FILE)
    (folder / LOG_FILE).write_text(transcript((*refused, *said)), encoding="utf-8")
    return replace(
        config,
        file=ENGINE_FILE,
        select=SELECT_FILE,
        candidates=candidates,
        inspector=INSPECTOR_FILE,
        log=LOG_FILE,
        decomposed=unfused,
    )


def _built(
    spec: EngineSpec, graph: Path, geometry: Geometry, progress: Progress
) -> tuple[EngineSpec, EngineReport, tuple[Message, ...]]:
    """Write the decoder's engine and its summary. The spec with the workspace that served, the report, and what the
    library said of one that did not.

    On an integrated GPU the workspace is limited where nobody asked for one, unless no kernel fits into that.
    """

    def built(spec: EngineSpec) -> EngineReport:
        file, profiles = graph.with_name(ENGINE_FILE), profiles_of(spec.config)
        return build_engine(spec, graph, file, profiles, inspector=graph.with_name(INSPECTOR_FILE), progress=progress)

    if spec.config.workspace is not None or spec.gpu is None or not spec.gpu.integrated:
        return spec, built(spec), ()
    limited = replace(spec, config=replace(spec.config, workspace=integrated_workspace(spec.config, geometry)))
    try:
        return limited, built(limited), ()
    except WorkspaceError as error:
        log.warning("no kernel fits into %d bytes of workspace: trying without a limit", limited.config.workspace)
        return spec, built(spec), error.messages


def integrated_workspace(config: EngineConfig, geometry: Geometry) -> int:
    """Bytes of scratch memory for the largest call: chunk x context x heads."""
    return max(LEAST_WORKSPACE, SCORES * config.prefill.sequence * config.buckets[-1] * geometry.most_heads)


def profiles_of(config: EngineConfig) -> tuple[Ranges, Ranges]:
    """Named dimensions of the profiles 0 (decode) and 1 (prefill).

    Kernels are chosen for one request that decodes or a full chunk of prefill, and half of the context.
    """
    slots = (config.buckets[0], config.buckets[len(config.buckets) // 2], config.buckets[-1])

    def ranges(profile: Profile, best_batch: int) -> Ranges:
        return {
            "batch": (1, best_batch, profile.batch),
            "sequence": (1, profile.sequence, profile.sequence),
            "outputs": (1, 1, profile.outputs),
            "attended": slots,
            **({} if config.capacity else {"capacity": slots}),
        }

    return ranges(config.decode, 1), ranges(config.prefill, config.prefill.batch)
