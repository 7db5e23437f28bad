"""The seam to the engines: one module per engine, imported when a bundle asks for it."""

import importlib
from pathlib import Path

from llmc.bundle import Manifest
from llmc.errors import BundleError
from llmc.runtime.sessions.base import Batch, Phase, Session

__all__ = ["Batch", "Phase", "Session", "open_session"]

ENGINES = {"onnxruntime": "llmc.runtime.sessions.onnxruntime:OnnxRuntimeSession"}


def open_session(folder: Path, manifest: Manifest, threads: int) -> Session:
    """Open the bundle's graphs with the engine that they were built for.

    Raises:
        BundleError: this llmc has no such engine, or the engine refuses the graphs.
        MissingExtraError: the engine's library is not installed.
    """
    name = manifest.target.engine
    if name not in ENGINES:
        raise BundleError(f"{folder}: built for the engine {name!r}, this llmc has {', '.join(ENGINES)}; upgrade llmc")
    module, _, attribute = ENGINES[name].partition(":")
    session: Session = getattr(importlib.import_module(module), attribute)(folder, manifest, threads)
    return session
