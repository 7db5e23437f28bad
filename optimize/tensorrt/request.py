"""The engine's table of a recipe."""

from dataclasses import dataclass, replace

from llmc.errors import BuildError
from llmc.inventory import Geometry

# TensorRT-RTX 1.7.1 compiles its attention for heads whose width is a multiple of this, and fails inside for others
# (tried with 10, 12, 14, 18, 20 and 100); basic operators it compiles for any.
NATIVE_HEAD_MULTIPLE = 8


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
        workspace: bytes of scratch memory for one kernel; default: the library's, and on an integrated GPU what
            attention needs at most, unless no kernel fits into that.
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


def for_heads(request: EngineRequest, geometry: Geometry) -> EngineRequest:
    """The request with a form that takes the heads of this geometry, if it leaves the form open.

    Raises:
        BuildError: it asks for the native form, which does not.
    """
    odd = next((item for item in geometry.attentions if item.head_dim % NATIVE_HEAD_MULTIPLE), None)
    if odd is None or request.form == "primitives":
        return request
    if request.form is not None:
        raise BuildError(
            f"{odd.name} has a head_dim of {odd.head_dim}, and attention of the {request.form} form takes multiples of "
            f"{NATIVE_HEAD_MULTIPLE}; leave the form out, or ask for primitives"
        )
    return replace(request, form="primitives")
