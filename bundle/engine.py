"""The part of a manifest that bundles for GPUs have: the engine, and the memory that it takes."""

import re
from dataclasses import dataclass
from typing import Annotated

from llmc.bundle.model.ranges import Positions

MOST_ROWS = 1024  # no build writes more
Bytes = Annotated[int, range(1 << 60)]
Rows = Annotated[int, range(1, MOST_ROWS + 1)]
AMPERE = (8, 0)


def version(text: str) -> tuple[int, ...]:
    """10.16.1.11 -> (10, 16, 1, 11), so that versions and compute capabilities can be compared."""
    return tuple(map(int, re.findall(r"\d{1,9}", text.partition("+")[0])))


@dataclass(frozen=True)
class Profile:
    """The largest call that an optimisation profile takes: rows, new tokens and logits of each row."""

    batch: Rows
    sequence: Positions
    outputs: Positions


@dataclass(frozen=True)
class EngineConfig:
    """A serialized TensorRT engine: which machine it is for, and which calls it takes."""

    file: str  # the engine; empty where its build is deferred
    compute: str  # float16, bfloat16 or float32
    # numbers of cache positions that attention may look at, ascending; the last one is the longest context
    buckets: Annotated[tuple[Positions, ...], range(1, 65)]
    # the profiles 0 and 1
    decode: Profile
    prefill: Profile
    platform: str  # operating system and processor, as linux-x86_64
    compute_capabilities: tuple[str, ...]  # of the GPUs it was built for, as 8.7
    # `device` where the engine itself was run after building, `cpu` where only its graph was, on a CPU; `float32` where
    # that graph was run computing in float32, for CPUs have no bfloat16; `no` where nothing was
    verified: str
    # requests to the builder; None leaves them to the library, except the workspace of an integrated GPU, which is then
    # as large as its attention needs
    workspace: Annotated[int, range(1, 1 << 60)] | None = None
    optimization_level: Annotated[int, range(6)] | None = None
    log: str = ""  # file with every warning of the library's, in its words
    # flags for the library's compiler, by GPU and version of the library; see `llmc.optimize.tensorrt.flags`
    flags: str = ""
    # `fused`: one kernel of the library's for each attention, in both profiles; `decomposed`: for some attention, in
    # some profile, it has no such kernel and may use several (it does not say for which); `basic`: the graph has basic
    # operators in place of attention; empty where no engine was built
    attention: str = ""
    # type of query, keys and values at attention's border, where it is not `compute`: `float32` after an engine without
    # it was judged to be wrong on its GPU
    border: str = ""

    @property
    def gpus(self) -> str:
        """The compute capabilities that :meth:`fits_gpu` accepts, in words."""
        return " or ".join(self.compute_capabilities) or "8.0 and newer that the library knows"

    def fits_gpu(self, capability: str) -> bool:
        """True if the engine has code for a GPU of this compute capability, as 8.7.

        An engine that names GPUs has code for those; one that names none (TensorRT-RTX's default) for all since Ampere.
        """
        return capability in self.compute_capabilities or (
            not self.compute_capabilities and version(capability) >= AMPERE
        )

    def is_sound(self, max_context: int, max_batch: int, prefill_chunk: int) -> bool:
        """True if a build with these limits could write these numbers."""
        rising = list(self.buckets) == sorted(set(self.buckets)) and min(self.buckets) > 0
        decode, prefill = Profile(max_batch, 1, 1), (self.prefill.batch, self.prefill.sequence)
        profiles = self.decode == decode and prefill == (1, prefill_chunk) and 0 < self.prefill.outputs <= prefill_chunk
        gpus = all(re.fullmatch(r"\d+\.\d+", gpu, re.ASCII) for gpu in self.compute_capabilities)
        known = self.border in ("", "float32")
        return known and rising and self.buckets[-1] >= max_context and profiles and gpus and self.workspace != 0
