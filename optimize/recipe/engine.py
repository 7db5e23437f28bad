"""The engine's table of a recipe."""

from dataclasses import dataclass

from llmc.bundle.model.geometry import Geometry
from llmc.errors import BuildError

# TensorRT-RTX 1.7.1 compiles its attention for heads whose width is a multiple of this, and fails inside for others
# (tried with 10, 12, 14, 18, 20 and 100).
HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class EngineRequest:
    """Wishes for the engine; None leaves the choice to llmc."""

    # GPUs to build for, separated by commas, such as "8.6,8.9"; TensorRT-RTX only
    compute_capabilities: str | None = None
    # make no engine now: ``llmc build --rebuild`` compiles it on the machine that runs it; default false
    deferred: bool | None = None
    # scratch memory of a kernel in bytes; default: the library's; on an integrated GPU: what attention needs
    workspace: int | None = None
    optimization_level: int | None = None  # 0 to 5: how long the builder searches; default: the library's


def check_heads(geometry: Geometry) -> None:
    """Refuse heads that TensorRT's attention does not take.
    Raises BuildError: some head's width is no multiple of 8."""
    odd = next((item for item in geometry.attentions if item.head_dim % HEAD_MULTIPLE), None)
    if odd is not None:
        raise BuildError(
            f"{odd.name} has a head_dim of {odd.head_dim}, and TensorRT's attention takes multiples of "
            f"{HEAD_MULTIPLE}; build for cuda with --fp32"
        )
