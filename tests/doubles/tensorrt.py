"""TensorRT's runtime without a GPU: graphs run by ONNX Runtime in the memory of :class:`doubles.cuda.FakeDriver`.

It enforces the rules of the real one. What the real one notices is answered as it does, with False or None and a logged
error; what it would not notice, and would compute nonsense from, raises :class:`doubles.cuda.RuleBrokenError`.

``make_plan`` writes what stands for a serialized engine: the graph's path, profiles, aliases.
"""

import ctypes
import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from doubles.cuda import ALIGNMENT, FakeDriver, RuleBrokenError, array_at

from llmc.bundle import Profile

Shape = tuple[int, ...]
TYPES = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int64)": np.dtype(np.int64),
}
# Bytes that each profile's contexts work in.
WORKSPACE = (3000, 5000)
MAGIC = "a plan of the double"
# By what the results of a kernel for any shape differ from those of the kernel for one.
GENERAL = 1 + 2**-20


def make_plan(onnx_path: Path, decode: Profile, prefill: Profile, buckets: tuple[int, ...]) -> bytes:
    """An engine of a decoder.

    Args:
        onnx_path: the lowered graph.
        decode, prefill: the largest calls of both profiles.
        buckets: numbers of positions that attention may look at; the last one is the cache's capacity.
    """
    inputs, outputs = interface(onnx_path)
    profiles = [_ranges(inputs, profile, buckets) for profile in (decode, prefill)]
    presents = [name for name in outputs if name.startswith("present")]
    aliases = {name: name.replace("present", "past_key_values", 1) for name in presents}
    content = {"magic": MAGIC, "onnx": str(onnx_path), "profiles": profiles, "aliases": aliases}
    return json.dumps(content).encode()


def interface(onnx_path: Path) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Names and shapes of a graph's inputs and outputs."""
    session = open_graph(onnx_path)
    return {v.name: v.shape for v in session.get_inputs()}, {v.name: v.shape for v in session.get_outputs()}


def open_graph(path: Path) -> ort.InferenceSession:
    """The graph as it is written, without fusions."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _ranges(inputs: dict[str, list[Any]], most: Profile, buckets: tuple[int, ...]) -> dict[str, list[list[int]]]:
    """Least, best and largest shape of every input."""
    sizes = {
        "input_ids": ([1, 1], [most.batch, most.sequence]),
        "past_lengths": ([1], [most.batch]),
        "logit_indices": ([1, 1], [most.batch, most.outputs]),
        "cache_slots": ([buckets[0]], [buckets[-1]]),
    }
    found = {}
    for name, shape in inputs.items():
        low, high = sizes.get(name) or (
            [1, shape[1], buckets[-1], shape[3]],
            [most.batch, shape[1], buckets[-1], shape[3]],
        )
        found[name] = [low, low, high]
    return found


class Severity(enum.IntEnum):
    """As the library's."""

    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class FakeTensorRT:
    """What stands for the module ``tensorrt``.

    Args:
        driver: in whose memory everything is.
        version: what it says it is.
        compiles: whether it compiles kernels while it runs, as TensorRT-RTX does.

    Attributes:
        compiled: kernels that were compiled, of all engines, and not found among those that were kept.
        capturable: what contexts answer when asked whether they can be recorded; None where they cannot be asked.
        fails_at: number of the run that fails, the first is 1; 0 for none.
        mixes_rows: logits of a batch's rows are all those of its first one.
        contexts: all that were made, of all engines.
        runtimes: all that were made.
    """

    __name__ = "tensorrt"

    class ILogger:
        """The base class of loggers."""

        Severity = Severity

        def log(self, severity: Severity, text: str) -> None:
            """Overridden by whoever listens."""
            raise NotImplementedError

    class ExecutionContextAllocationStrategy(enum.Enum):
        """Who allocates what contexts work in."""

        STATIC = 0
        ON_PROFILE_CHANGE = 1
        USER_MANAGED = 2

    def __init__(self, driver: FakeDriver, version: str = "10.16.1.11", *, compiles: bool = False) -> None:
        self.__version__ = version
        self.compiled: list[str] = []
        if compiles:
            self.DynamicShapesKernelSpecializationStrategy = KernelStrategy
            self.ComputeCapability = ComputeCapability
        self.driver = driver
        self.capturable: bool | None = None
        self.fails_at = 0
        self.mixes_rows = False
        self.runs = 0
        self.contexts: list[Context] = []
        self.runtimes: list[Runtime] = []

    def Runtime(self, logger: Any) -> "Runtime":
        """What loads engines."""
        self.runtimes.append(Runtime(self, logger))
        return self.runtimes[-1]


class Runtime:
    """``IRuntime``."""

    def __init__(self, library: FakeTensorRT, logger: Any) -> None:
        self._library, self._logger = library, logger

    def deserialize_cuda_engine(self, serialized: Any) -> "Engine | None":
        """The engine, or None with a logged error."""
        try:
            content = json.loads(bytes(serialized))
        except ValueError:
            content = {}
        if content.get("magic") != MAGIC:
            reason = "the magic tag does not match"
            self._logger.log(Severity.ERROR, f"IRuntime::deserializeCudaEngine: Error Code 1: {reason}")
            return None
        return Engine(self._library, self._logger, content)


class Engine:
    """``ICudaEngine``."""

    def __init__(self, library: FakeTensorRT, logger: Any, content: dict[str, Any]) -> None:
        self.library, self.logger = library, logger
        self.path = Path(content["onnx"])
        self.graph = open_graph(self.path)
        self.profiles = content["profiles"]
        self.aliases: dict[str, str] = content["aliases"]
        self.inputs = {value.name: value for value in self.graph.get_inputs()}
        self.outputs = {value.name: value for value in self.graph.get_outputs()}
        self.num_optimization_profiles = len(self.profiles)
        self.device_memory_size_v2 = max(WORKSPACE[: len(self.profiles)])
        self.get_aliased_input_tensor = self.aliases.get
        if hasattr(library, "DynamicShapesKernelSpecializationStrategy"):
            self.create_runtime_config = lambda: RuntimeConfig(library)

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return WORKSPACE[profile]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[Shape]:
        return [tuple(shape) for shape in self.profiles[profile][name]]

    def create_execution_context(self, settings: Any) -> "Context":
        context = Context(self, settings)
        self.library.contexts.append(context)
        return context


class KernelStrategy(enum.Enum):
    """When kernels for a new shape are compiled: LAZY runs a general one first, which rounds otherwise."""

    LAZY = 0
    EAGER = 1
    NONE = 2


class ComputeCapability(enum.Enum):
    """The GPUs that the library lists."""

    NONE = 0
    CURRENT = 1
    SM75 = 75
    SM80 = 80
    SM86 = 86
    SM89 = 89
    SM120 = 120
    SM121 = 121


class RuntimeCache:
    """``IRuntimeCache``: names of kernels."""

    def __init__(self, version: str) -> None:
        self._version = version
        self.kernels: set[str] = set()

    def deserialize(self, blob: bytes) -> bool:
        try:
            content = json.loads(blob)
        except ValueError:
            content = {}
        if content.get("version") != self._version:
            return False
        self.kernels = set(content["kernels"])
        return True

    def serialize(self) -> bytearray:
        return bytearray(json.dumps({"version": self._version, "kernels": sorted(self.kernels)}).encode())


class RuntimeConfig:
    """``IRuntimeConfig`` of TensorRT-RTX."""

    def __init__(self, library: FakeTensorRT) -> None:
        self._library = library
        self.strategy = FakeTensorRT.ExecutionContextAllocationStrategy.STATIC
        self.dynamic_shapes_kernel_specialization_strategy = KernelStrategy.LAZY
        self.cache: RuntimeCache | None = None

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache(self._library.__version__)

    def set_runtime_cache(self, kept: RuntimeCache) -> bool:
        self.cache = kept
        return True

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy


class Context:
    """``IExecutionContext``.

    Attributes:
        history: shapes of the inputs of every run, recorded or not.
        config: TensorRT-RTX's settings, if it was made with them.
    """

    def __init__(self, engine: Engine, settings: Any) -> None:
        self.config = settings if isinstance(settings, RuntimeConfig) else None
        strategy = self.config.strategy if self.config else settings
        self._engine, self._library, self._driver = engine, engine.library, engine.library.driver
        self._user_managed = strategy is FakeTensorRT.ExecutionContextAllocationStrategy.USER_MANAGED
        self._profile: int | None = None
        self._memory = (0, 0)
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._warm = False
        self.history: list[dict[str, Shape]] = []
        if self._library.capturable is not None:
            self.is_stream_capturable = lambda stream: self._library.capturable

    @property
    def memory(self) -> int:
        """Where it works."""
        return self._memory[0]

    def _refuse(self, reason: str) -> bool:
        self._engine.logger.log(Severity.ERROR, f"IExecutionContext: Error Code 3: API Usage Error ({reason})")
        return False

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        if not 0 <= profile < self._engine.num_optimization_profiles:
            return self._refuse(f"there is no profile {profile}")
        self._profile, self._shapes, self._warm = profile, {}, False
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        if not self._user_managed:
            raise RuleBrokenError("the context has memory of its own")
        if address % ALIGNMENT:
            raise RuleBrokenError("device memory is not aligned")
        self._memory = (address, size)

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        if self._profile is None:
            return self._refuse("no optimization profile is set")
        if name not in self._engine.inputs:
            return self._refuse(f"there is no input {name}")
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        inside = len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))
        if not inside:
            return self._refuse(f"{name} {list(shape)} is outside of {list(low)} ... {list(high)}")
        self._warm &= self._shapes.get(name) == tuple(shape)
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in {**self._engine.inputs, **self._engine.outputs}:
            return self._refuse(f"there is no tensor {name}")
        if address % ALIGNMENT:
            raise RuleBrokenError(f"{name} is not aligned")
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        """Queue the graph with the shapes and addresses of now; later changes do not reach it."""
        reason = self._obstacle(stream)
        self._library.runs += 1
        if self._library.runs == self._library.fails_at:
            reason = "Cuda Runtime (invalid argument)"
        if reason:
            return self._refuse(reason)
        self._check_memory()
        rounds = self._compile()
        work = self._work(dict(self._shapes), dict(self._addresses), self._memory, rounds)
        self._driver.submit(stream, self._as_set(work) if self._driver.is_capturing(stream) else work)
        self._warm = True
        self.history.append(dict(self._shapes))
        return True

    def _as_set(self, work: Callable[[], None]) -> Callable[[], None]:
        """Recorded work, which needs the context to be set for it whenever it is launched."""
        shapes, addresses = dict(self._shapes), dict(self._addresses)

        def replayed() -> None:
            if (self._shapes, self._addresses) != (shapes, addresses):
                raise RuleBrokenError("a recording is launched while its context is set for another call")
            work()

        return replayed

    def _compile(self) -> float:
        """Compile a kernel for these shapes, if the library compiles any and has not yet; by what this run's results
        are multiplied, for the general kernel rounds otherwise."""
        if self.config is None or self.config.cache is None:
            return 1.0
        name, strategy = str(sorted(self._shapes.items())), self.config.dynamic_shapes_kernel_specialization_strategy
        known = name in self.config.cache.kernels
        if not known and strategy is not KernelStrategy.NONE:
            self.config.cache.kernels.add(name)
            self._library.compiled.append(name)
        eager = strategy is KernelStrategy.EAGER
        return 1.0 if eager or (known and strategy is KernelStrategy.LAZY) else GENERAL

    def _obstacle(self, stream: int) -> str:
        engine = self._engine
        for name in engine.inputs:
            if name not in self._shapes:
                return f"the shape of {name} is not set"
        for name in (*engine.inputs, *engine.outputs):
            if not self._addresses.get(name):
                return f"the address of {name} is not set"
        for present, past in engine.aliases.items():
            if self._addresses[present] != self._addresses[past]:
                return f"{present} must have the address of {past}"
        if self._driver.is_capturing(stream) and (not self._warm or self._library.capturable is False):
            return "resources would be allocated while the stream is captured"
        return ""

    def _check_memory(self) -> None:
        """What the real one does not notice."""
        if not self._driver.is_active():
            raise RuleBrokenError("the GPU is not current on this thread")
        address, size = self._memory
        if self._user_managed and size < WORKSPACE[self._profile or 0]:
            raise RuleBrokenError(f"{size} bytes to work in are too few, {WORKSPACE[self._profile or 0]} are needed")
        if self._user_managed:
            self._driver.check_device(address, size)

    def _work(
        self, shapes: dict[str, Shape], addresses: dict[str, int], memory: tuple[int, int], factor: float
    ) -> Callable[[], None]:
        engine, driver = self._engine, self._driver

        def work() -> None:
            if memory[1]:
                driver.check_device(*memory)
                ctypes.memset(memory[0], 0x5A, memory[1])  # it is shared: nothing may rely on what was there
            given = {}
            for name, value in engine.inputs.items():
                given[name] = self._at(addresses[name], shapes[name], value.type)
            io = engine.graph.io_binding()
            for name, array in given.items():
                io.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            for name in engine.outputs:
                if name in engine.aliases:
                    array = given[engine.aliases[name]]
                    io.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
                else:
                    io.bind_output(name, "cpu")
            engine.graph.run_with_iobinding(io)
            for name, found in zip(engine.outputs, io.get_outputs(), strict=True):
                if name not in engine.aliases:
                    values = found.numpy()
                    if engine.library.mixes_rows and name == "logits":
                        values = np.broadcast_to(values[:1], values.shape)
                    values = values * np.asarray(factor, values.dtype) if factor != 1.0 else values
                    self._at(addresses[name], values.shape, engine.outputs[name].type)[:] = values

        return work

    def _at(self, address: int, shape: Shape, kind: str) -> np.ndarray:
        dtype = TYPES[kind]
        self._driver.check_device(address, int(np.prod(shape)) * dtype.itemsize)
        return array_at(address, tuple(shape), dtype)
