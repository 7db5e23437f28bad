"""Every family, lowered and built by TensorRT-RTX with both profiles: nothing is lost, types and shapes are right."""

import sys
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
from llmc.optimize.tensorrt.builder import EngineReport
from llmc.optimize.weights.file import WeightFile
from llmc.optimize.weights.store import Calibrated

random_checkpoints = sys.modules["llmc_random_checkpoints"]
CASES: tuple[str, ...] = tuple(random_checkpoints.CASES)
# One of each family, for what does not depend on the small differences between checkpoints.
FAMILIES = (
    "llama-biases",
    "mistral-window-wide-heads",
    "qwen2-tied-bf16",
    "qwen3-biases-window-in-first-layer",
)
INNER = 96  # divides into blocks of int4
CAPACITY = 64
BUCKETS = (16, 32, CAPACITY)
DECODE, PREFILL = Profile(4, 1, 1), Profile(1, 16, 4)
WEIGHTS: dict[str, QuantConfig] = {
    "fp16": Computed(),
    "int8": WeightOnly(Grid(8, positive=True)),
    "int4": WeightOnly(Grid(4, 32, positive=True)),
}
# Quantized ones are packed: query, key and value, output, gate and up, down.
PASSES = {"native": "tensorrt-rtx", "primitives": "tensorrt-rtx-primitives"}
# Opset and IR version that the build declares for each form.
DECLARED = {"native": (24, 11), "primitives": (21, 10)}


class Ranges(Calibrated):
    """Weights as the checkpoint has them, and the same range of activations everywhere."""

    def activation(self, module: str) -> float:
        return 8.0


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The export of a random checkpoint by its name; each is made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            if name == "invented":
                return random_checkpoints.make_case(name, folder).export
            case = {**random_checkpoints.CASES[name], "intermediate_size": INNER}
            made[name] = random_checkpoints.shared_export(case, folder) / "export"
        return made[name]

    return get


class Built:
    """A lowered graph and the engine that was built of it."""

    def __init__(self, folder: Path, geometry: Geometry, report: EngineReport) -> None:
        self.graph = ir.load(folder / DECODER_FILE).graph
        self.geometry = geometry
        self.report = report
        self.size = (folder / "engine.plan").stat().st_size
        self.layers = Counter(layer.type for layer in report.layers)


@pytest.fixture
def built(rtx: Any, exports: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[..., Built]]:
    """Lowers an export and builds it."""
    with ExitStack() as opened:

        def build(
            name: str,
            body: QuantConfig,
            *,
            form: str = "native",
            compute: str = "float16",
            gpus: tuple[str, ...] = (),
            wide: bool = False,
        ) -> Built:
            export = exports(name)
            geometry, model = read_export(export).geometry, ir.load(export / DECODER_FILE)
            weights = opened.enter_context(closing(WeightFile(tmp_path)))
            limits = Limits(CAPACITY, DECODE.batch, PREFILL.sequence)
            head = WEIGHTS["int8"] if isinstance(body, Static) else body
            plan = LoweringContext(
                "single",
                geometry,
                limits,
                QuantConfigs(body, head),
                weights,
                Ranges(),
                compute,
                compute,
                wide_scales=wide,
            )
            lower(model, PASSES[form], plan)
            weights.close()
            model.functions.clear()
            model.opset_imports.clear()
            model.opset_imports[""], model.ir_version = DECLARED[form]
            ir.save(model, tmp_path / DECODER_FILE)
            config = replace(
                PLAN,
                form=form,
                capacity=0 if form == "primitives" else CAPACITY,
                buckets=BUCKETS,
                decode=DECODE,
                prefill=PREFILL,
                compute_capabilities=gpus,
            )
            return Built(tmp_path, geometry, build_decoder(rtx, tmp_path / DECODER_FILE, config))

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
    updates = [layer for layer in built.report.layers if layer.type == "KV_CACHE_UPDATE"]
    heads = {cache.shape for cache in built.geometry.caches}
    assert {layer.shape for layer in updates} == {(-1, kv_heads, CAPACITY, head_dim) for kv_heads, head_dim in heads}
    assert built.report.warnings == ()


def cache_types(built: Built) -> set[str]:
    return {layer.dtype for layer in built.report.layers if layer.type == "KV_CACHE_UPDATE"}


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        # A precision is lowered alike for every family, and a family alike in every precision.
        *((CASES[0], weights) for weights in WEIGHTS),
        *zip(CASES[1:], cycle(WEIGHTS), strict=False),
    ],
)
def test_every_checkpoint_is_built(name: str, weights: str, built: Callable[..., Built]):
    engine = built(name, WEIGHTS[weights])
    check_native(engine)
    # Integer linears of an attention or an MLP that read the same are one.
    packs = {(linear.reads, linear.name.rpartition(".")[0]) for linear in engine.geometry.linears}
    linears = len(engine.geometry.linears if weights == "fp16" else packs)
    assert engine.layers["MATRIX_MULTIPLY"] >= linears
    assert engine.layers["DEQUANTIZE"] == (0 if weights == "fp16" else linears)
    assert cache_types(engine) == {"HALF"}


@pytest.mark.parametrize("form", DECLARED)
def test_layers_may_differ(form: str, built: Callable[..., Built]):
    engine = built("invented", WEIGHTS["int4"], form=form)
    linears = {tuple(len(group) for group in engine.geometry.readers if group[0].layer == i) for i in range(4)}
    assert len(linears) == 3
    if form == "native":
        check_native(engine)


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_engines_are_cross_compiled(name: str, built: Callable[..., Built]):
    engine = built(name, WEIGHTS["int4"], gpus=("8.6", "8.9"))
    check_native(engine)
    assert engine.size > 10_000


@pytest.mark.parametrize(("name", "weights"), [*zip(FAMILIES, cycle(WEIGHTS), strict=False)])
def test_the_primitive_form_is_built_of_basic_layers(name: str, weights: str, built: Callable[..., Built]):
    engine = built(name, WEIGHTS[weights], form="primitives")
    assert engine.report.aliases == {}
    assert not {"ATTENTION_INPUT", "KV_CACHE_UPDATE", "ROTARY_EMBEDDING"} & set(engine.layers)
    assert engine.report.warnings == ()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_scales_in_float32_are_built(weights: str, built: Callable[..., Built]):
    engine = built("llama-biases", WEIGHTS[weights], wide=True)
    check_native(engine)
    scaled = [layer.dtype for layer in engine.report.layers if layer.type == "DEQUANTIZE"]
    assert set(scaled) == {"FLOAT"}


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_other_types_are_built(compute: str, built: Callable[..., Built]):
    engine = built("llama-biases", Computed(), compute=compute)
    check_native(engine)
    assert cache_types(engine) == {"FLOAT" if compute == "float32" else "BF16"}


def test_integer_activations_are_built(built: Callable[..., Built]):
    engine = built("llama-biases", Static(Grid(8, positive=True)))
    check_native(engine)
    assert engine.layers["QUANTIZE"] > 0
