"""Contents of engines: kernels of ONNX Runtime by operator, and what TensorRT-RTX refuses."""

import contextlib
import gc
import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from gpu_check import models
from gpu_check.measure import seconds_of, spread, without_graphs
from gpu_check.steps import Options
from llmc.bundle import read_bundle
from llmc.errors import LlmcError, MissingExtraError
from llmc.runtime.host import cuda as driver
from llmc.runtime.sessions import Batch, Phase
from llmc.runtime.sessions.onnxruntime import cuda, cuda_provider
from llmc.runtime.sessions.tensorrt import engine, library

POSITION, STEPS = 2000, 16


def kernels(target: str, geometry: str, precision: str, options: Options) -> dict[str, Any]:
    """A decode step on ONNX Runtime with its attention kernels for decode (XQA) and without: seconds, and microseconds
    by operator, of the host and, where the package was built with CUPTI, of each kernel."""
    models.check_here(target)
    folder, runtime = models.built(target, geometry, precision, options), cuda_provider.import_onnxruntime_gpu()
    found: dict[str, Any] = {}
    for name, value in {"xqa": "1", "without_xqa": "0"}.items():
        os.environ["ORT_ENABLE_XQA"] = value  # read when a session is made
        with tempfile.TemporaryDirectory() as traces:
            with without_graphs():  # what is replayed leaves no trace
                stepped(folder, Traced(runtime, f"{traces}/step"))
            gc.collect()
            events = [event for path in Path(traces).iterdir() for event in json.loads(path.read_text())]
        found[name] = {"step": stepped(folder, runtime), "operators": by_operator(events, STEPS + 1)}
    return found


class Traced:
    """ONNX Runtime, whose sessions write what they ran into files, and their warnings to the terminal."""

    def __init__(self, runtime: Any, prefix: str) -> None:
        self._runtime, self._prefix = runtime, prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def InferenceSession(self, path: str, settings: Any, **options: Any) -> Any:  # noqa: N802
        """A session as the library makes it."""
        settings.enable_profiling, settings.profile_file_prefix, settings.log_severity_level = True, self._prefix, 2
        return self._runtime.InferenceSession(path, settings, **options)


def stepped(folder: Path, runtime: Any) -> dict[str, float]:
    """Seconds of steps of one row after a long prompt."""
    manifest = read_bundle(folder)
    past = min(POSITION, manifest.limits.max_context - 1)
    zero = np.zeros((1, 1), np.int64)
    call = Batch(Phase.DECODE, zero + 10, np.array([past], np.int64), zero, 0)
    with contextlib.closing(cuda.CudaSession(folder, manifest, 1, runtime=runtime)) as session:
        session.cache.reserve(1, past + 1)
        session.run(call)
        return spread([seconds_of(lambda: session.run(call)) for _ in range(STEPS)])


def by_operator(events: Iterable[dict[str, Any]], count: int) -> dict[str, dict[str, Any]]:
    """Microseconds per step of each operator, the slowest first: of the host, and of the GPU by kernel."""
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {"host_us": 0.0, "gpu_us": Counter()})
    for event in events:
        operator = event.get("args", {}).get("op_name", "")
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            found[operator]["host_us"] += event["dur"] / count
        elif event.get("cat") == "Kernel":
            found[operator]["gpu_us"][event["name"]] += event["dur"] / count
    return dict(sorted(found.items(), key=lambda item: -max(item[1]["host_us"], sum(item[1]["gpu_us"].values()))))


def refusal(target: str, geometry: str, precision: str, options: Options) -> dict[str, Any]:
    """The answer of TensorRT-RTX on this GPU: a few tokens, or its refusal. The library is asked even where it does not
    list the GPU, which sessions refuse before: what it says itself is what nobody knows."""
    models.check_here(target)
    with contextlib.closing(driver.open_driver()) as gpu:
        listed = library.lists_gpu(library.load_library(target), gpu.device.compute_capability)
    try:
        with (
            patch.object(engine, "lists_gpu", lambda *_: True),
            models.opened(target, geometry, precision, options) as model,
        ):
            answer = model.generate([10, 11, 12], max_tokens=8, temperature=0, ignore_eos=True)
            return {"listed": listed, "accepted": True, "said": str(list(answer.token_ids))}
    except MissingExtraError:
        raise
    except LlmcError as error:
        return {"listed": listed, "accepted": False, "said": f"{type(error).__name__}: {error}"}
