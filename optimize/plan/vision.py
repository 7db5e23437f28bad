"""Memory of a tower for images or audio."""

from collections.abc import Iterator

from llmc.bundle import Geometry, Limits, Part
from llmc.bundle.model.audio import CONVOLUTIONS, Audio, halve
from llmc.optimize.lower.context import QuantConfigs
from llmc.optimize.lower.onnxruntime.vision import choose_configs
from llmc.optimize.plan.sizes import (
    BLOCK_COPIES,
    NARROW_ARRAYS,
    OPENED_GRAPH,
    REFERENCE_COPIES,
    WIDE_ARRAYS,
    file_bytes,
    linear_bytes,
    reference_bytes,
)
from llmc.runtime.audio.decode import LARGEST_FILE
from llmc.runtime.vision.decode import DECODING_BYTES
from llmc.runtime.vision.tower import KEPT_BYTES

KERNEL_SIZE = 9  # values of a kernel for each pair of channels
# Float arrays of the size of the first convolution's output that the engine holds: 188 MB at Qwen3-ASR's 49 MB.
CONVOLVED_ARRAYS = 4


def plan_tower(geometry: Geometry, limits: Limits, decoder: QuantConfigs) -> Iterator[Part]:
    """The tower: weights, activations, an image or audio that is decoded for it, and rows that are kept. No image and
    no audio has more tokens than the context."""
    if (part := geometry.tower) is None:
        return
    stored, first = choose_configs(decoder), part.linears[0]
    widest = max((linear.outputs for linear in part.linears if linear.layer is not None), default=first.inputs)
    weights = sum(linear_bytes(linear, stored.of(linear.name), copies=BLOCK_COPIES) for linear in part.linears)
    if isinstance(part, Audio):
        rows, decoding = part.most_rows, _count_decoding_bytes(part, limits.max_context)
        weights += _count_kernel_bytes(part)
        convolved = 4 * CONVOLVED_ARRAYS * part.window * part.channels * part.spectrum.bands * part.chunk // 4
    else:
        rows = (part.square // part.patch) ** 2 * min(part.most_rows, limits.max_context)
        convolved, decoding = 0, DECODING_BYTES
    activations = max(convolved, 4 * rows * (WIDE_ARRAYS * widest + NARROW_ARRAYS * first.outputs))
    # An image or audio is decoded while another one may be computed.
    yield Part("tower", OPENED_GRAPH + weights + activations + KEPT_BYTES + decoding)


def _count_kernel_bytes(audio: Audio) -> int:
    """Bytes of the kernels of convolutions in float32, which the engine packs."""
    kernels = audio.channels + (CONVOLUTIONS - 1) * audio.channels**2
    return 4 * KERNEL_SIZE * kernels * REFERENCE_COPIES


def _count_decoding_bytes(audio: Audio, context: int) -> int:
    """Bytes of samples and spectra, twice, of audio that fills the context, and of the decoded file."""
    frames = context * audio.chunk // halve(audio.chunk)
    return LARGEST_FILE + 2 * 4 * frames * (audio.spectrum.hop + audio.spectrum.bands)


def count_tower_bytes(geometry: Geometry, decoder: QuantConfigs) -> int:
    """Bytes that the tower adds to a bundle on disk, whose decoder is stored as ``decoder`` says."""
    if (part := geometry.tower) is None:
        return 0
    stored = choose_configs(decoder)
    kernels = _count_kernel_bytes(part) // REFERENCE_COPIES if isinstance(part, Audio) else 0
    return kernels + sum(file_bytes(it, stored.of(it.name)) for it in part.linears)


def count_reference_bytes(geometry: Geometry) -> int:
    """Bytes of the unquantized tower while a build compares with it."""
    if (part := geometry.tower) is None:
        return 0
    kernels = _count_kernel_bytes(part) if isinstance(part, Audio) else 0
    return kernels + sum(map(reference_bytes, part.linears))
