"""ONNX Runtime with a CUDA provider that computes on the CPU, in the order of a fake GPU's stream.

It enforces what is documented of the provider: memory on the device, its options, and recordings that are replayed with
the addresses and shapes that they were made with. A recording is run twice when it is made, as ONNX Runtime warms up.
And it refuses what is slow there: products of an attention or an MLP that read the same activation one by one.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from doubles.cuda import FakeDriver, RuleBrokenError

from llmc.runtime.sessions.onnxruntime.cuda_provider import PROVIDER


class FakeOnnxRuntime:
    """The module onnxruntime, with a CUDA provider on a fake GPU.

    Args:
        providers: that this build has.
        version: of the library.
        falls_back: the provider cannot be loaded, which the library only says on the terminal.
        records: the provider can record the graph.

    Attributes:
        failure: raised by the next run, if any.
        settings: of the last session, by name.
        during_recording: called while a run is recorded.
        runs: numbers of the recordings that runs asked for.
        replays: how many runs were replays of a recording.
        preloaded: folders that were searched for CUDA's libraries; None is beside the library itself.
    """

    SessionOptions = ort.SessionOptions
    RunOptions = ort.RunOptions

    def __init__(
        self,
        driver: FakeDriver,
        *,
        providers: tuple[str, ...] = (PROVIDER, "CPUExecutionProvider"),
        version: str = ort.__version__,
        falls_back: bool = False,
        records: bool = True,
    ) -> None:
        self.driver, self.providers, self.__version__ = driver, providers, version
        self.falls_back, self.records = falls_back, records
        self.failure: Exception | None = None
        self.during_recording: Callable[[Any], None] = lambda capture: None
        self.settings: Any = None
        self.preloaded: list[str | None] = []
        self.options: dict[str, str] = {}
        self.runs: list[int] = []
        self.replays = 0

    def check_thread(self) -> None:
        """Refuse CUDA calls of a thread that would spoil what another one records."""
        if not self.driver.is_active():
            raise RuleBrokenError("this thread was not activated")

    def get_available_providers(self) -> list[str]:
        return list(self.providers)

    def preload_dlls(self, directory: str | None = None) -> None:
        self.preloaded.append(directory)
        sys.stdout.write("Failed to load libcublasLt.so.13\n" if self.falls_back else "all is well\n")

    def InferenceSession(
        self, path: str, settings: Any, providers: list[tuple[str, dict[str, str]]], enable_fallback: int
    ) -> "FakeSession":
        [(name, self.options)] = providers
        assert (name, enable_fallback) == (PROVIDER, 0)
        self.settings = settings
        self.check_thread()
        if self.options["enable_cuda_graph"] == "1" and not self.records:
            raise RuntimeError("This session cannot use the graph capture feature as requested by the user as nodes")
        check_packed(onnx.load(path, load_external_data=False).graph)
        return FakeSession(self, ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"]))


def check_packed(graph: onnx.GraphProto) -> None:
    """Refuse products of the same kind, of one module, that share an input: one of all reads weights faster."""
    weights = {tensor.name for tensor in graph.initializer}
    readers = Counter(
        (node.input[0], node.name.rpartition(".")[0], node.op_type, *(a.i for a in node.attribute if a.name == "bits"))
        for node in graph.node
        if "MatMul" in node.op_type and node.input[1] in weights
    )
    shared = [f"{module}: {operator} of {value}" for (value, module, operator, *_), n in readers.items() if n > 1]
    if shared:
        raise RuleBrokenError(f"several products read one activation, {shared[0]}")


class FakeSession:
    """A graph on the fake GPU. A recording is run twice when it is made, as ONNX Runtime warms up before."""

    def __init__(self, runtime: FakeOnnxRuntime, real: Any) -> None:
        self.runtime, self.real = runtime, real
        self.stream = int(runtime.options["user_compute_stream"])
        self.recorded: dict[tuple[int, int], FakeBinding] = {}  # by thread and number

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"] if self.runtime.falls_back else [PROVIDER, "CPUExecutionProvider"]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return []

    def io_binding(self) -> "FakeBinding":
        return FakeBinding(self.runtime.driver, self.real.io_binding())

    def run_with_iobinding(self, binding: "FakeBinding", options: Any) -> None:
        self.runtime.check_thread()
        if self.runtime.failure is not None:
            raise self.runtime.failure
        number = int(options.get_run_config_entry("gpu_graph_id"))
        if self.runtime.driver.records_globally(self.stream):
            raise RuleBrokenError("the stream still records: the run would become a part of that, and not be done")
        self.runtime.runs.append(number)
        times = 1
        if number != -1 and self.runtime.options["enable_cuda_graph"] == "1":
            key = threading.get_ident(), number
            if key in self.recorded:
                self.runtime.replays += 1
            times = 1 if key in self.recorded else 2
            if times == 2:
                self._record()
            binding_then = self.recorded.setdefault(key, binding)
            if binding_then.places != binding.places:
                raise RuleBrokenError(f"recording {number} was made with other addresses or shapes")
            binding = binding_then
        for _ in range(times):
            self.runtime.driver.submit(self.stream, lambda: self._compute(binding))
        if options.get_run_config_entry("disable_synchronize_execution_providers") != "1":
            self.runtime.driver.synchronize(self.stream)

    def _record(self) -> None:
        """Record in global mode; a recording that was spoiled is left open, and the stream with it."""
        capture = self.runtime.driver.begin_global_capture(self.stream)
        self.runtime.during_recording(capture)
        if capture.spoiled:
            raise EngineError("CUDA failure 901: operation failed due to a previous error during capture ; GPU=0")
        self.runtime.driver.drop_capture(self.stream)

    def _compute(self, binding: "FakeBinding") -> None:
        for address, size in binding.places.values():
            self.runtime.driver.check_device(address, size)
        self.real.run_with_iobinding(binding.real)


class FakeBinding:
    def __init__(self, driver: FakeDriver, real: Any) -> None:
        self.driver, self.real = driver, real
        self.places: dict[str, tuple[int, int]] = {}

    def bind_input(self, name: str, device: str, number: int, dtype: Any, shape: Any, address: int) -> None:
        self._bind(self.real.bind_input, name, device, number, dtype, shape, address)

    def bind_output(self, name: str, device: str, number: int, dtype: Any, shape: Any, address: int) -> None:
        self._bind(self.real.bind_output, name, device, number, dtype, shape, address)

    def _bind(self, bind: Callable[..., None], name: str, device: str, number: int, *place: Any) -> None:
        dtype, shape, address = place
        assert (device, number) == ("cuda", self.driver.device.index)
        self.places[name] = address, int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.driver.check_device(*self.places[name])
        bind(name, "cpu", 0, dtype, shape, address)


class EngineError(RuntimeError):
    """An exception as ONNX Runtime has them: their module tells."""

    __module__ = "onnxruntime.capi.onnxruntime_pybind11_state"
