"""Random tiny exports of every family, lowered for TensorRT and run by ONNX Runtime as the parser gets them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from doubles import modules
from doubles.lowerings import Lowering, long_texts, open_session, replace_weights

from llmc.bundle import DECODER_FILE, Limits
from llmc.exported import rows_of
from llmc.optimize.lower.context import HEAD, Computed, LoweringContext, QuantConfig, QuantConfigs, Static, WeightOnly
from llmc.optimize.lower.tensorrt.weights import as_stored
from llmc.optimize.passes import PASSES
from llmc.optimize.quantize import rtn
from llmc.optimize.targets import NATIVE
from llmc.optimize.weights.store import Calibrated

CASES: tuple[str, ...] = modules.random_checkpoints().DENSE
TOKENS = 20
CAPACITY = 48
# Numbers of cache positions that attention looks at; all of them hold the 20 tokens.
BUCKETS = (24, 32, CAPACITY)
# What cache slots hold that nothing has written: attention must not look at it.
STALE = 5.0
EMBEDDING = "model.embed_tokens"
Cache = dict[str, np.ndarray]


@pytest.fixture(scope="session", params=CASES)
def case(request: pytest.FixtureRequest, exported: Callable[[str], Any]) -> Any:
    """Each of the random checkpoints in turn."""
    return exported(request.param)


class Ranges(Calibrated):
    """Weights as the checkpoint has them, with ranges of activations that were measured."""

    def __init__(self, ranges: dict[str, float]) -> None:
        super().__init__()
        self.ranges = ranges

    def activation(self, module: str) -> float:
        return self.ranges[module]


@pytest.fixture
def ranges(ids: list[int], tmp_path: Path) -> Callable[[Path], Ranges]:
    """The largest magnitude of every linear's input on ``ids``, as the portable graph computes it."""

    def get(export: Path) -> Ranges:
        model = ir.load(export / DECODER_FILE)
        values = {node.name: node.inputs[0] for node in model.graph if node.op_type == "MatMul"}
        model.graph.outputs.extend(dict.fromkeys(values.values()))
        (folder := tmp_path / "observed").mkdir()
        for shard in export.glob("*.safetensors"):
            (folder / shard.name).hardlink_to(shard)
        ir.save(model, folder / DECODER_FILE)
        graph = Decoder(folder)
        feeds = {"input_ids": np.array([ids]), "past_lengths": np.zeros(1, np.int64)}
        feeds["logit_indices"] = np.arange(len(ids))[None]
        names = [value.name for value in values.values()]
        found = graph.session.run(names, feeds | graph.empty_cache())
        return Ranges({name: float(np.abs(array).max()) for name, array in zip(values, found, strict=True)})

    return get


class TensorRTLowering(Lowering):
    """One export on its way through the passes of TensorRT."""

    def __init__(self, export: Path, folder: Path, forms: QuantConfigs, compute: str, calibrated: Calibrated):
        opset, ir_version = NATIVE
        super().__init__(export, folder, PASSES["tensorrt"], {"": opset}, ir_version)
        limits = Limits(max_context=CAPACITY, max_batch=2, prefill_chunk=TOKENS)
        self.context = LoweringContext(
            "single", self.geometry, limits, forms, self.weights, calibrated, compute, compute
        )


@pytest.fixture
def lowering(tmp_path: Path) -> Iterator[Callable[..., TensorRTLowering]]:
    """Starts the lowering of an export."""
    started: list[TensorRTLowering] = []

    def start(
        export: Path,
        body: QuantConfig | None = None,
        head: QuantConfig | None = None,
        *,
        compute: str = "float32",
        layers: dict[str, QuantConfig] | None = None,
        calibrated: Calibrated | None = None,
    ) -> TensorRTLowering:
        body = body or Computed()
        folder = tmp_path / f"lowering-{len(started)}"
        folder.mkdir()
        forms = QuantConfigs(body, head or body, tuple((layers or {}).items()))
        started.append(TensorRTLowering(export, folder, forms, compute, calibrated or Calibrated()))
        return started[-1]

    yield start
    for each in started:
        each.weights.close()


# An optimized graph would compute with other kernels than those written down.
as_written = partial(open_session, optimized=False)


@pytest.fixture(scope="session")
def session() -> Callable[[Path | bytes], Any]:
    """Opens a model in ONNX Runtime without optimisation."""
    return as_written


class Decoder:
    """A decoder graph in ONNX Runtime: the portable one, or a lowered one, whose calls choose their bucket."""

    def __init__(self, folder: Path) -> None:
        self.session = as_written(folder / DECODER_FILE)
        inputs = {value.name: value for value in self.session.get_inputs()}
        self._slots = inputs.get("cache_slots")
        self._caches = {name: value for name, value in inputs.items() if name.startswith("past_key_values.")}
        self.type = np.float16 if next(iter(self._caches.values())).type == "tensor(float16)" else np.float32

    def empty_cache(self, rows: int = 1) -> Cache:
        """A cache that holds nothing of use yet."""
        shapes = {name: (rows, value.shape[1], CAPACITY, value.shape[3]) for name, value in self._caches.items()}
        return {name: np.full(shape, STALE, self.type) for name, shape in shapes.items()}

    def run(
        self,
        ids: Sequence[Sequence[int]],
        past: Sequence[int],
        cache: Cache,
        bucket: int = CAPACITY,
        outputs: Sequence[Sequence[int]] | None = None,
    ) -> tuple[np.ndarray, Cache]:
        """Logits [B, O, V] after the new tokens ``outputs`` (default: all), and the cache with them in it."""
        indices = np.tile(np.arange(len(ids[0])), (len(ids), 1)) if outputs is None else np.array(outputs)
        feeds = {
            "input_ids": np.array(ids, np.int64),
            "past_lengths": np.array(past, np.int64),
            "logit_indices": indices.astype(np.int64),
            **({} if self._slots is None else {"cache_slots": np.arange(bucket)}),
            **cache,
            **long_texts(self.session, len(ids)),
        }
        logits, *presents = self.session.run(None, feeds)[: 1 + len(cache)]  # behind them are candidates
        assert logits.dtype == np.float32
        return logits, dict(zip(cache, presents, strict=True))

    def __call__(
        self, ids: Sequence[int], pieces: Sequence[int] | None = None, bucket: int | None = None
    ) -> np.ndarray:
        """Logits [S, V] after every token of one row, fed in ``pieces`` (default: in one).

        Without ``bucket`` each call takes the smallest one.
        """
        cache, outputs, position = self.empty_cache(), [], 0
        for size in pieces or [len(ids)]:
            chosen = bucket or next(b for b in (8, 16, *BUCKETS) if b >= position + size)
            logits, cache = self.run([ids[position : position + size]], [position], cache, chosen)
            outputs.append(logits[0])
            position += size
        return np.concatenate(outputs)


@pytest.fixture(scope="session")
def decoder() -> type[Decoder]:
    """Opens the decoder of a folder."""
    return Decoder


@pytest.fixture(scope="session")
def portable_logits(ids: list[int]) -> Callable[[Path], np.ndarray]:
    """Logits of the portable graph in a folder for all ``ids`` in one piece."""
    made: dict[Path, np.ndarray] = {}

    def get(folder: Path) -> np.ndarray:
        if folder not in made:
            made[folder] = Decoder(folder)(ids)
        return made[folder]

    return get


def stands_for(weights: np.ndarray, form: QuantConfig, compute: str) -> np.ndarray:
    """The matrix [N, K] that a lowered linear of this form multiplies with, in float32, scales as they are stored."""
    match form:
        case WeightOnly(grid) | Static(grid):
            values, scales = as_stored(rtn.quantize(weights, grid), np.dtype(compute))
            return values * np.repeat(scales.astype(np.float32), grid.width(weights.shape[1]), axis=1)
    return weights


def dequantized(lowered: Lowering, folder: Path) -> Path:
    """The portable decoder with the weights that those of a lowering stand for, in ``folder``.

    A tied embedding, which stays as it is, becomes an initializer of its own.
    """
    model, plan = ir.load(lowered.export / DECODER_FILE), lowered.context
    table = model.graph.initializers[f"{EMBEDDING}.weight"]
    _give_rows(model.graph, table, rows_of(table.const_value))

    def stored(module: str, array: np.ndarray) -> np.ndarray:
        return stands_for(array, plan.quant.of(HEAD if module == EMBEDDING else module), plan.compute)

    replace_weights(model, stored)
    folder.mkdir()
    ir.save(model, folder / DECODER_FILE)
    return folder


def _give_rows(graph: ir.Graph, table: ir.Value, rows: np.ndarray) -> None:
    gather = next(node for node in graph if node.name == EMBEDDING)
    value = ir.Value(name="rows", shape=table.shape, const_value=ir.tensor(rows, name="rows"))
    value.type = ir.TensorType(ir.DataType.FLOAT)
    graph.register_initializer(value)
    gather.replace_input_with(0, value)
    gather.outputs[0].type = value.type


@pytest.fixture
def portable(tmp_path: Path) -> Callable[[Lowering], Path]:
    """The portable decoder with the weights that those of a lowering stand for."""
    return lambda lowered: dequantized(lowered, tmp_path / f"portable-{lowered.folder.name}")
