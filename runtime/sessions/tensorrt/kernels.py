"""TensorRT-RTX compiles kernels where it runs: what it compiled is kept, and steps wait for theirs.

Left to itself it compiles a kernel for every shape in the background and runs a general one until then, which rounds
otherwise. Decode steps, whose shapes are few, wait for their kernels (eager specialisation): a session compiles those
of one row when it loads. Prompts, each of another length, do not wait. See "Working with Runtime Cache" in its
documentation. Not run on a GPU yet.
"""

import hashlib
import logging
from pathlib import Path
from typing import Any

from llmc.runtime.host import disk_cache

log = logging.getLogger(__name__)

KIND, FILE = "kernels", "kernels.bin"
KEPT_BYTES = 1_000_000_000


def compiles_kernels(library: Any) -> bool:
    """True of a library that compiles kernels while it runs, and can be told how."""
    return hasattr(library, "DynamicShapesKernelSpecializationStrategy")


def kernels_file(*what: str) -> Path:
    """The file of kernels for an engine, a library's version and a GPU, given by whatever tells them from others."""
    return disk_cache.entry(KIND, hashlib.sha256("\n".join(what).encode()).hexdigest()[:32]) / FILE


class Kernels:
    """Kernels that were compiled for an engine, from earlier runs and this one.

    The library checks what it is given, and refuses what is not for this version, driver and GPU. ``file``: where they
    are kept; it need not exist.
    """

    def __init__(self, library: Any, engine: Any, file: Path) -> None:
        self._library, self._engine, self._file = library, engine, file
        self._native = engine.create_runtime_config().create_runtime_cache()
        self._known = 0
        content = disk_cache.read_file(file)
        if content and self._native.deserialize(content):
            self._known = len(content)
        elif content:
            log.info("%s is damaged, or not for this GPU and driver: it is ignored", file)
        if not self._known:
            log.info("kernels are compiled while the engine loads; later loads find them in %s", file)

    def configure_context(self, strategy: Any, repeats: bool) -> Any:
        """Settings of a context: who allocates its memory, and whether its shapes are few."""
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        kernels = self._library.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER if repeats else kernels.LAZY
        config.set_runtime_cache(self._native)
        return config

    def save(self) -> None:
        """Write the kernels where they are kept, if their size has changed; without them the next start is slower."""
        content = bytes(self._native.serialize() or b"")
        if len(content) not in (0, self._known):
            self._known = len(content)
            disk_cache.keep_file(self._file, content, KEPT_BYTES)
