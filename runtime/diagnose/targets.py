"""Precisions of GPUs by target: what a compute capability lacks, for refusals and for the doctor."""

from llmc.bundle import version

# The first compute capability that has a precision, by target; not run on any. Sources: the support matrices of
# TensorRT and of TensorRT-RTX 1.5 (https://docs.nvidia.com/deeplearning); for int4 of TensorRT, of which its own says
# nothing, that of NVIDIA's Model Optimizer.
PRECISIONS = {
    "cuda": {"fp32": "7.5", "fp16": "7.5", "int8": "7.5", "int4": "7.5"},
    "tensorrt": {"fp32": "7.5", "fp16": "7.5", "bf16": "8.0", "int8": "7.5", "int4": "8.0"},
    "tensorrt-rtx": {"fp32": "7.5", "fp16": "7.5", "bf16": "8.0", "int8": "8.0", "int4": "8.0"},
}


def list_absent_precisions(target: str, capability: str) -> dict[str, str]:
    """The precisions that a GPU of this compute capability does not have on a target, and the first one that has."""
    known = PRECISIONS.get(target, {}) if capability else {}
    return {precision: first for precision, first in known.items() if version(capability) < version(first)}
