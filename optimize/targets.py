"""Abilities of each target. Lowering asks this record, never a name."""

from dataclasses import dataclass, replace

from llmc.errors import UsageError
from llmc.runtime.host import probe

# Opset and IR version: the newest that ONNX Runtime 1.23 reads, and what TensorRT's attention needs.
OLD, NATIVE = (21, 10), (24, 11)
# TensorRT's chunks on a GPU with more memory than this: each call reads all weights, and scores of attention grow with
# chunks. Smaller boards, and those that are unknown, keep the default, which fits everywhere.
LARGE_GPU, LARGE_CHUNK = 16 << 30, 1024


@dataclass(frozen=True)
class Capabilities:
    """Facts about one engine on one kind of processor. The first of several choices is the default."""

    name: str
    engine: str
    precisions: tuple[str, ...]
    # types of the KV cache, and the oldest engine that knows each; on GPUs the default is the type of activations, on
    # CPUs float16 for some models
    caches: dict[str, str]
    computes: tuple[str, ...] = ("float32",)  # types of activations
    phases: tuple[str, ...] = ("split", "shared")  # how the phases may share graphs; the default for integers
    activations: tuple[str, ...] = ("per-token",)  # how activations may be quantized
    asymmetric: bool = True  # 4-bit weights may have zero points
    block: int = 0  # block of 4-bit weights without zero points for the engine's fast kernels; 0: any, and zero points
    has_gpu: bool = True
    ragged_rows: str = ""  # oldest engine whose attention takes rows of different lengths; empty for none
    # Tokens of a prompt per call. On CPUs attention costs the square of a chunk, and activations of 512 tokens outgrow
    # the caches: 256 is 5 % faster than 512 at a prompt of 512, equal at 2,048, and takes half the workspace.
    chunk: int = 256
    precision: str = "int8"  # default for checkpoints that are not quantized
    head: str = "int8"  # precision of the head beside 4 bits, and of what a quantized checkpoint leaves in floats

    @property
    def makes_engine(self) -> bool:
        """True if the graph is compiled into an engine file."""
        return self.phases == ("single",)


def _tensorrt(name: str, minimum: str, precision: str, head: str) -> Capabilities:
    return Capabilities(
        name=name,
        engine=name,
        precisions=("fp16", "bf16", "int8", "int4", "fp32"),
        caches=dict.fromkeys(("float16", "bfloat16", "float32"), minimum),
        computes=("float16", "bfloat16", "float32"),
        phases=("single",),
        activations=("none", "static"),
        asymmetric=False,
        precision=precision,
        head=head,
        block=128,  # TensorRT's kernels for 4 bits were only measured with these
    )


TARGETS = {
    "cpu": Capabilities(
        name="cpu",
        engine="onnxruntime",
        precisions=("fp32", "fp16", "int8", "int4"),
        # The oldest version that was tried with each. 1.23, the last one for Python 3.10, is the first with 8-bit
        # MatMulNBits and row gather, and refuses an int8 cache.
        caches={"float32": "1.23", "float16": "1.32", "int8": "1.31", "int8-channel": "1.31"},
        has_gpu=False,
        ragged_rows="1.32",
    ),
    "cuda": Capabilities(
        name="cuda",
        engine="onnxruntime-cuda",
        precisions=("fp16", "int8", "int4", "fp32"),
        # 1.28 dequantizes rows of a tied embedding without zero points wrongly (onnxruntime issue 31692). 1.31.1 ranks
        # a row in many blocks of threads; one block took 1.36 ms for 16 of 248,320 (onnxruntime pull request 32404).
        caches={"float16": "1.31.1", "float32": "1.31.1"},
        computes=("float16", "float32"),
        phases=("shared",),
        activations=("none",),
        block=32,  # see FAST_KERNELS in runtime/sessions/onnxruntime/cuda_provider.py
        chunk=2048,  # each call reads all weights, and a GPU computes faster than it reads; not measured
    ),
    # TensorRT documents weights in integers under float activations for int4 alone, TensorRT-RTX for int8 as well.
    "tensorrt": _tensorrt("tensorrt", "10.15", "int4", "fp16"),
    "tensorrt-rtx": _tensorrt("tensorrt-rtx", "1.7", "int8", "int8"),
}


def capabilities(target: str) -> Capabilities:
    """The record of ``target``. Raises UsageError: no such target."""
    if target not in TARGETS:
        raise UsageError("target", f"is {target!r}, expected one of {', '.join(TARGETS)}")
    return TARGETS[target]


def capabilities_for(target: str, gpu_memory: int | None) -> Capabilities:
    """The record of ``target`` for a GPU of so many bytes, 0 if it is unknown; None for the first GPU here."""
    record = capabilities(target)
    if not record.makes_engine:
        return record
    if gpu_memory is None:
        gpu_memory = next((gpu.total_memory for gpu in probe.probe_driver().devices), 0)
    return replace(record, chunk=LARGE_CHUNK) if gpu_memory > LARGE_GPU else record
