"""The precisions that a GPU lacks on each target, by its compute capability."""

from llmc.bundle import version

# The first compute capability with a precision, by target; never run on a GPU. Sources: the support matrices of
# TensorRT and TensorRT-RTX 1.5 (https://docs.nvidia.com/deeplearning); for int4 on TensorRT, which its own does not
# list, that of NVIDIA's Model Optimizer.
PRECISIONS = {
    "cuda": {"fp32": "7.5", "fp16": "7.5", "int8": "7.5", "int4": "7.5"},
    "tensorrt": {"fp32": "7.5", "fp16": "7.5", "bf16": "8.0", "int8": "7.5", "int4": "8.0"},
    "tensorrt-rtx": {"fp32": "7.5", "fp16": "7.5", "bf16": "8.0", "int8": "8.0", "int4": "8.0"},
}


def list_absent_precisions(target: str, capability: str) -> dict[str, str]:
    """Precisions that a GPU lacks on a target, each with the first compute capability that has it."""
    known = PRECISIONS.get(target, {}) if capability else {}
    return {precision: first for precision, first in known.items() if version(capability) < version(first)}
