"""Measure where the time of one call goes: products, head, attention, norms, the rest, by rows and context.

Each graph of the bundle runs steps of one token per row. A call's time is the median of plain runs; a second session,
with ONNX Runtime's profiler, says how its nodes share it, and what is left is between nodes. Beside them stand the bytes
that a call reads and the operations that it does, over the machine's own limits, measured in the same run.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime
from engine_measures import FIRST_TOKEN, LAST_TOKEN, Found, run
from onnx import TensorProto, helper

from llmc.bundle import Manifest, read_bundle
from llmc.runtime.sessions import Batch, Phase, Session
from llmc.runtime.sessions.onnxruntime import compiled
from llmc.runtime.sessions.onnxruntime.cpu import OnnxRuntimeSession

PRODUCTS = ("MatMulNBits", "MatMulIntegerToFloat", "FusedMatMul", "MatMul", "Gemm")
PARTS = ("body", "head", "attention", "norms", "rest", "between nodes")
ROWS, CONTEXTS = (1, 2, 4, 8, 16), (128, 2048, 8192)
CALLS = 3  # timed calls of a shape in a round, after one that is not
READ_BYTES = 1 << 30  # far more than any cache
CHAIN = 400  # nodes with next to nothing to do
WIDE = 1 << 16  # values of a node that two threads share
PEAK_SHAPE = 512, 2048, 8192  # rows, inputs and outputs of a product that is bound by arithmetic

Shape = tuple[Phase, int, int]  # graph, rows, valid positions of each


def steps(session: Session, shape: Shape) -> float:
    """Seconds of a call: one token for each row after so many positions; the median of a few."""
    phase, rows, context = shape
    ids = np.random.default_rng(rows).integers(FIRST_TOKEN, LAST_TOKEN, (rows, 1))
    call = Batch(phase, ids, np.full(rows, context, np.int64), np.zeros((rows, 1), np.int64))
    seconds = []
    for _ in range(CALLS + 1):
        started = time.perf_counter()
        session.run(call)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def opened(args: argparse.Namespace, manifest: Manifest) -> OnnxRuntimeSession:
    """The bundle's graphs, with a cache for the largest shape whose pages are all there."""
    session = OnnxRuntimeSession(args.bundle, manifest, args.threads)
    session.cache.grow(max(args.row_counts), max(args.contexts) + 1, manifest.limits.max_context)
    for array in session.cache.arrays:  # zeros that were never written all lie in one page
        array[:] = 0.01 if array.dtype == np.float32 else 1
    return session


@contextmanager
def profiled(folder: Path) -> Iterator[None]:
    """Sessions opened meanwhile write ONNX Runtime's profile into ``folder`` when they are closed."""
    numbers, plain = count(), compiled.session_options

    def options(runtime: Any, threads: int) -> Any:
        made = plain(runtime, threads)
        made.enable_profiling, made.profile_file_prefix = True, str(folder / f"{next(numbers)}")
        return made

    with mock.patch.object(compiled, "session_options", options):
        yield


def node_times(folder: Path, vocab_size: int) -> list[Counter[str]]:
    """Microseconds of each part, and the number of nodes, by call, in the order in which they were made."""
    found: list[Counter[str]] = []
    for path in folder.iterdir():
        events = sorted(json.loads(path.read_text()), key=lambda event: event["ts"])
        nodes = [event for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time")]
        for run_ in (event for event in events if event["name"] == "model_run"):
            own = [node for node in nodes if 0 <= node["ts"] - run_["ts"] <= run_["dur"]]
            parts: Counter[str] = Counter(nodes=len(own))
            for node in own:
                parts[part_of(node["args"], vocab_size)] += node["dur"]
            found.append(parts)
    return found


def part_of(node: dict[str, Any], vocab_size: int) -> str:
    """The part of a call that a node belongs to."""
    operator = node["op_name"]
    if operator in PRODUCTS:
        widths = [shape[-1] for output in node["output_type_shape"] for shape in output.values()]
        return "head" if vocab_size in widths else "body"
    if operator in ("GroupQueryAttention", "RotaryEmbedding"):
        return "attention"
    return "norms" if operator.endswith("LayerNormalization") else "rest"


def profile(args: argparse.Namespace, manifest: Manifest, shapes: Sequence[Shape]) -> dict[Shape, Counter[str]]:
    """The median call's microseconds by part, from ONNX Runtime's profiler."""
    found: defaultdict[Shape, list[Counter[str]]] = defaultdict(list)
    for phase in Phase:
        own = [shape for shape in shapes if shape[0] is phase]
        with tempfile.TemporaryDirectory() as name:
            with profiled(Path(name)):
                session = opened(args, manifest)
            for _, shape in product(range(args.rounds), own):
                steps(session, shape)
            session.close()
            del session
            calls = iter(node_times(Path(name), manifest.geometry.vocab_size))
            for _, shape in product(range(args.rounds), own):
                found[shape] += [next(calls) for _ in range(CALLS + 1)][1:]
    keys = ("nodes", *PARTS[:-1])
    return {
        shape: Counter({key: statistics.median(c[key] for c in calls) for key in keys})
        for shape, calls in found.items()
    }


# ------------------------------------------------------------------------------------------ the machine's limits


def read_bandwidth(threads: int) -> float:
    """Bytes per second that all threads read together from memory, at best."""
    data = np.ones(READ_BYTES // 4, np.float32)
    parts = np.array_split(data, threads)
    with ThreadPoolExecutor(threads) as pool:
        return READ_BYTES / best(lambda: list(pool.map(np.max, parts)))


def peak(threads: int, integer: bool) -> float:
    """Operations per second of ONNX Runtime's product of integers, or of float32, at best."""
    rows, inputs, outputs = PEAK_SHAPE
    rng = np.random.default_rng(0)
    if integer:
        weight = rng.integers(-127, 128, (inputs, outputs), np.int8)
        constants = {"b": weight, "one": np.float32(1), "c": np.ones(outputs, np.float32), "z": np.uint8(128)}
        node = helper.make_node("MatMulIntegerToFloat", ["x", "b", "one", "c", "z"], ["y"], domain="com.microsoft")
        session = micro([node], constants, TensorProto.UINT8, threads)
        x = rng.integers(0, 256, (rows, inputs), np.uint8)
    else:
        session = micro(
            [helper.make_node("MatMul", ["x", "b"], ["y"])],
            {"b": rng.standard_normal((inputs, outputs), np.float32)},
            TensorProto.FLOAT,
            threads,
        )
        x = rng.standard_normal((rows, inputs), np.float32)
    return 2.0 * rows * inputs * outputs / best(lambda: session.run(None, {"x": x}))


def node_seconds(threads: int, values: int) -> float:
    """Seconds that a node costs which multiplies so many values by one."""
    nodes = [helper.make_node("Mul", [f"v{i}" if i else "x", "one"], [f"v{i + 1}"]) for i in range(CHAIN)]
    nodes[-1].output[0] = "y"
    session = micro(nodes, {"one": np.float32(1)}, TensorProto.FLOAT, threads, optimise=False)
    x = np.ones((1, values), np.float32)
    return best(lambda: session.run(None, {"x": x})) / CHAIN


def micro(nodes: list[Any], constants: dict[str, Any], kind: int, threads: int, optimise: bool = True) -> Any:
    """A session of a graph from ``x`` to ``y``, with the options of llmc's own."""
    inputs = [helper.make_tensor_value_info("x", kind, [None, None])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])]
    tensors = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph(nodes, "micro", inputs, outputs, tensors), opset_imports=opsets, ir_version=10
    )
    options, levels = compiled.session_options(onnxruntime, threads), onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    return compiled.inference_session(onnxruntime, model.SerializeToString(), options)


def best(work: Callable[[], object], times: int = 7) -> float:
    """Seconds of the fastest of a few, after one that is not counted."""
    work()
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


# ------------------------------------------------------------------------------------------ what a call does


def bytes_read(manifest: Manifest, shape: Shape) -> int:
    """Bytes of weights and of valid keys and values that a call must read."""
    phase, rows, context = shape
    return manifest.graphs[phase.value].step_weight_bytes + rows * (context + 1) * manifest.memory.cache_per_token


def operations(manifest: Manifest, shape: Shape) -> tuple[int, int]:
    """Multiplications and additions of a call: of its products with weights, and of attention."""
    _, rows, context = shape
    geometry = manifest.geometry
    weights = sum(linear.inputs * linear.outputs for linear in geometry.linears)
    heads = sum(attention.heads * attention.head_dim for attention in geometry.attentions)
    return 2 * rows * weights, 4 * rows * (context + 1) * heads


def measure(args: argparse.Namespace) -> Found:
    """Calls, their parts, and the machine."""
    manifest = read_bundle(args.bundle)
    limits = replace(manifest.limits, max_batch=max(manifest.limits.max_batch, *ROWS))
    manifest = replace(manifest, limits=limits)  # a cache of more rows is no question of the graphs
    args.row_counts = [int(item) for item in args.row_counts or ROWS]
    args.contexts = [int(item) for item in args.contexts or CONTEXTS]
    shapes = list(product(Phase, args.row_counts, args.contexts))
    machine = {
        "read_bytes_per_s": read_bandwidth(args.threads),
        "integer_operations_per_s": peak(args.threads, integer=True),
        "float32_operations_per_s": peak(args.threads, integer=False),
        "node_s": node_seconds(args.threads, 1),
        "shared_node_s": node_seconds(args.threads, WIDE),
    }
    session = opened(args, manifest)
    seconds: defaultdict[Shape, list[float]] = defaultdict(list)
    for _, shape in product(range(args.rounds), shapes):
        seconds[shape].append(steps(session, shape))
    session.close()
    del session
    parts = profile(args, manifest, shapes)
    rows, details = [], []
    for shape in shapes:
        phase, count_, context = shape
        took, own = statistics.median(seconds[shape]), parts[shape]
        own["between nodes"] = max(0.0, took * 1e6 - sum(own[part] for part in PARTS[:-1]))
        read, (products, attended) = bytes_read(manifest, shape), operations(manifest, shape)
        shares = read / machine["read_bytes_per_s"] / took, products / machine["integer_operations_per_s"] / took
        rows.append(
            (
                *(phase.value, f"{count_}", f"{context}", f"{took * 1e3:.1f}"),
                *(f"{own[part] / 1e3:.1f}" for part in PARTS),
                *(f"{own['nodes']:.0f}", f"{read / 1e6:.0f}", f"{products / 1e9:.1f}", f"{attended / 1e9:.2f}"),
                *(f"{share:.0%}" for share in shares),
            )
        )
        spread = min(seconds[shape]), max(seconds[shape])
        named = {"graph": phase.value, "rows": count_, "context": context, "seconds": took, "spread": spread}
        work = {"bytes": read, "operations": products, "attention_operations": attended}
        details.append({**named, **work, "microseconds": dict(own)})
    head = (
        "graph",
        "rows",
        "context",
        "call ms",
        *PARTS,
        "nodes",
        "MB",
        "GOP",
        "attention GOP",
        "of bandwidth",
        "of peak",
    )
    figures = [("limit", "measured"), *((name, f"{value:.3g}") for name, value in machine.items())]
    return Found([], {"limits": machine, "calls": details}, (figures, (head, *rows)))


def main() -> None:
    """Print the tables."""
    run(
        measure,
        __doc__,
        rounds=5,
        row_counts=((), "rows of the calls; default 1 2 4 8 16"),
        contexts=((), "valid positions of each row; default 128 2048 8192"),
    )


if __name__ == "__main__":
    main()
