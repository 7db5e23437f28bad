"""What an engine is asked for: defaults by what the library can do, refusals before any work, names of what is kept."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.geometries import uniform
from doubles.machines import H200, NO_GPU, ORIN, RTX_4090, THOR, Probe
from doubles.plans import FULL
from doubles.recorded import RecordedLibrary, replaced

from llmc.bundle import Limits, Manifest, Profile, read_bundle, write_manifest
from llmc.errors import BuildError, BundleError, GpuError, UsageError
from llmc.optimize.progress import silent
from llmc.optimize.recipe import Request
from llmc.optimize.recipe import resolve as resolve_recipe
from llmc.optimize.recipe.engine import EngineRequest
from llmc.optimize.targets import capabilities
from llmc.optimize.tensorrt import flags
from llmc.optimize.tensorrt.builder import EngineReport
from llmc.optimize.tensorrt.engine import LEAST_WORKSPACE, compile_engine, profiles_of
from llmc.optimize.tensorrt.network import Ranges
from llmc.optimize.tensorrt.spec import FIRST_BUCKET, PREFILL_OUTPUTS, EngineSpec, bucket_sizes, resolve_engine
from llmc.publish import file_entries
from llmc.runtime.sessions.tensorrt.library import Message

LIMITS = Limits(max_context=1000, max_batch=4, prefill_chunk=128)
GEOMETRY = uniform("llama", 2, 64, 128, 4, 2, 16, 320, 1024, True, (0, 0))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make this a machine with a library, TensorRT unless it is given, and what a probe finds."""

    def become(library: Any = None, probe: Probe = NO_GPU) -> Any:
        found = RecordedLibrary() if library is None else library
        monkeypatch.setattr("llmc.optimize.tensorrt.spec.load_library", lambda engine: found)
        monkeypatch.setattr("llmc.optimize.tensorrt.spec.probe_driver", lambda: probe.driver)
        return found

    return become


@pytest.fixture
def rtx(here: Callable[..., Any]) -> Any:
    """A machine with TensorRT-RTX and no GPU."""
    return here(pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this machine"))


def resolve(
    target: str = "tensorrt", limits: Limits = LIMITS, *, precision: str = "fp16", **request: Any
) -> EngineSpec:
    abilities = capabilities(target)
    recipe, _ = resolve_recipe(Request(precision=precision), abilities, limits.max_context, "test")
    return resolve_engine(abilities, GEOMETRY, recipe, limits, EngineRequest(**request))


def test_what_is_left_open_has_its_defaults(here):
    here()
    spec = resolve()
    config = spec.config
    assert (config.decode, config.prefill) == (Profile(4, 1, 1), Profile(1, 128, PREFILL_OUTPUTS))
    assert (config.workspace, config.optimization_level, config.flags) == (None, None, "")
    assert (config.compute_capabilities, spec.gpu) == ((), None)


@pytest.mark.parametrize(
    ("longest", "buckets"),
    [
        (2, (64,)),
        (FIRST_BUCKET, (256,)),
        (257, (256, 320)),
        (1000, (256, 512, 1024)),
        (4096, (256, 512, 1024, 2048, 4096)),
        (5000, (256, 512, 1024, 2048, 4096, 5056)),
    ],
)
def test_buckets_double_and_end_with_the_longest_context_in_whole_blocks(longest, buckets):
    assert bucket_sizes(longest) == buckets


def test_an_engine_of_tensorrt_rtx_is_for_many_gpus_unless_they_are_named(here, rtx):
    here(rtx, RTX_4090)
    assert resolve("tensorrt-rtx").config.compute_capabilities == ()
    assert resolve("tensorrt-rtx", compute_capabilities="8.6, 8.9,8.6").config.compute_capabilities == ("8.6", "8.9")


TURING = dataclasses.replace(RTX_4090.driver.devices[0], name="Tesla T4", compute_capability="7.5")
OLD_SERVER = dataclasses.replace(RTX_4090, driver=dataclasses.replace(RTX_4090.driver, devices=(TURING,)))


@pytest.mark.parametrize(
    ("precision", "probe", "message"),
    [
        ("bf16", OLD_SERVER, r"tensorrt, which has bf16 from compute capability 8\.0 on, Tesla T4 has 7\.5; build"),
        ("int4", OLD_SERVER, r"tensorrt, which has int4 from compute capability 8\.0 on, Tesla T4 has 7\.5"),
    ],
)
def test_a_precision_that_the_gpu_here_lacks_is_refused(here, precision, probe, message):
    here(probe=probe)
    with pytest.raises(UsageError, match=message):
        resolve(precision=precision)


def test_scratch_memory_is_the_librarys_choice_on_a_card_and_what_attention_needs_on_a_board(
    here, builder, manifest, tmp_path
):
    def given(probe: Probe, **asked: Any) -> tuple[int | None, int | None]:
        here(probe=probe)
        made = builder(2 * manifest.geometry.layers)
        plan = compile_engine(resolve(**asked), tmp_path / "decoder.onnx", manifest.geometry, silent)
        return made.engines[0][0].config.workspace, plan.workspace

    assert given(H200) == (None, None)
    assert given(ORIN) == (LEAST_WORKSPACE, None), "the manifest says what was asked for: nothing"
    long = Limits(max_context=1 << 21, max_batch=1, prefill_chunk=128)
    # Scores in float32 and their softmax, for each of 4 heads.
    assert given(ORIN, limits=long) == (2 * 4 * 4 * 128 * (1 << 21), None)
    assert given(ORIN, workspace=1 << 29) == (1 << 29, 1 << 29)


def test_the_compilers_flags_are_set_before_any_builder_is_made_and_are_recorded(here, monkeypatch):
    monkeypatch.delenv(flags.VARIABLE, raising=False)
    here(RecordedLibrary(gpu="11.0"), THOR)
    assert "-peep:fc_h_fusion=off" in resolve().config.flags
    assert flags.VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"compute_capabilities": "8.9"}, "is '8.9', but tensorrt builds for the GPU it runs on"),
        ({"workspace": 1000}, "workspace is 1000, expected 1048576 ... "),
        ({"workspace": 1 << 51}, "workspace is 2251799813685248, expected"),
        ({"optimization_level": 6}, "optimization_level is 6, expected 0 ... 5"),
        ({"optimization_level": -1}, "optimization_level is -1, expected 0 ... 5"),
    ],
)
def test_what_the_library_cannot_do_is_refused(here, asked, message):
    here()
    with pytest.raises(UsageError) as refused:
        resolve(**asked)
    assert message in str(refused.value)


def test_tensorrt_without_a_gpu_is_refused_before_any_work(here, monkeypatch):
    def fail(library: RecordedLibrary, self: Any, native_logger: Any) -> None:
        native_logger.log(library.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    replaced(monkeypatch, "Builder", "__init__", fail)
    here()
    with pytest.raises(GpuError, match="tensorrt 10.16.* cannot use a GPU here .CUDA initialization failure"):  # noqa: RUF043
        resolve()
    assert resolve(deferred=True).version == "none"


@pytest.fixture
def untouchable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither library nor GPU may be looked at."""
    monkeypatch.setattr(
        "llmc.optimize.tensorrt.spec.load_library", lambda engine: pytest.fail("the library was touched")
    )
    monkeypatch.setattr("llmc.optimize.tensorrt.spec.probe_driver", lambda: pytest.fail("the GPU was looked for"))


@pytest.mark.usefixtures("untouchable")
def test_a_deferred_engine_touches_no_library():
    spec = resolve(deferred=True, optimization_level=3)
    assert (spec.library, spec.version, spec.gpu) == (None, "none", None)
    assert spec.config.optimization_level == 3


class Builder:
    """Stands in for the builder: writes a file and takes notes."""

    def __init__(self, aliases: int) -> None:
        self.aliases = {f"present.{i}": f"past.{i}" for i in range(aliases)}
        self.engines: list[tuple[EngineSpec, tuple[Ranges, Ranges]]] = []

    def engine(
        self, spec: EngineSpec, graph: Path, output: Path, profiles: tuple[Ranges, Ranges], **given: Any
    ) -> EngineReport:
        self.engines.append((spec, profiles))
        output.write_bytes(b"engine")
        return EngineReport(self.aliases, (Message("WARNING", "the engine's"),), "fused")


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Builder]:
    def make(aliases: int) -> Builder:
        made = Builder(aliases)
        monkeypatch.setattr("llmc.optimize.tensorrt.engine.build_engine", made.engine)
        return made

    return make


def test_the_builder_gets_what_was_resolved_and_the_manifest_says_it(here, builder, manifest, tmp_path):
    here(probe=H200)
    made = builder(2 * manifest.geometry.layers)
    spec = resolve(optimization_level=2)
    plan = compile_engine(spec, tmp_path / "decoder.onnx", manifest.geometry, silent)
    [(given, profiles)] = made.engines
    assert given is spec
    assert profiles == profiles_of(spec.config)
    config = spec.config
    assert (config.optimization_level, config.workspace) == (2, None)
    assert (plan.file, plan.log, plan.attention) == ("engine.plan", "build-log.json", "fused")
    assert json.loads((tmp_path / plan.log).read_text()) == [["WARNING", "the engine's"]]
    assert (plan.compute, plan.compute_capabilities, plan.verified) == ("float16", ("9.0",), "no")
    assert (plan.workspace, plan.optimization_level) == (None, 2), "to be asked for again by a rebuild"
    assert plan.is_sound(LIMITS.max_context, LIMITS.max_batch, LIMITS.prefill_chunk)


@pytest.mark.parametrize("aliases", [3, 0])
def test_caches_that_are_not_updated_in_place_fail_the_build(here, builder, manifest, tmp_path, aliases):
    here()
    builder(aliases)
    with pytest.raises(BuildError, match=f"made {aliases} in-place cache updates of the graph, 4 are expected"):
        compile_engine(resolve(), tmp_path / "decoder.onnx", manifest.geometry, silent)


PLAN = FULL


@pytest.fixture
def save(tmp_path: Path, manifest: Manifest) -> Callable[..., Path]:
    """Writes a bundle whose files hold nothing of use; changes are of the engine's plan."""

    def write(**changes: Any) -> Path:
        names = ["decode.onnx", "engine.plan"]
        for name in names:
            (tmp_path / name).write_bytes(b"x")
        plan, files = dataclasses.replace(PLAN, **changes), file_entries(tmp_path, names)
        write_manifest(dataclasses.replace(manifest, engine=plan, files=files), tmp_path)
        return tmp_path

    return write


@pytest.mark.parametrize(
    "changes",
    [
        {"buckets": (512, 256)},
        {"buckets": (256, 256, 512)},
        {"buckets": ()},
        {"buckets": (0, 512)},
        {"buckets": (256, 511)},
        {"decode": Profile(1, 2, 1)},
        {"decode": Profile(0, 1, 1)},
        {"decode": Profile(4, 1, 1)},
        {"prefill": Profile(1, 128, 0)},
        {"prefill": Profile(1, 128, 129)},
        {"prefill": Profile(1, 64, 32)},
        {"compute_capabilities": ("8.7; reboot",)},
        {"workspace": 0},
        {"border": "int8"},
    ],
    ids=str,
)
def test_a_plan_that_no_build_writes_is_refused(save, changes):
    with pytest.raises(BundleError, match=r"the engine in llmc\.json cannot be right|llmc\.json is corrupt \(engine\."):
        read_bundle(save(**changes))
