"""Times that a build measured, kept for the next one: a second build of the same model skips most of the search."""

import contextlib
import logging
from pathlib import Path
from typing import Any

from llmc.optimize.tensorrt.spec import EngineSpec
from llmc.runtime.host import disk_cache
from llmc.runtime.sessions.tensorrt.library import logger

log = logging.getLogger(__name__)

KIND = "timing"
KEPT_BYTES = 1_000_000_000


def place(spec: EngineSpec) -> Path:
    """The file of measured kernel times for the next build with this library, for these GPUs, on this machine."""
    gpu = f"{spec.gpu.name}-{spec.gpu.compute_capability}" if spec.gpu else "none"
    key = f"{spec.library.__name__}-{spec.version}-{gpu}-{'+'.join(spec.config.compute_capabilities)}"
    return disk_cache.entry(KIND, key.replace(" ", "-").replace("/", "-")) / "timing.cache"


def use(library: Any, config: Any, path: Path) -> None:
    """Give the builder's configuration the times in ``path``; none if it is missing, damaged or another machine's."""
    with contextlib.suppress(OSError):
        cache = config.create_timing_cache(path.read_bytes())
        with logger(library).collected() as messages:
            if cache is not None and config.set_timing_cache(cache, False):
                return
        said = messages[0].text if messages else "it was written by another version or for another GPU"
        log.warning("%s: the timing cache is not used (%s); the build takes longer and replaces it", path, said)
    config.set_timing_cache(config.create_timing_cache(b""), False)


def keep(config: Any, path: Path) -> None:
    """Write the times of a build to ``path``, atomically; where it cannot be written they are lost, with a warning."""
    cache = config.get_timing_cache()
    if cache is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk_cache.written(path) as staging:
            staging.write_bytes(memoryview(cache.serialize()))
        disk_cache.prune(KIND, KEPT_BYTES)
    except OSError as error:
        log.warning("%s: the timing cache cannot be kept (%s)", path, error.strerror)
