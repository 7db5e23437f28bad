"""Bundles for GPUs, built where there is none: whole, judged on the CPU, published only when they keep what was asked.

TensorRT-RTX builds real engines without a GPU. TensorRT does not: its recorded interfaces stand in for it. Engines are
deferred where the test is about the graph.
"""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from doubles.machines import H200, NO_GPU, Probe
from doubles.recorded import PLAN, RecordedLibrary

from llmc.bundle import Budget, EngineConfig, Manifest, Part, read_bundle, verify_files
from llmc.errors import BuildError, GpuError, MissingExtraError
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.build import BuildReport, build
from llmc.optimize.plan.device import device_plan
from llmc.optimize.recipe import BuildRequest, Request
from llmc.optimize.recipe.engine import EngineRequest
from llmc.runtime import load
from llmc.runtime.loading import verify

UNTIED, TIED = "llama-biases", "qwen2-tied-bf16"
SMALL = {"max_context": 64, "max_batch": 2}
# Tokens of the answers to golden prompts, the last of which is the long one of bundles with an engine.
ANSWERED = 4 * 16 + 32
DEFERRED = EngineRequest(deferred=True)
# One layer kind in more bits than the others, and the head too.
INT4 = Request(precision="int4", head="int8", layers={"*.mlp.down_proj": "int8"})
# Mean KL of a decoder of random weights, several times what was measured: 1e-5, 1e-4, 0, 0.005 and 0.4. A lost
# bias alone gives more than 1.
LARGEST_KL = {"fp16": 1e-4, "bf16": 5e-4, "fp32": 1e-6, "int8": 0.02, "int4": 0.9}
COMPUTES = {"bf16": "bfloat16", "fp32": "float32"}
NO_DRIVER = "no NVIDIA driver was found; install it"


def no_driver(*_: object, **__: object) -> None:
    raise GpuError(NO_DRIVER)


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    """Whatever machine this is, it has no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmc.runtime.sessions.tensorrt.session.open_driver", no_driver)
        patch.setattr("llmc.runtime.sessions.onnxruntime.cuda.open_driver", no_driver)
        patch.setattr("llmc.optimize.tensorrt.spec.probe_driver", lambda: NO_GPU.driver)
        patch.setattr("llmc.runtime.host.probe.probe_driver", lambda: NO_GPU.driver)
        yield


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RecordedLibrary]:
    """Make this a machine with TensorRT, and a GPU or none."""

    def become(probe: Probe = NO_GPU, **options: Any) -> RecordedLibrary:
        library = RecordedLibrary(**options)
        monkeypatch.setattr("llmc.optimize.tensorrt.spec.load_library", lambda engine: library)
        monkeypatch.setattr("llmc.optimize.tensorrt.spec.probe_driver", lambda: probe.driver)
        return library

    return become


@pytest.fixture(scope="module")
def engine_bundle(exported: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    """A bundle with a real engine of TensorRT-RTX."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this machine")
    output = tmp_path_factory.mktemp("rtx") / "bundle"
    return build(BuildRequest(exported(TIED).export, output, target="tensorrt-rtx", precision="fp16", **SMALL))


@pytest.fixture(scope="module")
def reads_text(exported: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random export with a tokenizer that makes tokens of text: a character each."""
    folder = Path(shutil.copytree(exported(UNTIED).export, tmp_path_factory.mktemp("text") / "export"))
    vocab = {chr(ord(" ") + i): i for i in range(95)}
    (folder / "tokenizer.json").unlink()
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def engine_of(manifest: Manifest) -> EngineConfig:
    assert manifest.engine is not None
    return manifest.engine


def whole(report: BuildReport) -> bool:
    """What the manifest lists is there as it is listed, and nothing beside it."""
    manifest = read_bundle(report.output)
    assert manifest == report.manifest
    assert list(verify_files(report.output, manifest)) == list(manifest.files)
    assert [path.name for path in report.output.parent.iterdir()] == [report.output.name]
    return {path.name for path in report.output.iterdir()} == {*manifest.files, "llmc.json"}


def test_a_bundle_with_an_engine_is_whole_and_says_what_it_is(engine_bundle):
    manifest, plan = engine_bundle.manifest, engine_of(engine_bundle.manifest)
    assert whole(engine_bundle)
    assert {"engine.plan", "build-log.json", "decoder.onnx", "weights.bin"} <= manifest.files.keys()
    assert (manifest.target.name, manifest.target.engine) == ("tensorrt-rtx", "tensorrt-rtx")
    assert manifest.target.engine_version == sys.modules["tensorrt_rtx"].__version__
    assert plan.buckets == (64,)
    assert (plan.verified, plan.compute_capabilities) == ("cpu", ())
    assert (manifest.recipe.compute, manifest.cache, manifest.golden_tolerance) == ("float16", "float16", 0.5)
    planned = device_plan(manifest.geometry, manifest.limits, manifest.recipe)
    assert manifest.device == planned.without("weights").add(Part("weights", manifest.files["engine.plan"].size))
    assert not {"weights", "cache"} & manifest.memory.parts(1).keys()
    assert manifest.graphs["prefill"] == manifest.graphs["decode"]
    assert len(manifest.golden) == 5


def request(precision: str) -> Request:
    return INT4 if precision == "int4" else Request(precision=precision)


def check_quality(manifest: Manifest, precision: str) -> None:
    assert manifest.recipe.compute == COMPUTES.get(precision, "float16")
    assert manifest.quality is not None
    for path in manifest.quality.phases.values():
        assert path.mean_kl is not None
        assert 0 <= path.mean_kl <= LARGEST_KL[precision]


@pytest.mark.parametrize("precision", LARGEST_KL)
def test_every_precision_is_judged_on_the_cpu(exported, tmp_path, precision):
    output, recipe = tmp_path / "out" / "bundle", request(precision)
    report = build(
        BuildRequest(exported(TIED).export, output, target="tensorrt", recipe=recipe, engine=DEFERRED, **SMALL)
    )
    assert whole(report)
    check_quality(report.manifest, precision)
    plan = engine_of(report.manifest)
    assert plan.file == ""
    assert plan.verified == ("float32" if precision == "bf16" else "cpu"), "no CPU computes in bfloat16"
    assert report.manifest.target.engine_version == "none"
    if precision != "bf16":
        assert verify(output, emulate=True).equal_tokens == ANSWERED
    opset = {
        entry.domain: entry.version
        for entry in onnx.load(output / "decoder.onnx", load_external_data=False).opset_import
    }
    assert opset == {"": 24}, "no operator but the standard's"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_every_precision_becomes_an_engine(exported, tmp_path, precision):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this machine")
    output = tmp_path / "out" / "bundle"
    report = build(
        BuildRequest(exported(UNTIED).export, output, target="tensorrt-rtx", recipe=request(precision), **SMALL)
    )
    assert whole(report)
    check_quality(report.manifest, precision)
    assert (output / "engine.plan").stat().st_size > 100_000
    assert engine_of(report.manifest).compute_capabilities == ()


@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_graphs_for_cuda_are_judged_on_the_cpu(exported, tmp_path, precision):
    output = tmp_path / "out" / "bundle"
    recipe = Request(precision=precision)
    report = build(BuildRequest(exported(TIED).export, output, target="cuda", recipe=recipe, **SMALL))
    assert whole(report)
    check_quality(report.manifest, precision)
    assert report.manifest.engine is None
    assert report.manifest.device is not None
    assert verify(output, emulate=True).equal_tokens == 64


def test_bfloat16_is_judged_by_a_twin_in_float32_of_which_nothing_stays(exported, tmp_path, monkeypatch):
    seen = []

    def spy(folder: Path, **options: Any) -> Any:
        model = load(folder, **options)
        seen.append((folder.name, folder.parent.name, model.manifest.recipe.compute, model.manifest.cache))
        return model

    monkeypatch.setattr("llmc.optimize.judge.finished.load", spy)
    output = tmp_path / "out" / "bundle"
    recipe = Request(precision="int8", compute="bfloat16")
    report = build(
        BuildRequest(exported(TIED).export, output, target="tensorrt", recipe=recipe, engine=DEFERRED, **SMALL)
    )
    [(name, parent, compute, cached)] = seen
    assert name.startswith(".float32.")
    assert parent == "new", "in the room where the bundle is made"
    assert (compute, cached) == ("float32", "float32")
    assert whole(report), "neither in the folder nor in the manifest"
    assert (report.manifest.recipe.compute, report.manifest.cache) == ("bfloat16", "bfloat16")
    assert engine_of(report.manifest).verified == "float32"
    assert len(report.manifest.golden) == 5
    with pytest.raises(GpuError, match="a bundle in bfloat16 cannot be run on a CPU"):
        verify(output, emulate=True)


def test_static_activations_are_calibrated(reads_text, tmp_path):
    recipe = Request(precision="int8", activations="static", smoothing=0.5)
    asked = {"decoder": StreamedDecoder, "samples": 2, "length": 32}
    report = build(
        BuildRequest(
            reads_text, tmp_path / "bundle", target="tensorrt", recipe=recipe, **asked, engine=DEFERRED, **SMALL
        )
    )
    assert report.manifest.recipe.calibration is not None
    assert report.manifest.recipe.calibration.default
    assert report.manifest.recipe.activations == "static"
    graph = onnx.load(report.output / "decoder.onnx", load_external_data=False).graph
    rounded = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    assert len(rounded) >= 4 * report.manifest.geometry.layers, "one for each activation that linears read"
    known = {tensor.name for tensor in graph.initializer}
    assert all(node.input[1] in known for node in rounded), "TensorRT takes no scale that is computed"
    assert verify(report.output, emulate=True).equal_tokens == ANSWERED


def test_a_broken_budget_publishes_nothing_and_names_the_worst_layers(reads_text, tmp_path):
    with pytest.raises(BuildError) as refused:
        build(
            BuildRequest(
                reads_text,
                tmp_path / "out" / "bundle",
                target="tensorrt-rtx",
                recipe=INT4,
                budget=Budget(max_kl=0.1),
                engine=DEFERRED,
                **SMALL,
            )
        )
    said = str(refused.value)
    assert list(tmp_path.iterdir()) == []
    assert "at most 0.1 is allowed" in said
    assert "Worst layers: " in said


def test_what_a_recipe_says_of_the_engine_holds_unless_the_caller_says_otherwise(exported, tmp_path):
    (tmp_path / "mine.toml").write_text("[engine]\noptimization_level = 1\nworkspace = 2097152\ndeferred = true\n")
    report = build(
        BuildRequest(
            exported(TIED).export,
            tmp_path / "bundle",
            target="tensorrt",
            recipe=tmp_path / "mine.toml",
            engine=EngineRequest(optimization_level=2),
            **SMALL,
        )
    )
    plan = engine_of(report.manifest)
    assert (plan.optimization_level, plan.workspace, plan.file) == (2, 2097152, "")


def test_tensorrt_makes_an_engine_for_the_gpu_at_hand(exported, tmp_path, installed):
    library = installed(H200)
    output = tmp_path / "out" / "bundle"
    asked = EngineRequest(optimization_level=2)
    report = build(
        BuildRequest(exported(TIED).export, output, target="tensorrt", precision="fp16", engine=asked, **SMALL)
    )
    assert whole(report)
    plan = engine_of(report.manifest)
    assert plan.optimization_level == 2
    assert plan.compute_capabilities == (H200.driver.devices[0].compute_capability,)
    assert report.manifest.target.engine_version == library.__version__
    assert (output / "engine.plan").read_bytes() == PLAN


def test_on_its_gpu_a_bundle_is_verified_by_running_it(exported, tmp_path, installed, monkeypatch):
    """The CPU stands in for the GPU: what is tested is whose word counts."""
    installed(H200)
    monkeypatch.setattr(
        "llmc.optimize.judge.finished.load", lambda folder, **_: load(folder, self_test=False, emulate=True)
    )
    report = build(
        BuildRequest(exported(TIED).export, tmp_path / "bundle", target="tensorrt", precision="fp16", **SMALL)
    )
    assert engine_of(report.manifest).verified == "device"
    known = dataclasses.asdict(report.manifest.graphs["decode"].invariance)
    assert any(known.values()), "which calls compute the same bits is measured where it will run"


def test_a_library_that_is_missing_is_said_before_any_work(exported, untouched, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    steps: list[str] = []
    with pytest.raises(MissingExtraError, match="tensorrt is not installed"):
        build(
            BuildRequest(exported(TIED).export, untouched, target="tensorrt", force=True),
            lambda step, _=None: steps.append(step),
        )
    assert steps == []
