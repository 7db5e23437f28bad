"""Shared parts of all items: paths, results, and doubles for a dry run."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORK = Path(os.environ.get("GPU_KIT_WORK", "."))
PARTS = Path(os.environ.get("GPU_KIT_PARTS", "."))
TARGET = os.environ.get("GPU_KIT_TARGET", "cuda")
FAKE = os.environ.get("GPU_KIT_FAKE") == "1"
# Relative distance from the CPU's logits beyond which there is an error, not only rounding: see :func:`distance`. On a
# CPU float16 differs from float32 by 0.001; logits of the previous position differ by more than 1.
LIMIT = 0.02
problems: list[str] = []


def report(**values: Any) -> None:
    """Print results at once, so that an item that hangs later has reported them."""
    print(json.dumps(values, default=str), flush=True)


def expect(condition: bool, problem: str) -> None:
    """Report a problem if the condition is false, and go on."""
    if not condition:
        problems.append(problem)


def main(functions: Mapping[str, Callable[..., None]]) -> None:
    """Run the function that the command line names, with the rest as its arguments."""
    name, *arguments = sys.argv[1:]
    functions[name](*arguments)
    report(problems=problems)


def distance(logits: NDArray[Any], wanted: NDArray[Any]) -> float:
    """The largest relative difference of any position; NaN if a value is not finite.

    It is the root mean square of the differences, divided by the standard deviation of the wanted logits. Both are
    centred first, because a constant added to all logits changes nothing.
    """
    x, y = (
        np.asarray(a, np.float64) - np.asarray(a, np.float64).mean(axis=-1, keepdims=True) for a in (logits, wanted)
    )
    return float(np.sqrt(((x - y) ** 2).mean(axis=-1) / (y**2).mean(axis=-1)).max())


def timed(work: Callable[[], Any], count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def middle(times: Sequence[float]) -> float:
    return round(median(times), 4)


def use_doubles() -> None:
    """Replace the driver and ONNX Runtime's provider by the tests' doubles; kernels are the CPU's."""
    import llmc

    sys.path.append(str(Path(llmc.__file__).parent / "tests"))
    from doubles.cuda import SERVER, FakeDriver
    from doubles.onnxruntime_cuda import FakeOnnxRuntime

    from llmc.runtime.host import cuda as host
    from llmc.runtime.sessions.onnxruntime import cuda

    made: list[Any] = []

    def library(*_: str) -> Any:
        made.append(FakeDriver(SERVER))
        return FakeOnnxRuntime(made[-1])

    for module in (host, cuda):
        module.open_driver = lambda index=0: made.pop() if made else FakeDriver(SERVER)  # type: ignore[attr-defined]
    cuda.require = library  # type: ignore[attr-defined]
