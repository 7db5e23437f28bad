"""Measure where the time of one call goes: products, head, attention, norms, the rest, by rows and context.

Each graph of the bundle runs steps of one token per row, and prefill's also chunks of a prompt, under ONNX Runtime's
profiler: nodes by what they are for, and what is left of a call is between them. Beside them stand the bytes that a
call reads and the operations that it does, over the machine's own limits, measured in the same run.
"""

import argparse
import json
import statistics
import tempfile
import time
from bisect import bisect_left, bisect_right
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
from llmc.inventory import HEAD
from llmc.runtime.sessions import Batch, Phase, Session
from llmc.runtime.sessions.onnxruntime import compiled
from llmc.runtime.sessions.onnxruntime.cpu import OnnxRuntimeSession

PRODUCTS = ("MatMulNBits", "MatMulIntegerToFloat", "FusedMatMul", "MatMul", "Gemm")
PARTS = ("body", "head", "attention", "norms", "rest", "between nodes")
ROWS, CONTEXTS = (1, 2, 4, 8, 16), (128, 2048, 8192)
MOST_POSITIONS = 1 << 16  # of all rows: 1.6 GB of keys and values for the 0.5B geometry
CALLS = 2  # timed calls of a shape in a round, after one that is not
READ_BYTES = 1 << 30  # far more than any cache
CHAIN = 400  # nodes with next to nothing to do
WIDE = 1 << 16  # values of a node that two threads share
PEAK_SHAPE = 512, 2048, 8192  # rows, inputs and outputs of a product that is bound by arithmetic

CHUNKS = ((128, 0), (256, 0), (256, 1792), (256, 7936), (1024, 7168))  # tokens of a prompt, after so many

Shape = tuple[Phase, int, int, int]  # graph, rows, tokens of each, valid positions of each before


def calls(session: Session, shape: Shape) -> None:
    """A few calls of a shape, with logits after each row's last token."""
    phase, rows, tokens, context = shape
    ids = np.random.default_rng(rows).integers(FIRST_TOKEN, LAST_TOKEN, (rows, tokens))
    call = Batch(phase, ids, np.full(rows, context, np.int64), np.full((rows, 1), tokens - 1, np.int64))
    for _ in range(CALLS + 1):
        session.run(call)


def opened(args: argparse.Namespace, manifest: Manifest, shapes: Sequence[Shape]) -> OnnxRuntimeSession:
    """The bundle's graphs, with a cache for these shapes whose pages are all there."""
    session = OnnxRuntimeSession(args.bundle, manifest, args.threads)
    positions = max(context + tokens for _, _, tokens, context in shapes)
    session.cache.grow(max(rows for _, rows, *_ in shapes), positions, manifest.limits.max_context)
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
        starts = [node["ts"] for node in nodes]
        for whole in (event for event in events if event["name"] == "model_run"):
            own = nodes[bisect_left(starts, whole["ts"]) : bisect_right(starts, whole["ts"] + whole["dur"])]
            parts: Counter[str] = Counter(nodes=len(own), call=whole["dur"])
            for node in own:
                if node["args"]["op_name"] != "If":  # whose nodes are there themselves
                    parts[part_of(node, vocab_size)] += node["dur"]
            parts["between nodes"] = whole["dur"] - sum(parts[part] for part in PARTS[:-1])
            found.append(parts)
    return found


def part_of(node: dict[str, Any], vocab_size: int) -> str:
    """The part of a call that a node belongs to; attention's are named after it."""
    operator = node["args"]["op_name"]
    if operator in PRODUCTS:
        widths = [shape[-1] for output in node["args"]["output_type_shape"] for shape in output.values()]
        return "head" if vocab_size in widths else "body"
    if operator in ("GroupQueryAttention", "RotaryEmbedding") or ".self_attn.folded." in node["name"]:
        return "attention"
    return "norms" if operator.endswith("LayerNormalization") else "rest"


def profile(args: argparse.Namespace, manifest: Manifest, shapes: Sequence[Shape]) -> dict[Shape, list[Counter[str]]]:
    """Microseconds by part of each timed call, from ONNX Runtime's profiler."""
    found: defaultdict[Shape, list[Counter[str]]] = defaultdict(list)
    for phase in Phase:  # each graph has a profile of its own
        own = [shape for shape in shapes if shape[0] is phase]
        with tempfile.TemporaryDirectory() as name:
            with profiled(Path(name)):
                session = opened(args, manifest, own)
            for _, shape in product(range(args.rounds), own):
                calls(session, shape)
            session.close()
            del session
            made = iter(node_times(Path(name), manifest.geometry.vocab_size))
            for _, shape in product(range(args.rounds), own):
                found[shape] += [next(made) for _ in range(CALLS + 1)][1:]
    return found


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
    phase, rows, tokens, context = shape
    return manifest.graphs[phase.value].step_weight_bytes + rows * (context + tokens) * manifest.memory.cache_per_token


def operations(manifest: Manifest, shape: Shape) -> tuple[int, int]:
    """Multiplications and additions of a call: of its products with weights, and of attention."""
    _, rows, tokens, context = shape
    geometry = manifest.geometry
    body = sum(linear.inputs * linear.outputs for linear in geometry.linears if linear.name != HEAD)
    seen = tokens * context + tokens * (tokens + 1) // 2
    heads = sum(attention.heads * attention.head_dim for attention in geometry.attentions)
    return 2 * rows * (tokens * body + geometry.hidden_size * geometry.vocab_size), 4 * rows * seen * heads


def measure(args: argparse.Namespace) -> Found:
    """Calls, their parts, and the machine."""
    manifest = read_bundle(args.bundle)
    limits = replace(manifest.limits, max_batch=max(manifest.limits.max_batch, *ROWS))
    manifest = replace(manifest, limits=limits)  # a cache of more rows is no question of the graphs
    rows_, contexts = ([int(item) for item in items] for items in (args.row_counts or ROWS, args.contexts or CONTEXTS))
    steps = ((rows, context) for rows, context in product(rows_, contexts) if rows * context <= MOST_POSITIONS)
    shapes: list[Shape] = [(phase, rows, 1, context) for phase, (rows, context) in product(Phase, list(steps))]
    shapes += [(Phase.PREFILL, 1, tokens, context) for tokens, context in CHUNKS if context <= max(contexts)]
    machine = {
        "read_bytes_per_s": read_bandwidth(args.threads),
        "integer_operations_per_s": peak(args.threads, integer=True),
        "float32_operations_per_s": peak(args.threads, integer=False),
        "node_s": node_seconds(args.threads, 1),
        "shared_node_s": node_seconds(args.threads, WIDE),
    }
    table, details = [], []
    for shape, made in profile(args, manifest, shapes).items():
        own = {key: statistics.median(call[key] for call in made) for key in ("call", *PARTS, "nodes")}
        read, (products, attended) = bytes_read(manifest, shape), operations(manifest, shape)
        bounds = {
            "of bandwidth": read / machine["read_bytes_per_s"],
            "of peak": products / machine["integer_operations_per_s"] + attended / machine["float32_operations_per_s"],
        }
        graph, *sizes = shape
        table.append(
            (
                *(graph.value, *map(str, sizes), *(f"{own[part] / 1e3:.1f}" for part in ("call", *PARTS))),
                *(f"{own['nodes']:.0f}", f"{read / 1e6:.0f}", f"{products / 1e9:.1f}", f"{attended / 1e9:.2f}"),
                *(f"{bound * 1e6 / own['call']:.0%}" for bound in bounds.values()),
            )
        )
        spread = min(call["call"] for call in made), max(call["call"] for call in made)
        work = {"bytes": read, "operations": products, "attention_operations": attended}
        details.append(
            {"graph": graph.value, "rows_tokens_context": sizes, "microseconds": own, "spread": spread, **work}
        )
    head = ("graph", "rows", "tokens", "after", "ms", *PARTS, "nodes", "MB", "GOP", "attention GOP", *bounds)
    figures = [("limit", "measured"), *((name, f"{value:.3g}") for name, value in machine.items())]
    return Found([], {"limits": machine, "calls": details}, (figures, (head, *table)))


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
