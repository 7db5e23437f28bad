"""The engine's table of a recipe."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineRequest:
    """Wishes for the engine; None leaves the choice to llmc.

    Attributes:
        form: native or primitives; default: native where the library has what it takes.
        compute_capabilities: of the GPUs to build for, with commas between them, as "8.6,8.9"; TensorRT-RTX only.
        hardware_compatibility: none (default), ampere (all from 8.0 on) or same (same compute capability).
        version_compatible: whether newer versions of the library may run it (default false).
        stripped: leave the weights out of the engine; they are taken from the graph's file at load (default false).
        deferred: make no engine now; ``llmc build --rebuild`` compiles it where it is to run (default false).
        workspace: bytes of scratch memory for one kernel; default 1 GiB.
        optimization_level: 0 ... 5, how long the builder searches; default: the library's.
    """

    form: str | None = None
    compute_capabilities: str | None = None
    hardware_compatibility: str | None = None
    version_compatible: bool | None = None
    stripped: bool | None = None
    deferred: bool | None = None
    workspace: int | None = None
    optimization_level: int | None = None
