"""Products with weights of 8 bits beside the same in floats, timed once on the GPU that an engine is built on.

No version documents kernels for them: the weights may be dequantized to memory and multiplied in float16, which is
slower than float16 weights. Not run on a GPU yet.
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from llmc.bundle import Geometry, Recipe
from llmc.errors import BuildError, BundleError, GpuError, MissingExtraError, ResourceError, printable
from llmc.inventory import HEAD
from llmc.optimize.lower.context import ARRAY_TYPES, WeightOnly, quant_configs
from llmc.optimize.progress import Progress
from llmc.optimize.targets import OLD
from llmc.optimize.tensorrt.builder import build_model
from llmc.optimize.tensorrt.ladder import WIDE_SCALES
from llmc.optimize.tensorrt.spec import EngineSpec
from llmc.runtime.host.cuda import Driver, open_driver
from llmc.runtime.kv.device_cache import ALIGNMENT
from llmc.runtime.sessions.tensorrt.engine import Context, Engine
from llmc.runtime.sessions.tensorrt.kernels import compiles_kernels

log = logging.getLogger(__name__)

# Products in a row, with weights of their own: bytes of these in floats. Half of it, in 8 bits, is more than an H200
# (50 MB) or an RTX 5090 (96 MB) caches: what stayed there would be read faster than a model's weights are.
BYTES, MOST_PRODUCTS = 256_000_000, 64
WARM_UP, ROUNDS, STEPS = 10, 5, 20
# In the notes of bundles, which name the GPU before.
SLOWER, FAILED = "is the slower one, by a factor of", "int8 was not timed beside floats"


@dataclass(frozen=True)
class Compared:
    """Seconds of the same products of one row, with weights of 8 bits and in floats."""

    int8: float
    floats: float

    def __str__(self) -> str:
        slower = "int8" if self.int8 > self.floats else "floats"
        factor = max(self.int8, self.floats) / min(self.int8, self.floats)
        return (
            f"{slower} {SLOWER} {factor:.2f}: products of one row took "
            f"{self.int8 * 1e6:.0f} us with weights of 8 bits and {self.floats * 1e6:.0f} us in floats"
        )


def compared(
    spec: EngineSpec, recipe: Recipe, fallback: str, geometry: Geometry, folder: Path, progress: Progress
) -> list[str]:
    """A sentence for the bundle about which of int8 and floats is the slower one on the GPU here, or why that is not
    known; none where no weights have 8 bits.

    Args:
        spec: of the engine.
        recipe: of what was built.
        fallback: the step of the ladder that served.
        geometry: of the decoder.
        folder: to write in; it keeps nothing.
    """
    assert spec.gpu is not None
    if not stores_bytes(recipe, geometry):
        return []
    progress("timing int8 beside floats")
    try:
        with closing(open_driver()) as driver:
            found = compare(spec, folder, geometry, driver, wide_scales=fallback == WIDE_SCALES)
    except (BuildError, BundleError, GpuError, MissingExtraError, ResourceError) as error:
        log.warning("%s: %s", FAILED, error)
        return [f"on {spec.gpu.name}: {FAILED} ({printable(str(error))})"]
    if found.int8 > found.floats:
        log.warning("%s; build with --fp16, or --int4", found)
    return [f"on {spec.gpu.name}: {found}"]


def stores_bytes(recipe: Recipe, geometry: Geometry) -> bool:
    """True if a linear before the head has integers of 8 bits, chosen or the checkpoint's own."""
    [stored] = quant_configs(recipe, geometry).values()
    plain = replace(stored, w8a8=None)
    kinds = (plain.of(linear.name) for linear in geometry.linears if linear.name != HEAD)
    return any(isinstance(kind, WeightOnly) and kind.grid.bits == 8 for kind in kinds)


def is_comparison(note: str) -> bool:
    """True of a bundle's note that :func:`compared` made."""
    return note.startswith("on ") and (f" {SLOWER} " in note or f": {FAILED} (" in note)


def compare(
    spec: EngineSpec,
    folder: Path,
    geometry: Geometry,
    driver: Driver,
    clock: Callable[[], float] = time.perf_counter,
    build: Callable[..., Any] = build_model,
    *,
    wide_scales: bool = False,
) -> Compared:
    """Build both as small engines in ``folder``, which are removed again, and time them in turns.

    ``wide_scales`` tells that the decoder's scales are float32.

    Raises:
        BuildError: the library refuses one of them.
        GpuError, BundleError: they do not run.
    """
    widest = max((linear for linear in geometry.linears if linear.name != HEAD), key=lambda linear: linear.size)
    compute = spec.config.compute
    scales = {"int8": "float32" if wide_scales else compute, "floats": None}
    paths = [folder / f".{kind}.plan" for kind in scales]
    try:
        for kind, path in zip(scales.values(), paths, strict=True):
            build(spec, products(widest.inputs, widest.outputs, compute, kind), path, [{"rows": (1, 1, 1)}])
        return Compared(*_timed(spec, paths, driver, clock))
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
            path.with_suffix(".kernels").unlink(missing_ok=True)


def products(inputs: int, outputs: int, compute: str, scales: str | None) -> onnx.ModelProto:
    """``x`` [rows, inputs] -> ``y``: products to [rows, outputs] and back again, as many as :data:`BYTES` allow.

    ``scales`` is the type of the scales of weights of 8 bits; None for weights in floats.
    """
    array, generator = ARRAY_TYPES[compute], np.random.default_rng(0)
    pairs = -(-min(MOST_PRODUCTS, max(2, BYTES // (inputs * outputs * array.itemsize))) // 2)
    kind = helper.np_dtype_to_tensor_dtype(array)
    nodes, weights, value = [helper.make_node("Cast", ["given"], ["x"], to=kind)], [], "x"
    for number, (rows, columns) in enumerate([(inputs, outputs), (outputs, inputs)] * pairs):
        codes = generator.integers(-127, 128, (rows, columns), np.int8)
        scale, name = 1 / (127 * rows), f"w{number}"
        if scales is None:
            weights.append(numpy_helper.from_array((codes * scale).astype(array), name))
        else:
            weights.append(numpy_helper.from_array(codes, f"{name}.codes"))
            weights.append(numpy_helper.from_array(np.full(columns, scale, ARRAY_TYPES[scales]), f"{name}.scales"))
            found = name if scales == compute else f"{name}.{scales}"
            nodes.append(helper.make_node("DequantizeLinear", [f"{name}.codes", f"{name}.scales"], [found], axis=1))
            if found != name:
                nodes.append(helper.make_node("Cast", [found], [name], to=kind))
        nodes.append(helper.make_node("MatMul", [value, name], [f"y{number}"]))
        value = f"y{number}"
    nodes.append(helper.make_node("Cast", [value], ["y"], to=TensorProto.FLOAT))
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("given", TensorProto.FLOAT, ["rows", inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", inputs])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OLD[0])], ir_version=OLD[1])


def _timed(spec: EngineSpec, paths: Sequence[Path], driver: Driver, clock: Callable[[], float]) -> list[float]:
    """Seconds of a step of each engine, the median of rounds that take turns."""
    driver.activate()
    with ExitStack() as undo:
        stream = driver.stream()
        undo.callback(driver.destroy_stream, stream)
        contexts = [_context(spec, path, driver, stream, undo) for path in paths]
        for context in contexts:
            _step(context, driver, stream, clock, WARM_UP)
        rounds = [[_step(context, driver, stream, clock, STEPS) for context in contexts] for _ in range(ROUNDS)]
        return [statistics.median(found) for found in zip(*rounds, strict=True)]


def _context(spec: EngineSpec, path: Path, driver: Driver, stream: int, undo: ExitStack) -> Context:
    """The engine in ``path``, ready to run on zeros; ``undo`` frees all that it takes."""
    engine = Engine(spec.library, path, path.parent)
    undo.callback(engine.close)
    if compiles_kernels(spec.library):
        engine.keep_kernels(path.with_suffix(".kernels"))
    size, memory = engine.memory(), 0
    if size:
        memory = driver.alloc(size)
        undo.callback(driver.free, memory)
    context = Context(engine, 0, stream, memory, size)
    undo.callback(context.close)
    shape = engine.largest("given", 0)
    length = -(-4 * int(np.prod(shape)) // ALIGNMENT) * ALIGNMENT
    block = driver.alloc(2 * length)
    undo.callback(driver.free, block)
    driver.fill(block, 2 * length, stream)
    context.prepare({"given": shape}, {"given": block, "y": block + length})
    return context


def _step(context: Context, driver: Driver, stream: int, clock: Callable[[], float], times: int) -> float:
    driver.synchronize(stream)
    start = clock()
    for _ in range(times):
        context.run(stream)
    driver.synchronize(stream)
    return (clock() - start) / times
