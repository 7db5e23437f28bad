"""ONNX Runtime's CUDA provider: found, opened without falling back to the CPU, bound by address, its errors ours.

What is said here of its behaviour was read in its documentation and source (1.28 to 1.31), and seen of 1.31.1 on a stub
of CUDA. Never run on a GPU.
"""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # must be set before the library is imported

import contextlib
import glob
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from llmc.bundle import version
from llmc.errors import BundleError, GpuError, LlmcError, MissingExtraError, ResourceError, install_command
from llmc.runtime.host.cuda import EMULATE, Driver
from llmc.runtime.kv.cache import CacheTensor
from llmc.runtime.sessions.base import Batch
from llmc.runtime.sessions.cuda.blocks import Block, Outputs, Part, fill_inputs, size_of
from llmc.runtime.sessions.onnxruntime.cpu import translate_errors as translated_for_cpus
from llmc.runtime.sessions.onnxruntime.library import LOG_FATAL_ONLY

log = logging.getLogger(__name__)

PROVIDER = "CUDAExecutionProvider"
NOT_RECORDED = -1  # the number of a recording that is none
MOST_FAILURES = 3  # recordings of a call that may fail before it is run without
# What ONNX Runtime may compute on the host: shapes, which it has there.
HOST_OPERATORS = frozenset({"Shape", "Cast", "Squeeze", "Range", "Expand"})
# Flash attention, memory-efficient attention and plain products (bits of ONNX Runtime's AttentionBackend), beside its
# own kernel for steps. Left to itself it takes cuDNN's from compute capability 9.0 on, which makes a plan, in 55 to 400
# ms, for every length of a call and every growth of the cache (onnxruntime issue 32383).
ATTENTION_KERNELS = 1 | 2 | 16
FAST_KERNELS = "ep.cuda.fpa_intb_gemm"
# Entries of every session. ONNX Runtime's fast kernels for 4- and 8-bit weights are off unless they are asked for.
# Those of the published wheel take float16 activations, blocks of 32 with scales alone, no bias, inputs in multiples of
# 32 and outputs in multiples of 64 (8 bits: 32), from compute capability 7.5 on. Other products fall back without a
# word: those of a prompt expand their weights to float16 first. While a session loads, kernels are chosen by time, so
# two loads need not choose the same.
SESSION_ENTRIES = {
    FAST_KERNELS: "1",
    # A bias that is fused into a product keeps these kernels from it.
    "optimization.disable_specified_optimizers": "MatMulNBitsFusion",
    "session.use_device_allocator_for_initializers": "1",
    "session.record_ep_graph_assignment_info": "1",
}
# How ONNX Runtime words what CUDA and cuBLAS return, and memory that its arena does not get.
FAILURE = re.compile(r"CUDA failure|CUBLAS failure|CUDA error|CUDNN failure|Failed to allocate memory", re.IGNORECASE)
NO_MEMORY = ("Failed to allocate memory", "out of memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")


def _reinstall() -> str:
    return (
        f"pip uninstall onnxruntime onnxruntime-gpu, then {install_command('gpu')} (the two packages overwrite each "
        "other; a Jetson has no wheel: build for the target tensorrt or cpu)"
    )


def check_provider(runtime: Any, minimum: str) -> None:
    """Refuse a library without the CUDA provider (MissingExtraError), and one older than ``minimum`` (BundleError)."""
    if PROVIDER not in runtime.get_available_providers():
        raise MissingExtraError(
            f"onnxruntime {runtime.__version__} is the package for CPUs, it has no {PROVIDER}; {_reinstall()}; "
            f"{EMULATE}"
        )
    if version(runtime.__version__) < version(minimum):
        raise BundleError(
            f"onnxruntime-gpu {runtime.__version__} is too old, {minimum} or newer is needed: "
            "pip install -U onnxruntime-gpu"
        )


# ------------------------------------------------------------------------------------------------- opening


@dataclass(frozen=True)
class Graph:
    """An opened graph; ``records`` tells whether its runs may be recorded as CUDA graphs."""

    runtime: Any
    session: Any
    device: int
    records: bool


def open_graph(runtime: Any, file: Path, device: int, stream: int, compute: str) -> Graph:
    """Open a graph on a stream of a GPU; BundleError if it is refused, GpuError if it would run on the CPU."""
    said = " ".join(preload_library(runtime).split())[:300]
    options = _provider_options(device, stream, compute)
    # In float32 attention is made of many operators, among them some whose sizes the host hands over.
    recording = [True, False] if compute == "float16" else [False]
    for records in recording:
        try:
            session = _open_session(runtime, file, {**options, "enable_cuda_graph": str(int(records))})
        except Exception as error:
            if not records or "graph capture" not in str(error):
                raise
            log.warning("ONNX Runtime cannot record %s as a CUDA graph (%s)", file.name, _line(error))
            continue
        check_placement(file, session, said)
        return Graph(runtime, session, device, records)
    raise AssertionError("the last attempt returns or raises")


def preload_library(library: Any) -> str:
    """Load CUDA's libraries as pip installs them, and say what ONNX Runtime says of it.

    It looks for them beside itself only, and not where torch, say, has brought them into another folder of packages;
    what is loaded already it takes.
    """
    load = getattr(library, "preload_dlls", None)
    if load is None:
        return ""
    folders = (sorted(glob.glob(f"{glob.escape(path)}/nvidia/*/lib")) for path in dict.fromkeys(sys.path))
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()):  # of one folder it complains of what others have
        for folder in chain.from_iterable(folders):
            load(directory=folder)
    with contextlib.redirect_stdout(said):
        load()
    return said.getvalue()


def _provider_options(device: int, stream: int, compute: str) -> dict[str, str]:
    return {
        # The library prints a warning where the number is given.
        **({"device_id": str(device)} if device else {}),
        "user_compute_stream": str(stream),
        "sdpa_kernel": str(ATTENTION_KERNELS),
        # The arena grows by what is asked for, and not to the next power of two: memory is planned, and taken by the
        # first call (CudaSession._take_memory).
        "arena_extend_strategy": "kSameAsRequested",
        # The norms' sums in float32; in float16 the squares of large activations overflow.
        "enable_skip_layer_norm_strict_mode": "1",
        # TF32 has 10 bits of mantissa; who asks for float32 wants 23.
        "use_tf32": str(int(compute != "float32")),
    }


def _open_session(runtime: Any, file: Path, options: dict[str, str]) -> Any:
    settings = runtime.SessionOptions()
    settings.log_severity_level = LOG_FATAL_ONLY
    settings.intra_op_num_threads = 1  # the host computes shapes
    settings.enable_mem_pattern = False  # it doubles the arena: shapes that come again get one piece for everything
    for name, value in SESSION_ENTRIES.items():
        settings.add_session_config_entry(name, value)
    # Without that argument a provider that fails is replaced by the CPU, with a print.
    return runtime.InferenceSession(str(file), settings, providers=[(PROVIDER, options)], enable_fallback=0)


def check_placement(file: Path, session: Any, said: str) -> None:
    """Refuse a session that runs on the CPU, and warn of operators that do."""
    if PROVIDER not in session.get_providers():
        reason = said or "its own messages, above, say why"
        raise GpuError(
            f"{file}: ONNX Runtime could not load its CUDA provider ({reason})",
            "install the CUDA libraries that it was built for, for example with pip install "
            "'onnxruntime-gpu[cuda,cudnn]', and see llmc doctor",
        )
    parts = session.get_provider_graph_assignment_info()
    astray = {node.op_type for part in parts if part.ep_name != PROVIDER for node in part.get_nodes()} - HOST_OPERATORS
    if astray:
        log.warning("%s: ONNX Runtime computes %s on the CPU, which is slow", file, ", ".join(sorted(astray)))


# ------------------------------------------------------------------------------------------------- running

# The cache's tensors, their addresses and shapes; and the type of them all.
Caches = tuple[Sequence[tuple[CacheTensor, int, tuple[int, ...]]], np.dtype[Any]]


class Binding:
    """A call of ``graph`` bound to its memory: inputs and outputs at ``places`` in ``blocks``, the cache in place.

    ``recorder`` hands out the number of a new recording; None where the call is not worth one. ONNX Runtime (1.31.1)
    keeps recordings until its session is closed.
    """

    def __init__(
        self,
        graph: Graph,
        blocks: tuple[Block, Block],
        places: tuple[Mapping[str, Part], Mapping[str, Part]],
        caches: Caches,
        recorder: Callable[[], int] | None,
    ) -> None:
        self._graph = graph
        self._block, self._size = blocks[0], size_of(places[0])
        self._inputs = {name: blocks[0].array(part) for name, part in places[0].items()}
        self.outputs = Outputs(blocks[1], places[1])
        self._recorder = recorder if graph.records else None
        self._number = NOT_RECORDED
        self._failures = 0
        self._ran = False
        self._io = graph.session.io_binding()
        for bind, block, parts in zip((self._io.bind_input, self._io.bind_output), blocks, places, strict=True):
            for name, part in parts.items():
                bind(name, "cuda", graph.device, part.dtype, part.shape, block.device + part.offset)
        tensors, dtype = caches
        for tensor, address, shape in tensors:
            self._io.bind_input(tensor.past, "cuda", graph.device, dtype, shape, address)
            self._io.bind_output(tensor.present, "cuda", graph.device, dtype, shape, address)

    def fill(self, batch: Batch) -> None:
        fill_inputs(self._inputs, batch)

    def run(self, driver: Driver, stream: int) -> None:
        """Queue the call and the copies around it; candidates are there once the stream is synchronized."""
        self._block.upload(self._size, stream)
        # Its first run takes memory, which no recording can.
        if not (self._ran and self._recorder is not None and self._run_recorded(self._recorder, driver, stream)):
            self._run(NOT_RECORDED)
            self._ran = True
        self.outputs.download(stream)

    def _run_recorded(self, recorder: Callable[[], int], driver: Driver, stream: int) -> bool:
        """Replay the recording, or make it; False if the call is still to be run.

        A recording that fails says nothing of the call, which writes the same if it is run again.
        """
        number = recorder() if self._number == NOT_RECORDED else self._number
        if number == NOT_RECORDED:
            self._recorder = None
            return False
        try:
            self._run(number)
        except Exception as error:  # noqa: BLE001  # the call is run once more, and raises if that fails, too
            log.warning("a call is run without its CUDA graph, which failed (%s)", _line(error))
            driver.drop_capture(stream)
            self._number, self._failures = NOT_RECORDED, self._failures + 1
            self._recorder = recorder if self._failures < MOST_FAILURES else None
            return False
        self._number = number
        return True

    def _run(self, number: int) -> None:
        """Run the graph; a recording is made by ONNX Runtime in several runs, of which most never return."""
        options = self._graph.runtime.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(number))
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._graph.session.run_with_iobinding(self._io, options)


@contextlib.contextmanager
def translate_errors(doing: str, path: Path | None = None) -> Iterator[None]:
    """Turn what ONNX Runtime raises into ResourceError, GpuError or BundleError."""
    with translated_for_cpus(doing, path):
        try:
            yield
        except LlmcError:
            raise
        except Exception as error:
            text, line = str(error), _line(error)
            if any(words in text for words in NO_MEMORY):
                raise ResourceError(
                    f"{doing} ran out of GPU memory ({line})",
                    "use fewer rows, a smaller context or a smaller model",
                    path=path,
                ) from error
            if FAILURE.search(text) is None:
                raise
            raise GpuError(f"{doing} failed on the GPU ({line})", "see llmc doctor", path=path) from error


def _line(error: Exception) -> str:
    """An error in one line, from what CUDA said on, which a long signature may precede."""
    text = " ".join(str(error).split())
    said = FAILURE.search(text)
    return text[said.start() if said else 0 :][:300]
