"""A decoder's engine built the way a build does it, beside its graph."""

from pathlib import Path
from typing import Any

from llmc.bundle import EngineConfig
from llmc.optimize.progress import Progress, silent
from llmc.optimize.tensorrt.builder import EngineReport, build_engine
from llmc.optimize.tensorrt.engine import profiles_of
from llmc.optimize.tensorrt.spec import EngineSpec


def spec_of(library: Any, config: EngineConfig, sparse: bool = False) -> EngineSpec:
    """What a build would have resolved on a machine without a GPU."""
    return EngineSpec(library, str(library.__version__), None, config, sparse)


def build_decoder(
    library: Any,
    graph: Path,
    config: EngineConfig,
    progress: Progress = silent,
    *,
    output: Path | None = None,
    sparse: bool = False,
) -> EngineReport:
    """Build ``engine.plan`` with the profiles of ``config``."""
    output = graph.with_name("engine.plan") if output is None else output
    return build_engine(spec_of(library, config, sparse), graph, output, profiles_of(config), progress=progress)
