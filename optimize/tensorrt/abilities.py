"""What an installed TensorRT or TensorRT-RTX can do, asked from its interface and never from its version.

What the interface has, was seen in the bindings of 10.3, 10.13, 10.16 and 11.4 and of TensorRT-RTX 1.7
(``tests/data/tensorrt_api``): native caches and attention since 10.15.
"""

from dataclasses import dataclass
from typing import Any

NATIVE, PRIMITIVES = "native", "primitives"


@dataclass(frozen=True)
class Abilities:
    """Parts of the interface that the builder uses where they are there.

    Attributes:
        native_cache: caches that are updated in place (KV_CACHE_UPDATE).
        native_attention, rotary, rms_norm: attention, rotary embedding and RMS norm as layers of their own.
        int4, fp8, fp4, bf16: data types.
        strongly_typed: types come from the graph alone; libraries without the switch know nothing else.
        strip, refit: engines without weights, and engines whose weights can be set again.
        version_compatible: engines that later versions load too.
        stream_writer: the engine is written in pieces instead of being returned whole.
        progress_monitor: the builder tells how far it is, and can be stopped.
        initializer_streaming: the parser takes weights by address.
        timing_cache: measured times can be kept from build to build. TensorRT-RTX measures nothing while it builds, and
            its timing cache is a deprecated empty shell.
        inspector: layers of an engine can be listed.
        compute_capabilities: the GPUs to build for can be named, so that no GPU is needed (TensorRT-RTX).
    """

    native_cache: bool
    native_attention: bool
    rotary: bool
    rms_norm: bool
    int4: bool
    fp8: bool
    fp4: bool
    bf16: bool
    strongly_typed: bool
    strip: bool
    refit: bool
    version_compatible: bool
    stream_writer: bool
    progress_monitor: bool
    initializer_streaming: bool
    timing_cache: bool
    inspector: bool
    compute_capabilities: bool

    @property
    def forms(self) -> tuple[str, ...]:
        """Forms of the lowered graph that this library builds, the preferred one first."""
        native = self.native_cache and self.native_attention and self.rotary and self.rms_norm
        return (NATIVE, PRIMITIVES) if native else (PRIMITIVES,)


def abilities(library: Any) -> Abilities:
    """What ``library`` (the module tensorrt or tensorrt_rtx) can do. Nothing is built, and no GPU is touched."""

    def has(path: str) -> bool:
        found = library
        for name in path.split("."):
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True

    gpus_by_name = has("IBuilderConfig.set_compute_capability") and has("ComputeCapability")
    return Abilities(
        native_cache=has("INetworkDefinition.add_kv_cache_update"),
        native_attention=has("INetworkDefinition.add_attention") and has("LayerType.ATTENTION_INPUT"),
        rotary=has("INetworkDefinition.add_rotary_embedding"),
        rms_norm=has("INetworkDefinition.add_normalization_v2"),
        int4=has("DataType.INT4"),
        fp8=has("DataType.FP8"),
        fp4=has("DataType.FP4"),
        bf16=has("DataType.BF16"),
        strongly_typed=has("NetworkDefinitionCreationFlag.STRONGLY_TYPED"),
        strip=has("BuilderFlag.STRIP_PLAN"),
        refit=has("BuilderFlag.REFIT_IDENTICAL") and has("Refitter.set_named_weights"),
        version_compatible=has("BuilderFlag.VERSION_COMPATIBLE"),
        stream_writer=has("Builder.build_serialized_network_to_stream") and has("IStreamWriter"),
        progress_monitor=has("IProgressMonitor") and has("IBuilderConfig.progress_monitor"),
        initializer_streaming=has("OnnxParser.load_initializer") and has("OnnxParser.load_model_proto"),
        timing_cache=has("IBuilderConfig.create_timing_cache") and not gpus_by_name,
        inspector=has("EngineInspector.get_engine_information"),
        compute_capabilities=gpus_by_name,
    )
