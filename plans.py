"""Records of a bundle about its serialized engine, and about the memory that a GPU needs for it."""

import re
from dataclasses import dataclass

AMPERE = (8, 0)


def version(text: str) -> tuple[int, ...]:
    """10.3.0.26 -> (10, 3, 0, 26), so that versions and compute capabilities can be compared."""
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])))


@dataclass(frozen=True)
class Profile:
    """The largest call that an optimisation profile takes: rows, new tokens and logits of each row."""

    batch: int
    sequence: int
    outputs: int


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that a bundle takes on its GPU; on a Jetson they are the machine's own.

    Attributes:
        context: the driver's and the libraries' own, from experience.
        weights: of the engine or the graphs.
        workspace: activations of the largest call.
        cache_per_token: keys and values, per row and position.
        logits: of one row.
    """

    context: int
    weights: int
    workspace: int
    cache_per_token: int
    logits: int

    def parts(self, positions: int, batch: int = 1) -> dict[str, int]:
        """Bytes by what they are for, with room for ``positions`` in each of ``batch`` rows."""
        return {
            "context": self.context,
            "weights": self.weights,
            "workspace": self.workspace,
            "cache": self.cache_per_token * positions * batch,
            "logits": self.logits * batch,
        }

    def total(self, positions: int, batch: int = 1) -> int:
        """The sum of the parts."""
        return sum(self.parts(positions, batch).values())


@dataclass(frozen=True)
class EngineConfig:
    """A serialized TensorRT engine: which machine it is for, and which calls it takes.

    Attributes:
        file: the engine.
        form: native (cache updated in place, attention of the library) or primitives (basic operators, for TensorRT
            before 10.15).
        compute: float16, bfloat16 or float32.
        capacity: positions of the cache, 0 where the cache has as many as the call's bucket.
        buckets: numbers of cache positions that attention may look at, ascending; the last one is the longest context.
        decode, prefill: the profiles 0 and 1.
        select: the engine that finds the largest logits, or empty; ``candidates`` of them.
        platform: operating system and processor, as linux-x86_64.
        compute_capabilities: of the GPUs it was built for, as 8.7.
        version_compatible, hardware_compatibility, stripped: the builder's options; a stripped engine takes its weights
            from the graph's file when it is loaded.
        verified: ``device`` where the engine itself was run after building, ``cpu`` where only its graph was, on a CPU;
            ``float32`` where that graph was run computing in float32, for CPUs have no bfloat16; ``no`` where nothing
            was.
        inspector: file with the network's layers.
        workspace, optimization_level: of the builder; None is the library's own level.
    """

    file: str
    form: str
    compute: str
    capacity: int
    buckets: tuple[int, ...]
    decode: Profile
    prefill: Profile
    select: str
    candidates: int
    platform: str
    compute_capabilities: tuple[str, ...]
    version_compatible: bool
    hardware_compatibility: str
    stripped: bool
    verified: str
    inspector: str
    workspace: int = 1 << 30
    optimization_level: int | None = None

    @property
    def gpus(self) -> str:
        """The compute capabilities that :meth:`fits_gpu` accepts, in words."""
        return "8.0 and newer that the library knows" if self._for_ampere else " or ".join(self.compute_capabilities)

    def fits_gpu(self, capability: str) -> bool:
        """True if the engine has code for a GPU of this compute capability, as 8.7.

        It has for those that it names; where it names none, as TensorRT-RTX builds by default, or was built so, from
        Ampere on.
        """
        return version(capability) >= AMPERE if self._for_ampere else capability in self.compute_capabilities

    @property
    def _for_ampere(self) -> bool:
        return self.hardware_compatibility == "ampere" or not self.compute_capabilities

    def fits_version(self, installed: str, built: str) -> bool:
        """True if the library's version ``installed`` reads an engine of ``built``: the same one does, and if it was
        built so, all later ones."""
        if self.version_compatible:
            return version(installed) >= version(built)
        return version(installed) == version(built)

    def is_sound(self, max_context: int, max_batch: int, prefill_chunk: int) -> bool:
        """True if a build with these limits can have written these numbers."""
        rising = list(self.buckets) == sorted(set(self.buckets)) and min(self.buckets, default=0) > 0
        if not rising or self.buckets[-1] < max_context or self.form not in ("native", "primitives"):
            return False
        capacity = 0 if self.form == "primitives" else self.buckets[-1]
        selects = self.candidates > 0 if self.select else self.candidates == 0
        decode, prefill = Profile(max_batch, 1, 1), (self.prefill.batch, self.prefill.sequence)
        profiles = self.decode == decode and prefill == (1, prefill_chunk) and 0 < self.prefill.outputs <= prefill_chunk
        gpus = all(re.fullmatch(r"\d+\.\d+", gpu, re.ASCII) for gpu in self.compute_capabilities)
        return self.capacity == capacity and selects and profiles and gpus and self.workspace > 0
