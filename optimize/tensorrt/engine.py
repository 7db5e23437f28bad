"""From a lowered graph to the engine in a bundle."""

import logging
from dataclasses import replace
from pathlib import Path

from llmc.bundle import EngineConfig, Geometry, Profile
from llmc.errors import BuildError
from llmc.optimize.progress import Progress
from llmc.optimize.tensorrt.builder import DECOMPOSED, build_engine
from llmc.optimize.tensorrt.messages import remarks, transcript
from llmc.optimize.tensorrt.network import Ranges
from llmc.optimize.tensorrt.spec import EngineSpec

log = logging.getLogger(__name__)

ENGINE_FILE = "engine.plan"
LOG_FILE = "build-log.json"
# An integrated GPU takes its scratch memory from the machine's: room for the scores of attention in float32 and for
# their softmax, where attention has no kernel of its own, and never less than splitting a product wants.
SCORES, LEAST_WORKSPACE = 2 * 4, 1 << 30


def compile_engine(spec: EngineSpec, graph: Path, geometry: Geometry, progress: Progress) -> EngineConfig:
    """Compile the lowered ``graph`` of a decoder of this ``geometry`` into its folder, unless that is deferred."""
    config, folder = spec.config, graph.parent
    if spec.library is None:
        return config
    if config.workspace is None and spec.gpu is not None and spec.gpu.integrated:
        # Scores of the largest call: chunk x context x heads.
        scores = SCORES * config.prefill.sequence * config.buckets[-1] * geometry.most_heads
        spec = replace(spec, config=replace(config, workspace=max(LEAST_WORKSPACE, scores)))
    report = build_engine(spec, graph, folder / ENGINE_FILE, profiles_of(config), progress=progress)
    wanted = 2 * len(geometry.caches)
    if len(report.aliases) != wanted:
        raise BuildError(
            f"{spec.library.__name__} {spec.version} made {len(report.aliases)} in-place cache updates of the graph, "
            f"{wanted} are expected; report this, and build for the target cuda or cpu"
        )
    if report.attention == DECOMPOSED:
        log.warning("%s has no fused kernel for some attention, which may be slow", spec.library.__name__)
    if notable := remarks(report.messages):
        log.warning("%s warned while it built (%s); all is in %s", spec.library.__name__, notable[0], LOG_FILE)
    (folder / LOG_FILE).write_text(transcript(report.messages), encoding="utf-8")
    return replace(config, file=ENGINE_FILE, log=LOG_FILE, attention=report.attention)


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
        }

    return ranges(config.decode, 1), ranges(config.prefill, config.prefill.batch)
