"""Every family, lowered and built by TensorRT-RTX with both profiles: nothing is lost, types and shapes are right."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from doubles.engines import build_decoder
from doubles.plans import PLAN

from llmc.bundle import DECODER_FILE, Geometry, Limits, Profile, read_export
from llmc.optimize.lower.context import Computed, LoweringContext, QuantConfig, QuantConfigs, Static, WeightOnly
from llmc.optimize.passes import lower
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.targets import NATIVE
from llmc.optimize.tensorrt.builder import EngineReport
from llmc.optimize.tensorrt.messages import remarks
from llmc.optimize.tensorrt.network import Network
from llmc.optimize.weights.file import WeightFile
from llmc.optimize.weights.store import Calibrated

# Those in which the parser sees something else: windows, softcaps, biases, packed and tied weights, longer queries.
# What else differs between families is in the lowered graph's own tests.
PLAIN, *DIFFERENT = (
    "llama-biases",
    "phi3-packed-window-fp16",
    "gpt2-scale-by-layer",
    "gemma2-softcaps",
    "qwen2-tied-bf16",
    "ministral3-growing-queries",
)
CAPACITY = 64
BUCKETS = (16, 32, CAPACITY)
DECODE, PREFILL = Profile(4, 1, 1), Profile(1, 16, 4)
WEIGHTS: dict[str, QuantConfig] = {
    "fp16": Computed(),
    "int8": WeightOnly(Grid(8, positive=True)),
    "int4": WeightOnly(Grid(4, 32, positive=True)),
}


class Ranges(Calibrated):
    """Weights as the checkpoint has them, and the same range of activations everywhere."""

    def activation(self, module: str) -> float:
        return 8.0


class Built:
    """A lowered graph, the network that was parsed of it, and its engine."""

    def __init__(self, folder: Path, geometry: Geometry, report: EngineReport, network: Network) -> None:
        self.graph = ir.load(folder / DECODER_FILE).graph
        self.geometry = geometry
        self.report = report
        self.size = (folder / "engine.plan").stat().st_size
        self.layers = Counter(layer.type.name for layer in network.layers())
        updates = [layer for layer in network.layers() if layer.type.name == "KV_CACHE_UPDATE"]
        self.caches = {(tuple(made.shape), made.dtype.name) for made in (layer.get_output(0) for layer in updates)}


@pytest.fixture
def built(rtx, exported, tmp_path, monkeypatch) -> Iterator[Callable[..., Built]]:
    """Lowers an export and builds it."""
    networks: list[Network] = []

    def parse(*given: Any) -> Network:
        networks.append(Network(*given))
        return networks[-1]

    monkeypatch.setattr("llmc.optimize.tensorrt.builder.Network", parse)
    with ExitStack() as opened:

        def build(name: str, body: QuantConfig, *, compute: str = "float16", gpus: tuple[str, ...] = ()) -> Built:
            export = exported(name).export
            geometry, model = read_export(export).geometry, ir.load(export / DECODER_FILE)
            weights = opened.enter_context(closing(WeightFile(tmp_path)))
            limits = Limits(CAPACITY, DECODE.batch, PREFILL.sequence)
            head = WEIGHTS["int8"] if isinstance(body, Static) else body
            plan = LoweringContext(
                "single", geometry, limits, QuantConfigs(body, head), weights, Ranges(), compute, compute
            )
            lower(model, "tensorrt-rtx", plan)
            weights.close()
            model.functions.clear()
            model.opset_imports.clear()
            model.opset_imports[""], model.ir_version = NATIVE
            ir.save(model, tmp_path / DECODER_FILE)
            config = replace(PLAN, buckets=BUCKETS, decode=DECODE, prefill=PREFILL, compute_capabilities=gpus)
            return Built(tmp_path, geometry, build_decoder(rtx, tmp_path / DECODER_FILE, config), networks[-1])

        yield build


def check_native(built: Built) -> None:
    """In-place caches and one attention per layer, and inputs and outputs as the contract names them."""
    layers = built.geometry.layers
    parts = [f"{i}.{part}" for i in range(layers) for part in ("key", "value")]
    assert built.report.aliases == {f"present.{part}": f"past_key_values.{part}" for part in parts}
    assert built.layers["KV_CACHE_UPDATE"] == 2 * layers
    whole = [node for node in built.graph if node.op_type == "Attention"]
    assert built.layers["ATTENTION_INPUT"] == built.layers["ATTENTION_OUTPUT"] == len(whole)
    assert len(whole) == (0 if built.geometry.model_type == "gemma2" else layers)  # softcaps are in basic operators
    assert (built.report.attention == "basic") == (not whole)
    heads = {cache.shape for cache in built.geometry.caches}
    assert {shape for shape, _ in built.caches} == {(-1, kv_heads, CAPACITY, head_dim) for kv_heads, head_dim in heads}
    assert remarks(built.report.messages) == ()


def cache_types(built: Built) -> set[str]:
    return {kind for _, kind in built.caches}


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        # A precision is lowered alike for every family, and a family alike in every precision.
        *((PLAIN, weights) for weights in WEIGHTS),
        *zip(DIFFERENT, cycle(WEIGHTS), strict=False),
    ],
)
def test_every_checkpoint_is_built(name, weights, built):
    engine = built(name, WEIGHTS[weights])
    check_native(engine)
    # Integer linears of an attention or an MLP that read the same are one.
    packs = {(linear.reads, linear.name.rpartition(".")[0]) for linear in engine.geometry.linears}
    linears = len(engine.geometry.linears if weights == "fp16" else packs)
    assert engine.layers["MATRIX_MULTIPLY"] >= linears
    assert engine.layers["DEQUANTIZE"] == (0 if weights == "fp16" else linears)
    assert cache_types(engine) == {"HALF"}


def test_layers_may_differ(built):
    engine = built("invented", WEIGHTS["int4"])
    linears = {tuple(len(group) for group in engine.geometry.readers if group[0].layer == i) for i in range(4)}
    assert len(linears) == 3
    check_native(engine)


def test_engines_are_cross_compiled(built):
    engine = built("llama-biases", WEIGHTS["int4"], gpus=("8.6", "8.9"))
    check_native(engine)
    assert engine.size > 10_000


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_other_types_are_built(compute, built):
    engine = built("llama-biases", Computed(), compute=compute)
    check_native(engine)
    assert cache_types(engine) == {"FLOAT" if compute == "float32" else "BF16"}
    assert engine.report.attention == ("decomposed" if compute == "float32" else "fused")


def test_integer_activations_are_built(built):
    engine = built("llama-biases", Static(Grid(8, positive=True)))
    check_native(engine)
    assert engine.layers["QUANTIZE"] > 0
