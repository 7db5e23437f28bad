"""Memory of a vision tower."""

from collections.abc import Iterator

from llmc.bundle import Geometry, Limits, Part
from llmc.optimize.lower.context import QuantConfigs
from llmc.optimize.lower.onnxruntime.vision import choose_configs
from llmc.optimize.plan.sizes import (
    BLOCK_COPIES,
    NARROW_ARRAYS,
    OPENED_GRAPH,
    WIDE_ARRAYS,
    file_bytes,
    linear_bytes,
    reference_bytes,
)
from llmc.runtime.vision.decode import DECODING_BYTES
from llmc.runtime.vision.tower import KEPT_BYTES


def plan_tower(geometry: Geometry, limits: Limits, decoder: QuantConfigs) -> Iterator[Part]:
    """The tower: weights, activations, an image that is decoded for it, and rows that are kept. No image has more
    tokens than the context."""
    if (vision := geometry.vision) is None:
        return
    stored = choose_configs(decoder)
    patches, first = (vision.square // vision.patch) ** 2 * min(vision.most_rows, limits.max_context), vision.linears[0]
    widest = max((linear.outputs for linear in vision.linears if linear.layer is not None), default=first.inputs)
    weights = sum(linear_bytes(linear, stored.of(linear.name), copies=BLOCK_COPIES) for linear in vision.linears)
    activations = 4 * patches * (WIDE_ARRAYS * widest + NARROW_ARRAYS * first.outputs)
    # An image is decoded while another one may be computed.
    yield Part("tower", OPENED_GRAPH + weights + activations + KEPT_BYTES + DECODING_BYTES)


def count_tower_bytes(geometry: Geometry, decoder: QuantConfigs) -> int:
    """Bytes that the tower adds to a bundle on disk, whose decoder is stored as ``decoder`` says."""
    stored = choose_configs(decoder)
    return sum(file_bytes(it, stored.of(it.name)) for it in geometry.vision.linears) if geometry.vision else 0


def count_reference_bytes(geometry: Geometry) -> int:
    """Bytes of the unquantized tower while a build compares with it."""
    return sum(map(reference_bytes, geometry.vision.linears)) if geometry.vision else 0
