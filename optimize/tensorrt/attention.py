"""Fused kernels of attention: the library is asked for them by building the attention alone.

Without one the scores are written to memory and read again, which takes memory and time with the square of what is
attended to; the engine is right and slow, and says nothing. Kernels are found by GPU, type, width of the heads and
shapes.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from llmc.bundle import EngineConfig, Geometry
from llmc.errors import BuildError, GpuError, ResourceError
from llmc.inventory import Attention
from llmc.optimize.progress import Progress
from llmc.optimize.targets import NATIVE
from llmc.optimize.tensorrt.builder import build_model
from llmc.optimize.tensorrt.network import Layer, Ranges
from llmc.optimize.tensorrt.spec import EngineSpec

log = logging.getLogger(__name__)

PROFILES = ("decode", "prefill")
# What the builder says where it may not take an attention apart.
NO_KERNEL = "not supported by a dedicated kernel"
TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def decomposed(
    spec: EngineSpec,
    folder: Path,
    geometry: Geometry,
    layers: Sequence[Layer],
    profiles: Sequence[Ranges],
    progress: Progress,
) -> tuple[str, ...] | None:
    """The profiles in which some attention has no kernel of its own; None where the library gave another answer.

    Args:
        spec: of the engine.
        folder: to write small engines in, which are removed again.
        geometry: of the decoder.
        layers: of the engine's network.
        profiles: the engine's.
    """
    whole = sum(layer.type == "ATTENTION_INPUT" for layer in layers)
    if whole < len(geometry.attentions) or spec.config.compute not in TYPES:
        found: tuple[str, ...] | None = PROFILES  # written out in products and a softmax, or in float32
    else:
        shapes = dict.fromkeys((item.heads, item.kv_heads, item.head_dim) for item in geometry.attentions)
        kinds = [next(a for a in geometry.attentions if (a.heads, a.kv_heads, a.head_dim) == shape) for shape in shapes]
        progress("asking for kernels of attention")
        try:
            found = tuple(
                name
                for name, ranges in zip(PROFILES, profiles, strict=True)
                if not all(_fuses(spec, folder, kind, ranges) for kind in kinds)
            )
        except (BuildError, GpuError, ResourceError) as error:  # the engine itself is built
            log.warning("it is not known whether attention is fused: %s", error)
            return None
    if found:
        log.warning(
            "attention has no fused kernel in %s: its scores go through memory, which is slow for long contexts",
            " and ".join(found),
        )
    return found


def _fuses(spec: EngineSpec, folder: Path, attention: Attention, ranges: Ranges) -> bool:
    output = folder / ".attention.plan"
    try:
        build_model(spec, attention_graph(attention, spec.config), output, [ranges], decomposable=False)
    except BuildError as error:
        if NO_KERNEL not in str(error):
            raise
        return False
    finally:
        output.unlink(missing_ok=True)
    return True


def attention_graph(attention: Attention, config: EngineConfig) -> onnx.ModelProto:
    """One attention as the lowered graph has it, over keys and values that are inputs."""
    kind, dim = TYPES[config.compute], attention.head_dim
    inputs: dict[str, tuple[int, list[str | int | None]]] = {
        "query": (kind, ["batch", attention.heads, "sequence", dim]),
        "key": (kind, ["batch", attention.kv_heads, "attended", dim]),
        "value": (kind, ["batch", attention.kv_heads, "attended", dim]),
        "mask": (TensorProto.BOOL, ["batch", 1, "sequence", "attended"]),
    }
    graph = helper.make_graph(
        [helper.make_node("Attention", list(inputs), ["output"], name="attention", scale=1.0)],
        "attention",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info("output", kind, ["batch", attention.heads, "sequence", dim])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", NATIVE[0])], ir_version=NATIVE[1])
