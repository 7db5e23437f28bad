"""What is asked of the builder, and what it tells of the engine that it built."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmc.errors import UsageError
from llmc.optimize.tensorrt.abilities import NATIVE, PRIMITIVES
from llmc.plans import Profile

FORMS = (NATIVE, PRIMITIVES)
OPTIMIZATION_LEVELS = range(6)
# What a bundle calls them, and the library's names.
HARDWARE_COMPATIBILITY = {"none": "NONE", "ampere": "AMPERE_PLUS", "same": "SAME_COMPUTE_CAPABILITY"}

# Least, best and largest size of each named dimension in one optimisation profile.
Ranges = Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Options:
    """How to build, whatever the graph.

    Attributes:
        workspace: bytes of device memory for the activations of any layer; None leaves the limit to the library (all).
        optimization_level: 0 (fast build) ... 5 (searches longest); None is the library's default, 3.
        timing_cache: file of measured times, read if it is there and written back; None keeps none.
        version_compatible: later versions of the library load the engine too.
        hardware_compatibility: none, ampere (GPUs from 8.0 on, slower) or same (of the same compute capability).
        stripped: leave the weights out; the runtime sets them from the graph's file.
        refittable: weights may be set again to the same values. A stripped engine always is.
        compute_capabilities: GPUs to build for, as 8.6, with no GPU at hand; TensorRT-RTX only.
        detailed: layers keep their names and types, for the inspector.
    """

    workspace: int | None = None
    optimization_level: int | None = None
    timing_cache: Path | None = None
    version_compatible: bool = False
    hardware_compatibility: str = "none"
    stripped: bool = False
    refittable: bool = False
    compute_capabilities: tuple[str, ...] = ()
    detailed: bool = True

    def __post_init__(self) -> None:
        if self.optimization_level is not None and self.optimization_level not in OPTIMIZATION_LEVELS:
            raise UsageError(f"optimization_level is {self.optimization_level}; expected 0 ... 5")
        if self.workspace is not None and self.workspace <= 0:
            raise UsageError(f"workspace is {self.workspace} bytes; expected more than 0")
        if self.hardware_compatibility not in HARDWARE_COMPATIBILITY:
            expected = ", ".join(HARDWARE_COMPATIBILITY)
            raise UsageError(f"hardware compatibility {self.hardware_compatibility!r} is unknown; expected {expected}")


@dataclass(frozen=True)
class EngineOrder:
    """A decoder's engine.

    Attributes:
        output: the engine's file; its folder must be there.
        buckets: numbers of cache positions that attention may look at, ascending.
        decode, prefill: the largest calls of the optimisation profiles 0 and 1.
        form: native or primitives, see :class:`llmc.plans.EnginePlan`.
        capacity: positions of the cache, made static; None where they vary with the bucket (primitives).
        inspector: file for the summary of the layers; None writes none.
    """

    output: Path
    buckets: tuple[int, ...]
    decode: Profile
    prefill: Profile
    form: str = NATIVE
    capacity: int | None = None
    options: Options = field(default_factory=Options)
    inspector: Path | None = None

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UsageError(f"form {self.form!r} is unknown; expected one of {', '.join(FORMS)}")
        if not self.buckets or self.buckets[0] < 1 or list(self.buckets) != sorted(set(self.buckets)):
            raise UsageError(f"buckets are {self.buckets}; expected ascending numbers of cache positions")
        if (self.capacity is None) != (self.form == PRIMITIVES):
            raise UsageError(f"capacity is {self.capacity} in the form {self.form}; only primitives go without one")
        if self.capacity is not None and self.capacity < self.buckets[-1]:
            raise UsageError(f"a cache of {self.capacity} positions cannot serve the bucket of {self.buckets[-1]}")
        if any(size < 1 for profile in (self.decode, self.prefill) for size in vars(profile).values()):
            raise UsageError(f"profiles are {self.decode} and {self.prefill}; expected sizes of at least 1")

    @property
    def profiles(self) -> tuple[Ranges, Ranges]:
        """Named dimensions of the profiles 0 (decode) and 1 (prefill)."""
        return self._ranges(self.decode, best_batch=1), self._ranges(self.prefill, best_batch=self.prefill.batch)

    def _ranges(self, profile: Profile, best_batch: int) -> Ranges:
        """Kernels are chosen for one request that decodes or a full chunk of prefill, and half of the context."""
        slots = (self.buckets[0], self.buckets[len(self.buckets) // 2], self.buckets[-1])
        ranges = {
            "batch": (1, best_batch, profile.batch),
            "sequence": (1, profile.sequence, profile.sequence),
            "outputs": (1, 1, profile.outputs),
            "attended": slots,
        }
        return ranges if self.capacity is not None else {**ranges, "capacity": slots}


@dataclass(frozen=True)
class Layer:
    """One layer of a network; ``shape`` and ``dtype`` are its first output's, -1 marks sizes that vary."""

    name: str
    type: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class EngineReport:
    """An engine that was built.

    Attributes:
        size: bytes of the file.
        seconds: from reading the graph to the written file.
        version: of the library.
        layers: of the parsed network that compute on tensors; constants and index arithmetic are left out.
        aliases: outputs that are an input updated in place, as output -> input.
        device_memory: bytes of device memory for activations; None where no GPU could load the engine.
        warnings: what the library warned of, without what is known to be harmless.
        host_memory: bytes that this process held at most while it built, without what is mapped from files (as the
            weights); None where the system does not tell.
    """

    output: Path
    size: int
    seconds: float
    version: str
    layers: tuple[Layer, ...]
    aliases: dict[str, str]
    device_memory: int | None
    warnings: tuple[str, ...]
    host_memory: int | None = None
