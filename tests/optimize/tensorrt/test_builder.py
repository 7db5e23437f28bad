"""Engines of TensorRT-RTX, built without a GPU: what is built, what is refused, and with which words."""

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import BuildError, GpuError, ResourceError, UsageError
from llmc.optimize.tensorrt.builder import build_engine
from llmc.optimize.tensorrt.monitor import INTERVAL, MemoryWatch, Monitor, anonymous_bytes
from llmc.optimize.tensorrt.order import EngineOrder, Layer, Options
from llmc.plans import Profile

# Bytes, far above what the interpreter takes and gives back meanwhile.
HELD = 50_000_000
PATIENCE_S = 120  # after which a thread that should look at memory counts as not looking
CACHES = ("past_key_values.0.key", "past_key_values.0.value")


def with_options(order: EngineOrder, **options: Any) -> EngineOrder:
    return replace(order, options=replace(order.options, **options))


def attention(layers: tuple[Layer, ...]) -> list[str]:
    return [layer.name for layer in layers if layer.type == "ATTENTION_INPUT"]


def leftovers(order: EngineOrder) -> list[str]:
    """Files that a failed build left behind."""
    return [path.name for path in order.output.parent.iterdir() if "engine" in path.name]


def test_an_engine_is_built_from_mapped_weights(rtx: Any, decoder: Path, order: EngineOrder):
    report = build_engine(rtx, decoder, order)
    assert order.output.stat().st_size == report.size > 10_000
    assert report.aliases == {"present.0.key": CACHES[0], "present.0.value": CACHES[1]}
    assert [layer.type for layer in report.layers].count("KV_CACHE_UPDATE") == 2
    assert attention(report.layers) == ["n.mixed_AttentionInput"]
    assert report.warnings == ()
    assert report.seconds > 0
    assert report.host_memory is not None
    assert report.host_memory > report.size
    assert report.version == rtx.__version__


def test_the_inspector_tells_types_shapes_and_profiles(rtx: Any, decoder: Path, order: EngineOrder):
    build_engine(rtx, decoder, order)
    found = json.loads(order.inspector.read_text())
    inputs = {tensor["name"]: (tensor["dtype"], tensor["shape"]) for tensor in found["inputs"]}
    assert inputs["input_ids"] == ("INT64", [-1, -1])
    assert inputs[CACHES[0]] == ("HALF", [-1, 2, 32, 16]), "the capacity is static"
    assert [tensor["name"] for tensor in found["outputs"]][:2] == ["logits", "hidden_states"]
    decode, prefill = found["profiles"]
    assert decode == {"batch": [1, 1, 4], "sequence": [1, 1, 1], "outputs": [1, 1, 1], "attended": [8, 16, 32]}
    assert prefill == {"batch": [1, 1, 1], "sequence": [1, 8, 8], "outputs": [1, 1, 2], "attended": [8, 16, 32]}
    assert found["library"] == "tensorrt_rtx"


def test_engines_are_built_for_other_gpus(rtx: Any, decoder: Path, order: EngineOrder):
    report = build_engine(rtx, decoder, with_options(order, compute_capabilities=("8.6", "8.9")))
    assert report.size > 10_000


# --------------------------------------------------------------------------------------- graphs that are not built


def test_an_input_that_the_parser_drops_fails_the_build(
    rtx: Any, save: Callable[..., Path], graph_text: str, order: EngineOrder
):
    """The parser takes the lengths of Attention-24 without a word and would attend as if there were none."""
    text = graph_text.replace("(q_turned, keys, values, mask)", "<is_causal = 1> (q_turned, keys, values,,,, lengths)")
    path = save(text.replace("mixed =", "lengths = Add (past_lengths, tokens)\n    mixed ="))
    with pytest.raises(BuildError, match=r"left out part of the graph.*: Attention n.mixed does not get lengths"):
        build_engine(rtx, path, order)
    assert leftovers(order) == []


def test_a_dropped_input_of_the_graph_fails_the_build(
    rtx: Any, save: Callable[..., Path], graph_text: str, order: EngineOrder
):
    text = graph_text.replace("(q_turned, keys, values, mask)", "<is_causal = 1> (q_turned, keys, values,,,, lengths)")
    path = save(text.replace("int64[attended] cache_slots,", "int64[attended] cache_slots, int64[batch] lengths,"))
    with pytest.raises(BuildError, match=r"left out part of the graph.*lengths"):
        build_engine(rtx, path, order)


def test_an_input_that_nothing_reads_fails_the_build(
    rtx: Any, save: Callable[..., Path], graph_text: str, order: EngineOrder
):
    text = graph_text.replace("int64[attended] cache_slots,", "int64[attended] cache_slots, int64[batch] spare,")
    with pytest.raises(BuildError, match=r"left out part of the graph.*spare is unused"):
        build_engine(rtx, save(text), order)
    assert leftovers(order) == []


def test_an_unsupported_attribute_is_named_with_its_node(
    rtx: Any, save: Callable[..., Path], graph_text: str, order: EngineOrder
):
    path = save(graph_text.replace("Attention (", "Attention <softcap = 30.0> ("))
    with pytest.raises(BuildError, match=r"refused by the parser: n.mixed \(Attention\): softcap"):
        build_engine(rtx, path, order)


def test_an_unsupported_operator_is_named_with_its_node(
    rtx: Any, save: Callable[..., Path], graph_text: str, order: EngineOrder
):
    text = graph_text.replace('["" : 24]', '["" : 24, "com.microsoft" : 1]').replace(
        "MatMul (chosen, head)",
        "com.microsoft.MatMulNBits <K = 32, N = 96, bits = 4, block_size = 32> (chosen, head, norm)",
    )
    with pytest.raises(BuildError, match=r"refused by the parser: n.scores \(MatMulNBits\)"):
        build_engine(rtx, save(text), order)


def test_a_dimension_without_a_range_is_named(rtx: Any, save: Callable[..., Path], graph_text: str, order: EngineOrder):
    with pytest.raises(BuildError, match="input past_lengths has the dimension 'rows'; expected one of batch"):
        build_engine(rtx, save(graph_text.replace("int64[batch] past_lengths", "int64[rows] past_lengths")), order)


def test_a_file_that_is_no_graph_is_refused(rtx: Any, decoder: Path, order: EngineOrder):
    decoder.write_bytes(b"\xff" * 40)
    with pytest.raises(BuildError, match="missing or corrupt"):
        build_engine(rtx, decoder, order)


def test_truncated_weights_are_refused_by_name(rtx: Any, decoder: Path, order: EngineOrder):
    weights = decoder.parent / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(BuildError, match=r"weights.bin ends inside sin; the file is truncated"):
        build_engine(rtx, decoder, order)
    weights.unlink()
    with pytest.raises(BuildError, match=r"weights.bin cannot be mapped .* yet holds embed"):
        build_engine(rtx, decoder, order)


# ------------------------------------------------------------------------------------------------------- options


def test_without_a_driver_stripped_engines_ask_for_a_gpu(rtx: Any, decoder: Path, order: EngineOrder):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    with pytest.raises(GpuError, match=r"needs a GPU and its driver.*leave out stripped and refittable"):
        build_engine(rtx, decoder, with_options(order, stripped=True))
    assert leftovers(order) == []


def test_a_gpu_that_the_library_does_not_build_for_is_named(rtx: Any, decoder: Path, order: EngineOrder):
    with pytest.raises(GpuError, match=r"tensorrt_rtx \S+ does not build for SM90; .* SM86"):
        build_engine(rtx, decoder, with_options(order, compute_capabilities=("9.0",)))


def test_a_workspace_too_small_says_what_would_help(rtx: Any, decoder: Path, order: EngineOrder):
    big = replace(order, decode=Profile(64, 1, 1), options=Options(workspace=1))
    with pytest.raises(ResourceError, match=r"ran out of memory: .*; allow a larger workspace"):
        build_engine(rtx, decoder, big)


def test_a_folder_that_is_not_there_is_named(rtx: Any, decoder: Path, order: EngineOrder, tmp_path: Path):
    with pytest.raises(ResourceError, match=r"no/engine.plan cannot be written \(No such file"):
        build_engine(rtx, decoder, replace(order, output=tmp_path / "no" / "engine.plan"))


def test_a_library_that_measures_nothing_keeps_no_times(rtx: Any, decoder: Path, order: EngineOrder, tmp_path: Path):
    build_engine(rtx, decoder, with_options(order, timing_cache=tmp_path / "times"))
    assert not (tmp_path / "times").exists()


def test_a_version_compatible_engine_is_built(rtx: Any, decoder: Path, order: EngineOrder):
    options = {"version_compatible": True, "hardware_compatibility": "ampere", "optimization_level": 0}
    assert build_engine(rtx, decoder, with_options(order, **options)).size > 10_000


# ------------------------------------------------------------------------------------------ progress and stopping


def test_progress_rises_to_the_end(rtx: Any, decoder: Path, order: EngineOrder):
    told: list[tuple[str, float | None]] = []
    build_engine(rtx, decoder, order, progress=lambda step, fraction=None: told.append((step, fraction)))
    shares = [share for step, share in told if share is not None]
    assert told[0] == ("reading the graph", None)
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 5


def test_an_error_of_the_progress_ends_the_build_and_reaches_the_caller(rtx: Any, decoder: Path, order: EngineOrder):
    def fail(step: str, fraction: float | None = None, /) -> None:
        if fraction:
            raise RuntimeError("the bar broke")

    with pytest.raises(RuntimeError, match="the bar broke"):
        build_engine(rtx, decoder, order, progress=fail)
    assert leftovers(order) == []


def test_ctrl_c_ends_the_build(rtx: Any, decoder: Path, order: EngineOrder):
    def interrupt(step: str, fraction: float | None = None, /) -> None:
        if fraction:
            signal.raise_signal(signal.SIGINT)

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        build_engine(rtx, decoder, order, progress=interrupt)
    assert leftovers(order) == []
    assert [thread for thread in threading.enumerate() if "ThreadPool" in thread.name and thread not in before] == []


def test_a_monitor_counts_phases_within_phases():
    told: list[float] = []
    monitor = Monitor(lambda step, fraction=None: told.append(fraction))
    monitor.phase_start("build", None, 2)
    monitor.phase_start("tactics", "build", 4)
    assert [monitor.step_complete("tactics", step) for step in range(4)] == [True] * 4
    monitor.phase_finish("tactics")
    assert monitor.step_complete("build", 0)
    monitor.phase_start("elsewhere", "nothing known", 3)
    assert monitor.step_complete("elsewhere", 0)
    monitor.stop()
    assert not monitor.step_complete("build", 1)
    assert told == [0.125, 0.25, 0.375, 0.5, 1.0]


def test_memory_is_watched_until_the_block_ends():
    with (watch := MemoryWatch()):
        before = anonymous_bytes()
        block = bytearray(HELD)
        block[:] = b"x" * HELD
        assert before is not None
        until = time.monotonic() + PATIENCE_S
        while (watch.peak or 0) - before <= HELD / 2 and time.monotonic() < until:
            time.sleep(INTERVAL)
        del block
    assert watch.peak is not None
    assert watch.peak - before > HELD / 2
    assert [thread for thread in threading.enumerate() if thread.name == "memory-watch"] == []


def test_memory_is_unknown_where_the_system_does_not_tell(tmp_path: Path):
    assert anonymous_bytes(tmp_path / "missing") is None
    (tmp_path / "status").write_text("VmRSS: 12 kB\n")
    assert anonymous_bytes(tmp_path / "status") is None
    (tmp_path / "status").write_text("VmRSS: 12 kB\nRssAnon:\t 3 kB\n")
    assert anonymous_bytes(tmp_path / "status") == 3072


# -------------------------------------------------------------------------------------------------------- orders


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "magic"}, "form 'magic' is unknown; expected one of native, primitives"),
        ({"buckets": ()}, "expected ascending numbers of cache positions"),
        ({"buckets": (16, 8)}, "expected ascending numbers of cache positions"),
        ({"capacity": None}, "only primitives go without one"),
        ({"form": "primitives"}, "only primitives go without one"),
        ({"capacity": 16}, "a cache of 16 positions cannot serve the bucket of 32"),
        ({"decode": Profile(0, 1, 1)}, "expected sizes of at least 1"),
    ],
)
def test_orders_that_contradict_themselves_are_refused(order: EngineOrder, change: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        replace(order, **change)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"optimization_level": 6}, "optimization_level is 6; expected 0 ... 5"),
        ({"workspace": 0}, "workspace is 0 bytes"),
        ({"hardware_compatibility": "all"}, "'all' is unknown; expected none, ampere, same"),
    ],
)
def test_options_out_of_range_are_refused(option: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        Options(**option)
