"""What holds for every test: no telemetry, no network, no chance. And what many of them need: a manifest, a model."""

import gc
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from doubles.geometries import uniform
from doubles.plans import plan_of
from doubles.shared import shared
from hypothesis import HealthCheck, settings

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of torch: see one_thread

from llmc import bundle

# The same examples in every run, none of them too slow on a busy machine, and none left behind in a folder.
settings.register_profile(
    "llmc", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("llmc")

# A shell without job control starts what it puts into the background deaf to Ctrl-C, and so would be every process
# that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests and what they import are a million objects, which live to the end: nobody looks for garbage
    among them, neither while they come, which took five seconds, nor later. The oldest generation is hardly looked
    through: with torch in it that takes half a second, and took an eighth of all time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], 500)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test reads or writes the cache of whoever runs it, and neither does a process that a test starts."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMC_CACHE", str(folder))
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Models here are tiny: a second thread spins for a core that another test process needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        yield


@pytest.fixture(scope="session", autouse=True)
def replayed_here() -> Iterator[None]:
    """Finished bundles are replayed in this process: it has the doubles of devices, and need not start."""
    try:
        from doubles.replays import in_this_process
    except ImportError:  # where nothing is built: on a device
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmc.optimize.judge.replay._answer", in_this_process)
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """The small model that comes with the repository."""
    return ROOT / "recipes" / "tiny" / "checkpoint"


@pytest.fixture(scope="session")
def one_layer(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model without its layers but the first, which is exported six times as fast."""
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("layer") / "checkpoint")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def manifest() -> bundle.Manifest:
    """A bundle's manifest with every field set; it lists no files."""
    return bundle.Manifest(
        schema_version=bundle.SCHEMA_VERSION,
        llmc_version="0.1.0",
        graph_contract=bundle.GRAPH_CONTRACT_VERSION,
        geometry=uniform("llama", 2, 64, 128, 4, 2, 16, 320, 512, True, (0, 128)),
        source=bundle.Source("tiny", "f" * 64, "float16", 123_456),
        generation=bundle.Generation((2, 3), None, False, 0.7, 50, None, 0.05),
        notes=("generation_config.json: num_beams=4 is not supported and was left out",),
        target=bundle.Target("cpu", "onnxruntime", "1.31.1", "1.31.0"),
        recipe=bundle.Recipe(
            name="default",
            precision="int8",
            scheme="rtn",
            block_size=128,
            symmetric=True,
            head="int8",
            phases="split",
            activations="per-token",
            smoothing=0.0,
            cache="float32",
            layers={},
            budget=bundle.Budget(0.01, 0.98, 0.02),
            calibration=bundle.Calibration("notes.txt", "c" * 64, False, 64, 512),
        ),
        limits=bundle.Limits(512, 1, 128),
        memory=plan_of(
            engine=500,
            tokenizer=50,
            weights=1000,
            embedding=200,
            workspace=64,
            workspace_per_token=8,
            cache_per_token=16,
            logits=30,
        ),
        cache="float32",
        graphs=dict.fromkeys(("prefill", "decode"), bundle.Graph("decode.onnx", 1000, 900)),
        quality=bundle.Quality(
            text="golden prompts",
            sha256="",
            positions=64,
            window=0,
            reference_perplexity=20.0,
            phases={
                "prefill": bundle.PhaseQuality(20.1, 0.001, 0.01, 0.99),
                "decode": bundle.PhaseQuality(20.2, 0.002, 0.02, 0.98),
            },
            greedy_match=14.5,
            greedy_tokens=16,
        ),
        golden=(bundle.GoldenPrompt((1, 2), (3, 4), (0.5, 1.0), (3, 9), (7.25, 6.5), (3, 8), (7.0, 6.0)),),
        golden_tolerance=0.25,
        golden_spread=0.1,
        files={},
    )


@pytest.fixture(scope="session")
def one_trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What torch traces follows from the config and the weights' types, and is nearly all that a tiny model's export
    takes: each decoder is traced once for all processes that run tests. Torch makes its table of operators once."""
    import onnx_ir as ir
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from llmc.export import graph, tower

    def save(model: ir.Model, path: Path) -> None:
        for value in model.graph.initializers.values():
            if isinstance(getattr(value.const_value, "raw", None), FakeTensor):  # a weight, which has no values yet
                fake = value.const_value
                value.const_value = ir.ExternalTensor("", 0, fake.nbytes, fake.dtype, shape=fake.shape, name=value.name)
        ir.save(model, path)

    def trace(make: Callable[[], Any], tensors: dict[str, Any], *samples: Any, **options: bool) -> ir.Model:
        types = {name: graph._TORCH_DTYPES.get(tensors[name].dtype) for name in sorted(tensors)}
        code, cells = make.__code__, [cell.cell_contents for cell in make.__closure__ or ()]
        key = repr((code.co_filename, code.co_firstlineno, cells, types))
        name = f"trace-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        made = shared(tmp_path_factory, name, lambda it: save(real(make, tensors, *samples, **options), it / "onnx"))
        return ir.load(made / "onnx")

    real = graph.trace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        patch.setattr(graph, "trace", trace)
        patch.setattr(tower, "trace", trace)
        yield


@pytest.fixture(scope="session")
def tiny_export(tiny_checkpoint: Path, one_trace: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model exported."""
    from llmc.export import export

    return shared(tmp_path_factory, "tiny", lambda folder: export(tiny_checkpoint, folder / "export")) / "export"


@pytest.fixture(scope="session")
def layer_export(one_layer: Path, one_trace: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That layer exported, for builds whose depth is not what is tested."""
    from llmc.export import export

    return shared(tmp_path_factory, "layer", lambda folder: export(one_layer, folder / "export")) / "export"


@pytest.fixture(scope="session")
def tiny_bundle(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model built with the defaults: int8, one graph. Tests that change it work on a copy."""
    from llmc.optimize.build import build
    from llmc.optimize.recipe import BuildRequest

    return (
        shared(tmp_path_factory, "int8", lambda folder: build(BuildRequest(tiny_export, folder / "bundle"))) / "bundle"
    )


@pytest.fixture(scope="session")
def split_bundle(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model built as int8 with a graph for each phase."""
    from llmc.optimize.build import build
    from llmc.optimize.recipe import BuildRequest, Request

    two = Request(phases="split")
    return (
        shared(
            tmp_path_factory, "split", lambda folder: build(BuildRequest(tiny_export, folder / "bundle", recipe=two))
        )
        / "bundle"
    )


@pytest.fixture(scope="session")
def fp32_bundle(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model built in float32. Tests that change it work on a copy."""
    from llmc.optimize.build import build
    from llmc.optimize.recipe import BuildRequest

    def make(folder: Path) -> None:
        build(BuildRequest(tiny_export, folder / "bundle", precision="fp32"))

    return shared(tmp_path_factory, "fp32", make) / "bundle"


@pytest.fixture(scope="session")
def tiny_in(tiny_export: Path, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The small model's bundle in a precision, for 8 rows, built when first asked for. Nobody changes it."""
    from llmc.optimize.build import build
    from llmc.optimize.recipe import BuildRequest

    def bundle_in(precision: str) -> Path:
        def make(folder: Path) -> None:
            build(BuildRequest(tiny_export, folder / "bundle", precision=precision, max_batch=8))

        return tiny_bundle if precision == "int8" else shared(tmp_path_factory, f"{precision} 8", make) / "bundle"

    return bundle_in


@pytest.fixture(scope="session")
def adapter_bundles(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with room for two adapters of rank 8, ``fp32`` and ``int8``, which have ``sql`` and ``law``; and
    these in folders of PEFT, of ranks 8 and 4."""
    from doubles.adapters import draw_factors, write_adapter

    from llmc.export.adapters import add_adapter
    from llmc.optimize.build import build
    from llmc.optimize.recipe import BuildRequest

    def make(folder: Path) -> None:
        for precision in ("fp32", "int8"):
            build(BuildRequest(tiny_export, folder / precision, precision=precision, max_batch=4, adapters=2, rank=8))
        geometry = bundle.read_bundle(folder / "fp32").geometry
        write_adapter(folder / "sql", draw_factors(geometry))
        write_adapter(folder / "law", draw_factors(geometry, rank=4, seed=2), r=4)
        for precision in ("fp32", "int8"):
            for name in ("sql", "law"):
                add_adapter(folder / precision, folder / name, name)

    return shared(tmp_path_factory, "adapters", make)


@pytest.fixture(scope="session")
def encoder_bundles(one_trace: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model that embeds (``embed``), and one that ranks (``rank``)."""
    from doubles import encoders

    from llmc.export import export
    from llmc.optimize.build import build
    from llmc.optimize.recipe import BuildRequest

    def make(folder: Path) -> None:
        for name, write in (("embed", encoders.write_embedder), ("rank", encoders.write_reranker)):
            made = export(write(folder / f"{name}-checkpoint"), folder / f"{name}-export").output
            build(BuildRequest(made, folder / name, precision="fp32"))

    folder = shared(tmp_path_factory, "encoders", make)
    return {name: folder / name for name in ("embed", "rank")}


@pytest.fixture(scope="session")
def diffusion_models(one_trace: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each of ``llada`` and ``Dream`` the checkpoint, its ``-export``, and its bundle in ``-fp32``."""
    from doubles import diffusing

    from llmc.export import export
    from llmc.optimize.build import build
    from llmc.optimize.recipe import BuildRequest

    def make(folder: Path) -> None:
        for family in diffusing.SHIFTS:
            export(diffusing.write_checkpoint(folder / family, family), folder / f"{family}-export")
            build(BuildRequest(folder / f"{family}-export", folder / f"{family}-fp32", precision="fp32"))

    return shared(tmp_path_factory, "diffusion", make)
