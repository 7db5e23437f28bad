"""Abilities of an installed TensorRT or TensorRT-RTX, asked from its interface and never from its version.

What the interface has, was seen in the bindings of 10.3, 10.13, 10.16 and 11.4 and of TensorRT-RTX 1.7
(``tests/data/tensorrt_api``): native caches and attention since 10.15.
"""

from dataclasses import dataclass
from typing import Any

from llmc.runtime.host.probe_steps import NATIVE

# Forms of the lowered graph, the preferred one first.
FORMS = ("native", "primitives")


@dataclass(frozen=True)
class Abilities:
    """Parts of the interface that the builder uses where they are there; all versions have the others.

    Attributes:
        forms: of the lowered graph that can be built, the preferred one first.
        stream_writer: the engine is written in pieces instead of being returned whole.
        initializer_streaming: the parser takes weights by address.
        timing_cache: measured times can be kept from build to build. TensorRT-RTX measures nothing while it builds, and
            its timing cache is a deprecated empty shell.
        compute_capabilities: the GPUs to build for can be named, so that no GPU is needed (TensorRT-RTX).
    """

    forms: tuple[str, ...]
    stream_writer: bool
    initializer_streaming: bool
    timing_cache: bool
    compute_capabilities: bool


def abilities(library: Any) -> Abilities:
    """Ask ``library`` (the module tensorrt or tensorrt_rtx). Nothing is built, and no GPU is touched."""
    builder, parser, config = library.Builder, library.OnnxParser, library.IBuilderConfig
    native = all(hasattr(library.INetworkDefinition, name) for name in NATIVE)
    gpus_by_name = hasattr(config, "set_compute_capability") and hasattr(library, "ComputeCapability")
    return Abilities(
        forms=FORMS if native else ("primitives",),
        stream_writer=hasattr(builder, "build_serialized_network_to_stream") and hasattr(library, "IStreamWriter"),
        initializer_streaming=hasattr(parser, "load_initializer") and hasattr(parser, "load_model_proto"),
        timing_cache=hasattr(config, "create_timing_cache") and not gpus_by_name,
        compute_capabilities=gpus_by_name,
    )
