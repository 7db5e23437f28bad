"""The builder's calls against the recorded interfaces of TensorRT 10.3 ... 11.4, which cannot be installed here.

A recorded library raises at every name and argument that its version does not have, so a build that ends has proven
its calls; what they compute, only a GPU can tell.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from doubles.engines import build_decoder, spec_of
from doubles.recorded import PLAN, SCRATCH, VERSIONS, RecordedLibrary, recorded_rtx, replaced

from llmc.bundle import EngineConfig
from llmc.errors import BuildError, GpuError, ResourceError
from llmc.optimize.tensorrt.flags import compiler_flags
from llmc.optimize.tensorrt.messages import transcript
from llmc.optimize.tensorrt.select import build_select

NATIVE_VERSIONS = ("10.16", "11.4")
PRIMITIVE = """
<ir_version: 10, opset_import: ["" : 21]>
decoder (int64[batch, sequence] input_ids, float16[batch, 2, capacity, 16] past) =>
    (float16[batch, 2, capacity, 16] present)
{
    ids = Cast <to = 10> (input_ids)
    many = ReduceSum (ids)
    present = Add (past, many)
}
"""


@pytest.fixture
def basic(save: Callable[..., Path]) -> Path:
    """A graph of operators that every version has."""
    return save(PRIMITIVE)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_takes_our_calls(version: str, basic: Path, primitive: EngineConfig):
    library = RecordedLibrary(version)
    build_decoder(library, basic, primitive)
    assert basic.with_name("engine.plan").read_bytes() == PLAN
    assert basic.with_name("engine.json").exists()


@pytest.mark.parametrize("version", NATIVE_VERSIONS)
def test_native_versions_take_our_calls(version: str, decoder: Path, config: EngineConfig):
    library = RecordedLibrary(version)
    report = build_decoder(library, decoder, config)
    assert report.aliases["present.0.key"] == "past_key_values.0.key"
    assert library.arguments("IAttention", "decomposable=") == [(True,)]


@pytest.mark.parametrize("version", NATIVE_VERSIONS)
def test_a_scale_that_a_graph_asks_for_is_left(version: str, save: Callable[..., Path], graph_text: str, config: Any):
    """Of graphs from before the scale was the query's alone."""
    scaled = save(graph_text.replace("<scale = 1.0>", "<scale = 0.5>"))
    with pytest.raises(AssertionError, match="all keys are multiplied by a scale at every step"):
        build_decoder(RecordedLibrary(version), scaled, config)


def test_the_workspace_is_the_librarys_unless_it_is_given(basic: Path, primitive: EngineConfig):
    library = RecordedLibrary("11.4")
    build_decoder(library, basic, replace(primitive, workspace=None))
    assert library.arguments("IBuilderConfig", "set_memory_pool_limit") == []


@pytest.mark.parametrize(("given", "lacks"), [(SCRATCH - 1, True), (SCRATCH, False), (None, False)])
def test_a_limit_below_what_attention_needs_fails_its_build(
    decoder: Path, config: EngineConfig, given: int | None, lacks: bool
):
    asked = replace(config, workspace=given)
    if not lacks:
        build_decoder(RecordedLibrary("11.4"), decoder, asked)
        return
    with pytest.raises(ResourceError, match=r"for node n\.mixed due to insufficient workspace"):
        build_decoder(RecordedLibrary("11.4"), decoder, asked)


@pytest.mark.parametrize(("rtx", "turing"), [(False, {"BFLOAT16", "INT4"}), (True, {"BFLOAT16", "INT8", "INT4"})])
@pytest.mark.parametrize("kind", ["FLOAT16", "BFLOAT16", "INT8", "INT4", "FLOAT8E4M3FN"])
def test_types_that_a_gpu_does_not_have_fail_the_build(
    save: Callable[..., Path], primitive: EngineConfig, rtx: bool, turing: set[str], kind: str
):
    path = save(PRIMITIVE)
    model = onnx.load(path)
    model.graph.initializer.append(
        onnx.TensorProto(name="w", dims=[0], data_type=onnx.TensorProto.DataType.Value(kind))
    )
    path.write_bytes(model.SerializeToString())
    float8 = {"FLOAT8E4M3FN"}
    for gpu, lacks in {"7.5": turing | float8, "8.0": float8, "8.6": float8, "8.9": set()}.items():
        library = recorded_rtx() if rtx else RecordedLibrary("11.4", gpu=gpu)
        asked = replace(primitive, compute_capabilities=(gpu,))
        if kind in lacks:
            with pytest.raises(BuildError, match=rf"{kind} is not supported on compute capability {gpu}"):
                build_decoder(library, path, asked)
        else:
            build_decoder(library, path, asked)


def test_on_thor_products_are_not_merged(basic: Path, primitive: EngineConfig):
    told = replace(primitive, flags=compiler_flags("10.13", "11.0"))
    build_decoder(RecordedLibrary("10.13", gpu="11.0"), basic, told)
    with pytest.raises(AssertionError, match="products of one row that share an input would be merged wrongly"):
        build_decoder(RecordedLibrary("10.13", gpu="11.0"), basic, primitive)


def test_on_thor_products_that_share_an_input_must_be_packed(decoder: Path, config: EngineConfig):
    apart = replace(config, flags=compiler_flags("11.4", "11.0"))
    with pytest.raises(AssertionError, match="several products read normed: they would be merged wrongly"):
        build_decoder(RecordedLibrary("11.4", gpu="11.0"), decoder, apart)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_option_is_one_that_the_version_has(version: str, basic: Path, primitive: EngineConfig):
    asked = replace(
        primitive,
        workspace=1 << 20,
        optimization_level=5,
        version_compatible=True,
        hardware_compatibility="ampere",
        compute_capabilities=("8.7",),  # TensorRT cannot be told its GPU; that is only recorded
        stripped=True,
    )
    library = RecordedLibrary(version)
    build_decoder(library, basic, asked)
    flags = [flag.name for (flag,) in library.arguments("IBuilderConfig", "set_flag")]
    assert flags == ["VERSION_COMPATIBLE", "STRIP_PLAN", "REFIT_IDENTICAL"]
    assert library.arguments("IBuilderConfig", "set_memory_pool_limit") == [(library.MemoryPoolType.WORKSPACE, 1 << 20)]
    assert library.arguments("IBuilderConfig", "builder_optimization_level=") == [(5,)]
    ((level,),) = library.arguments("IBuilderConfig", "hardware_compatibility_level=")
    assert level.name == "AMPERE_PLUS"
    ((verbosity,),) = library.arguments("IBuilderConfig", "profiling_verbosity=")
    assert verbosity.name == "DETAILED"


@pytest.mark.parametrize("version", VERSIONS)
def test_select_engines_take_calls_that_the_version_has(version: str, config: EngineConfig, tmp_path: Path):
    library = RecordedLibrary(version)
    asked = spec_of(library, replace(config, stripped=True))
    build_select(asked, tmp_path / "select.plan", vocab_size=96, candidates=8)
    assert library.arguments("IBuilderConfig", "set_flag") == [], "it has no graph to be refitted from"
    assert library.arguments("IOptimizationProfile", "set_shape") == [("logits", (1, 96), (1, 96), (4, 96))]
    assert [path.name for path in tmp_path.iterdir()] == ["select.plan"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_network_is_strongly_typed(version: str, basic: Path, primitive: EngineConfig):
    library = RecordedLibrary(version)
    build_decoder(library, basic, primitive)
    strongly_typed = 1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert library.arguments("Builder", "create_network") == [(strongly_typed,)]


@pytest.mark.parametrize("version", VERSIONS)
def test_float32_is_not_rounded_to_tf32(version: str, basic: Path, primitive: EngineConfig):
    library = RecordedLibrary(version)
    build_decoder(library, basic, primitive)
    assert library.arguments("IBuilderConfig", "clear_flag") == [(library.BuilderFlag.TF32,)]


def test_decode_is_the_first_profile_and_prefill_the_second(decoder: Path, config: EngineConfig):
    library = RecordedLibrary("11.4")
    build_decoder(library, decoder, config)
    shapes = library.arguments("IOptimizationProfile", "set_shape")
    half = len(shapes) // 2
    assert shapes[0] == ("input_ids", (1, 1), (1, 1), (4, 1))
    assert shapes[half] == ("input_ids", (1, 1), (1, 8), (1, 8))
    assert ("cache_slots", (8,), (16,), (32,)) in shapes[:half]
    cache = ((1, 2, 32, 16), (1, 2, 32, 16), (4, 2, 32, 16))
    assert ("past_key_values.0.key", *cache) in shapes[:half]
    steps = [call for call in library.names("IBuilderConfig") if call == "add_optimization_profile"]
    assert len(steps) == 2


def test_without_a_static_capacity_the_cache_is_as_long_as_the_bucket(basic: Path, primitive: EngineConfig):
    library = RecordedLibrary("10.3")
    build_decoder(library, basic, primitive)
    shapes = library.arguments("IOptimizationProfile", "set_shape")
    assert ("past", (1, 2, 8, 16), (1, 2, 16, 16), (4, 2, 32, 16)) in shapes


def test_weights_are_given_by_address_where_the_parser_takes_them(decoder: Path, config: EngineConfig):
    library = RecordedLibrary("11.4")
    build_decoder(library, decoder, config)
    assert library.names("OnnxParser")[:2] == ["__init__", "load_model_proto"]
    given = {name: size for name, _, size in library.arguments("OnnxParser", "load_initializer")}
    assert given["embed"] == 96 * 32 * 2
    assert "parse" not in library.names("OnnxParser")


def test_older_parsers_find_the_weights_beside_the_graph(basic: Path, primitive: EngineConfig):
    library = RecordedLibrary("10.3")
    build_decoder(library, basic, primitive)
    ((_, path),) = library.arguments("OnnxParser", "parse")
    assert path == str(basic)


def test_the_engine_is_written_in_pieces_where_the_builder_can(basic: Path, primitive: EngineConfig):
    for version, whole in (("10.3", True), ("10.13", False)):
        library = RecordedLibrary(version)
        build_decoder(library, basic, primitive)
        assert ("build_serialized_network" in library.names("Builder")) is whole
        assert ("build_serialized_network_to_stream" in library.names("Builder")) is not whole


def test_a_native_graph_is_refused_by_an_older_parser_with_its_nodes(decoder: Path, config: EngineConfig):
    with pytest.raises(BuildError, match=r"n.normed \(RMSNormalization\): no importer registered; n.q_turned"):
        build_decoder(RecordedLibrary("10.13"), decoder, config)


def test_a_parser_that_passes_over_an_input_is_found_out(decoder: Path, config: EngineConfig):
    library = RecordedLibrary("11.4", drops=(("Attention", 3),))
    with pytest.raises(BuildError, match=r"left out part of the graph.*: Attention n.mixed does not get mask"):
        build_decoder(library, decoder, config)


# -------------------------------------------------------------------------------------------------- what it logs


@pytest.mark.parametrize(
    "text",
    [
        "Unused Input: lengths",
        "[RemoveDeadLayers] Input Tensor lengths is unused or used only at compile-time, but is not being removed.",
        "node mixed: attribute softcap is ignored",
        "Attention with these inputs is unsupported, it will be ignored",
    ],
)
@pytest.mark.parametrize("version", ["10.3", "11.4"])
def test_a_parser_that_says_that_something_was_left_out_fails_the_build(
    version: str, text: str, basic: Path, primitive: EngineConfig
):
    library = RecordedLibrary(version, parser_log=(("WARNING", text),))
    with pytest.raises(BuildError, match=r"the parser left out part of the graph, so that results would be wrong: "):
        build_decoder(library, basic, primitive)
    assert not basic.with_name("engine.plan").exists()


def test_what_the_builder_calls_unused_or_unsupported_ends_no_build_and_is_kept_word_for_word(
    basic: Path, primitive: EngineConfig
):
    """It may have worked for an hour, and means kernels, formats and platforms."""
    said = (("WARNING", "Unused Input: x"), ("WARNING", "layer y:  format is not supported"), ("ERROR", "tactic lost"))
    report = build_decoder(RecordedLibrary("11.4", log=said), basic, primitive)
    assert [(message.severity, message.text) for message in report.messages] == list(said)
    assert json.loads(transcript(report.messages)) == [list(message) for message in said]
    assert json.loads(transcript(())) == []


@pytest.mark.parametrize(
    "text",
    [
        "Make sure input input_ids has Int64 binding.",
        "Disabling unused tactic source: EDGE_MASK_CONVOLUTIONS",
        "Skipping tactic 0x2: unsupported by this layer",
    ],
)
def test_harmless_warnings_are_not_even_reported(text: str, basic: Path, primitive: EngineConfig):
    library = RecordedLibrary("11.4", log=(("WARNING", text), ("INFO", "Unused Input: x")))
    assert build_decoder(library, basic, primitive).warnings == ()


@pytest.mark.parametrize(
    "text",
    ["CUDA lazy loading is not enabled", "The flag STRONGLY_TYPED is ignored", "BF16 is unsupported on this GPU"],
)
def test_other_warnings_are_reported_once(text: str, basic: Path, primitive: EngineConfig):
    library = RecordedLibrary("11.4", log=(("WARNING", text),) * 2)
    assert build_decoder(library, basic, primitive).warnings == (text,)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("no kernel for n.mixed", BuildError, "building engine.plan failed: no kernel for n.mixed"),
        ("Requested amount of GPU memory: out of memory", ResourceError, "ask for a smaller context, chunk or batch"),
        ("cudaError 35: no driver", GpuError, "needs a GPU and its driver"),
    ],
)
@pytest.mark.parametrize("version", ["10.3", "11.4"])
def test_a_build_that_is_given_up_says_why(
    version: str, text: str, error: type[Exception], message: str, basic: Path, primitive: EngineConfig
):
    library = RecordedLibrary(version, builds=False, log=(("ERROR", text), ("ERROR", text)))
    with pytest.raises(error, match=message):
        build_decoder(library, basic, primitive)
    assert not basic.with_name("engine.plan").exists()


def test_an_internal_error_fails_a_build_that_goes_on(basic: Path, primitive: EngineConfig):
    library = RecordedLibrary("11.4", log=(("INTERNAL_ERROR", "assertion failed"),))
    with pytest.raises(BuildError, match="assertion failed"):
        build_decoder(library, basic, primitive)


def test_a_library_without_a_gpu_says_what_it_logged(
    basic: Path, primitive: EngineConfig, monkeypatch: pytest.MonkeyPatch
):
    def fail(library: RecordedLibrary, self: Any, native: Any) -> None:
        native.log(library.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    replaced(monkeypatch, "Builder", "__init__", fail)
    with pytest.raises(GpuError, match=r"tensorrt 10.3\S* cannot use a GPU here \(CUDA initialization failure"):
        build_decoder(RecordedLibrary("10.3"), basic, primitive)


@pytest.mark.parametrize("version", ["10.3", "11.4"])
def test_a_full_disk_is_told_and_leaves_nothing(
    version: str, basic: Path, primitive: EngineConfig, monkeypatch: pytest.MonkeyPatch
):
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    staged = basic.with_name(".engine.plan.part")
    staged.symlink_to("/dev/full")
    with pytest.raises(ResourceError, match=r"engine.plan cannot be written \(No space left"):
        build_decoder(RecordedLibrary(version), basic, primitive)
    assert not basic.with_name("engine.plan").exists()
    assert not staged.is_symlink()


# ------------------------------------------------------------------------------------------------- timing cache


@pytest.fixture
def kept_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Lets builds keep their times in a file."""

    def place(path: Path) -> Path:
        monkeypatch.setattr("llmc.optimize.tensorrt.timing_cache.place", lambda spec: path)
        return path

    return place


def test_the_timing_cache_is_kept_and_read_again(
    basic: Path, primitive: EngineConfig, tmp_path: Path, kept_at: Callable[[Path], Path]
):
    kept = kept_at(tmp_path / "times" / "l4")
    library = RecordedLibrary("10.3")
    build_decoder(library, basic, primitive)
    assert library.arguments("IBuilderConfig", "create_timing_cache") == [(b"",)]
    assert kept.read_bytes() == b"times"
    again = RecordedLibrary("10.3")
    build_decoder(again, basic, primitive)
    assert again.arguments("IBuilderConfig", "create_timing_cache") == [(b"times",)]
    assert list(kept.parent.iterdir()) == [kept]


def test_a_damaged_timing_cache_is_replaced_with_a_warning(
    basic: Path,
    primitive: EngineConfig,
    tmp_path: Path,
    kept_at: Callable[[Path], Path],
    caplog: pytest.LogCaptureFixture,
):
    kept = kept_at(tmp_path / "times")
    kept.write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING):
        build_decoder(RecordedLibrary("11.4"), basic, primitive)
    assert "times: the timing cache is not used (it was written by another version" in caplog.text
    assert kept.read_bytes() == b"times"


def test_a_timing_cache_that_cannot_be_written_is_lost_with_a_warning(
    basic: Path,
    primitive: EngineConfig,
    tmp_path: Path,
    kept_at: Callable[[Path], Path],
    caplog: pytest.LogCaptureFixture,
):
    (tmp_path / "file").touch()
    kept_at(tmp_path / "file" / "times")
    with caplog.at_level(logging.WARNING):
        build_decoder(RecordedLibrary("11.4"), basic, primitive)
    assert "the timing cache cannot be kept" in caplog.text
    assert basic.with_name("engine.plan").exists()


# ---------------------------------------------------------------------------------------------- the double itself


def test_a_recorded_library_has_nothing_that_was_not_recorded():
    library = RecordedLibrary("10.3")
    with pytest.raises(AttributeError):
        _ = library.IStreamWriter
    builder = library.Builder(library.ILogger())
    with pytest.raises(AttributeError):
        _ = builder.build_serialized_network_to_stream
    with pytest.raises(AttributeError, match="IBuilderConfig has no turbo"):
        builder.create_builder_config().turbo = True
    with pytest.raises(TypeError, match="incompatible arguments"):
        builder.create_network(1, 2)
    with pytest.raises(AssertionError, match="has no"):
        type("Monitor", (library.IProgressMonitor,), {"phase_began": lambda *_: None})
