"""The seam to the engines: one module per engine, imported when a bundle asks for it."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmc.bundle import STAGE_FOLDER, Manifest, Part, Target
from llmc.errors import BundleError, UsageError
from llmc.runtime.sessions.base import Batch, Phase, Session

__all__ = ["Batch", "Phase", "Session", "emulate_target", "open_engine", "open_session"]

ENGINES = {
    "onnxruntime": "llmc.runtime.sessions.onnxruntime.cpu:OnnxRuntimeSession",
    "onnxruntime-cuda": "llmc.runtime.sessions.onnxruntime.cuda:CudaSession",
    "tensorrt": "llmc.runtime.sessions.tensorrt.session:TensorRTSession",
    "tensorrt-rtx": "llmc.runtime.sessions.tensorrt.session:TensorRTSession",
}
# The oldest ONNX Runtime whose Attention and TensorScatter mean what the standard says.
EMULATOR = "1.28"
# Of a weight: dequantized in 16 bits once, and in 32 bits at every use, whose memory the engine keeps. As measured.
EMULATED_BYTES = 7


def open_session(folder: Path, manifest: Manifest, threads: int, device: int = 0, stages: Any = None) -> Session:
    """Open a bundle as :func:`open_engine` does; a model's last stage with those before it, which ``stages`` opens."""
    stage = manifest.stage
    if not stage.is_last:
        raise BundleError(
            f"{folder} is stage {stage.number} of {len(stage.borders)}, expected the last, which answers; load the "
            f"folder that llmc build wrote, in which {STAGE_FOLDER.format(stage.number)} was"
        )
    session = open_engine(folder, manifest, threads, device)
    if not stage.before:
        return session
    from llmc.runtime.sessions.staged import StagedSession, Stages

    return StagedSession(manifest, session, (stages or Stages)(folder, manifest, threads))


def open_engine(folder: Path, manifest: Manifest, threads: int, device: int = 0) -> Session:
    """Open the bundle's graphs with the engine that they were built for; ``device`` is the number of a visible GPU.

    Raises:
        UsageError: a GPU's number, for a bundle that runs on the CPU.
        BundleError: this llmc has no such engine, or the engine refuses the graphs.
        MissingExtraError: the engine's library is not installed.
        GpuError: GPU, driver or engine library are missing or unsupported.
    """
    name = manifest.target.engine
    if name not in ENGINES:
        raise BundleError(
            f"built for the engine {name!r}, this llmc has {', '.join(ENGINES)}", "upgrade llmc", path=folder
        )
    module, _, attribute = ENGINES[name].partition(":")
    if device and manifest.device is None:
        raise UsageError("device", f"is {device}, but this bundle runs on the CPU", "leave it out")
    chosen = {"device": device} if device else {}
    session: Session = getattr(importlib.import_module(module), attribute)(folder, manifest, threads, **chosen)
    return session


def emulate_target(manifest: Manifest) -> Manifest:
    """The manifest of a GPU's bundle as if it were for the CPU, so that its graph is run there: slow, to check it."""
    if manifest.device is None:
        return manifest
    # Graph and cache lie in this process.
    weights, graph = Part("weights", EMULATED_BYTES * manifest.source.parameters), ("workspace", "cache")
    memory = manifest.memory.add(weights, *(part for part in manifest.device.uses if part.name in graph))
    target = Target(manifest.target.name, "onnxruntime", manifest.target.engine_version, EMULATOR)
    return replace(manifest, target=target, memory=memory, device=None)
