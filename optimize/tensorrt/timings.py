"""Times that a builder of TensorRT measured, for minutes, to choose kernels: the user's cache keeps them for the next
build.

TensorRT-RTX measures nothing while it builds, and its calls for timings do nothing. Those of TensorRT were checked
against its recorded interface, not run.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmc.optimize.tensorrt.spec import EngineSpec
from llmc.runtime.host import disk_cache
from llmc.runtime.sessions.tensorrt.library import logger, nameable_gpus

log = logging.getLogger(__name__)

KIND, FILE = "timings", "timings.bin"
KEPT_BYTES = 100_000_000


def timings_file(spec: EngineSpec) -> Path:
    """The file of timings for a library's version, a platform and a GPU."""
    gpu = f"{spec.gpu.name} {spec.gpu.compute_capability}" if spec.gpu else "none"
    key = "\n".join((spec.library.__name__, spec.version, spec.config.platform, gpu))
    return disk_cache.entry(KIND, hashlib.sha256(key.encode()).hexdigest()[:32]) / FILE


@contextmanager
def keep_timings(spec: EngineSpec, config: Any) -> Iterator[None]:
    """Let a build with this ``config`` use the timings of earlier builds; keep its own, whether it succeeds or not."""
    if nameable_gpus(spec.library):
        yield
        return
    file = timings_file(spec)
    known = disk_cache.read_file(file)
    with logger(spec.library).collect_messages() as messages:
        timings = _attach(config, known)
    if known and (timings is None or messages):
        log.info("%s is damaged, or not for this GPU and driver: it is ignored", file)
    timings = timings or _attach(config, b"")
    try:
        yield
    finally:
        content = bytes(timings.serialize() or b"") if timings else b""
        if content and content != known:
            disk_cache.keep_file(file, content, KEPT_BYTES)


def _attach(config: Any, content: bytes) -> Any:
    """The builder's timings, begun with ``content``; None if the library refuses that."""
    timings = config.create_timing_cache(content)
    return timings if timings and config.set_timing_cache(timings, ignore_mismatch=False) else None
