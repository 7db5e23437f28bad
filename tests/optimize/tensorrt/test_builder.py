"""Engines of TensorRT-RTX, built without a GPU: what is built, what is refused, and with which words."""

import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from doubles.engines import build_decoder

from llmc.bundle import Profile
from llmc.errors import BuildError, ResourceError
from llmc.optimize.tensorrt.ladder import rewrite_border
from llmc.optimize.tensorrt.messages import remarks
from llmc.optimize.tensorrt.monitor import Monitor
from llmc.optimize.tensorrt.network import Network, read_graph
from llmc.runtime.sessions.tensorrt.library import logger

CAPACITY = 32
CAUSAL = "<is_causal = 1> (q_turned, keys, values,,,, lengths)"
CACHES = ("past_key_values.0.key", "past_key_values.0.value")


def leftovers(graph: Path) -> list[str]:
    """Files that a failed build left behind."""
    return [path.name for path in graph.parent.iterdir() if "engine" in path.name]


def test_an_engine_is_built_from_mapped_weights(rtx, decoder, config):
    report = build_decoder(rtx, decoder, config)
    assert decoder.with_name("engine.plan").stat().st_size > 10_000
    assert report.aliases == {"present.0.key": CACHES[0], "present.0.value": CACHES[1]}
    assert remarks(report.messages) == ()


def test_the_keys_of_attention_are_read_as_they_lie(rtx, decoder, config):
    """The parser multiplies them by a scale, even by 1."""
    network = Network(rtx, rtx.Builder(logger(rtx).native), decoder, read_graph(decoder, CAPACITY))
    assert [name.partition("]")[0][-11:] for name in _read_by_attention(network)] == ["ElementWise"] * 2
    network.refine()
    assert _read_by_attention(network) == ["q_turned", "keys"]


def test_attention_between_casts_to_float32_is_still_one_kernel(rtx, decoder, config):
    """In float32 throughout it is several; so the library may have taken the casts into its kernel for float16."""
    rewrite_border(decoder, "float32", "float16")
    network = Network(rtx, rtx.Builder(logger(rtx).native), decoder, read_graph(decoder, CAPACITY))
    [attention] = network.refine()
    assert {attention.get_input(index).dtype.name for index in range(3)} == {"FLOAT"}
    assert build_decoder(rtx, decoder, config).attention == "fused"


def _read_by_attention(network: Network) -> list[str]:
    """Names of the query and the keys of the attention."""
    [layer] = [layer for layer in network.layers() if layer.type.name == "ATTENTION_INPUT"]
    return [layer.get_input(index).name for index in (0, 1)]


def test_an_input_that_the_parser_drops_fails_the_build(rtx, save, graph_text, config):
    """The parser takes the lengths of Attention-24 without a word and would attend as if there were none."""
    text = graph_text.replace("<scale = 1.0> (q_turned, keys, values, mask)", CAUSAL)
    path = save(text.replace("mixed =", "lengths = Add (past_lengths, tokens)\n    mixed ="))
    with pytest.raises(BuildError, match=r"left out part of the graph.*: Attention n.mixed does not get lengths"):
        build_decoder(rtx, path, config)
    assert leftovers(path) == []


def test_a_dropped_input_of_the_graph_fails_the_build(rtx, save, graph_text, config):
    text = graph_text.replace("<scale = 1.0> (q_turned, keys, values, mask)", CAUSAL)
    path = save(text.replace("int64[attended] cache_slots,", "int64[attended] cache_slots, int64[batch] lengths,"))
    with pytest.raises(BuildError, match=r"left out part of the graph.*lengths"):
        build_decoder(rtx, path, config)


def test_an_unsupported_attribute_is_named_with_its_node(rtx, save, graph_text, config):
    path = save(graph_text.replace("<scale = 1.0>", "<softcap = 30.0>"))
    with pytest.raises(BuildError, match=r"refused by the parser: n.mixed \(Attention\): softcap"):
        build_decoder(rtx, path, config)


def test_an_unsupported_operator_is_named_with_its_node(rtx, save, graph_text, config):
    text = graph_text.replace('["" : 24]', '["" : 24, "com.microsoft" : 1]').replace(
        "MatMul (chosen, head)",
        "com.microsoft.MatMulNBits <K = 32, N = 96, bits = 4, block_size = 32> (chosen, head, norm)",
    )
    with pytest.raises(BuildError, match=r"refused by the parser: n.scores \(MatMulNBits\)"):
        build_decoder(rtx, save(text), config)


def test_a_dimension_without_a_range_is_named(rtx, save, graph_text, config):
    with pytest.raises(BuildError, match="input past_lengths has the dimension 'rows'; expected one of batch"):
        build_decoder(rtx, save(graph_text.replace("int64[batch] past_lengths", "int64[rows] past_lengths")), config)


def test_truncated_weights_are_refused_by_name(rtx, decoder, config):
    weights = decoder.parent / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(BuildError, match=r"weights.bin ends inside sin; the file is truncated"):
        build_decoder(rtx, decoder, config)
    weights.unlink()
    with pytest.raises(BuildError, match=r"weights.bin cannot be mapped .* yet holds embed"):
        build_decoder(rtx, decoder, config)


def test_a_workspace_too_small_says_what_would_help(rtx, decoder, config):
    big = replace(config, decode=Profile(64, 1, 1), workspace=1)
    with pytest.raises(ResourceError, match=r"within a workspace of 1 bytes: .*; allow more with workspace"):
        build_decoder(rtx, decoder, big)


def test_progress_rises_to_the_end(rtx, decoder, config):
    told: list[tuple[str, float | None]] = []
    build_decoder(rtx, decoder, config, progress=lambda step, fraction=None: told.append((step, fraction)))
    shares = [share for step, share in told if share is not None]
    assert told[0] == ("reading the graph", None)
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 5


def test_an_error_of_the_progress_ends_the_build_and_reaches_the_caller(rtx, decoder, config):
    def fail(step: str, fraction: float | None = None, /) -> None:
        if fraction:
            raise RuntimeError("the bar broke")

    with pytest.raises(RuntimeError, match="the bar broke"):
        build_decoder(rtx, decoder, config, progress=fail)
    assert leftovers(decoder) == []


def test_ctrl_c_ends_the_build(rtx, decoder, config):
    def interrupt(step: str, fraction: float | None = None, /) -> None:
        if fraction:
            signal.raise_signal(signal.SIGINT)

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        build_decoder(rtx, decoder, config, progress=interrupt)
    assert leftovers(decoder) == []
    assert [thread for thread in threading.enumerate() if "ThreadPool" in thread.name and thread not in before] == []


def test_a_monitor_counts_phases_within_phases():
    told: list[float] = []
    monitor = Monitor(lambda step, fraction=None: told.append(fraction))
    monitor.phase_start("build", None, 2)
    monitor.phase_start("tactics", "build", 4)
    assert [monitor.step_complete("tactics", step) for step in range(4)] == [True] * 4
    assert monitor.step_complete("build", 0)
    monitor.phase_start("elsewhere", "nothing known", 3)
    assert monitor.step_complete("elsewhere", 0)
    monitor.stop()
    assert not monitor.step_complete("build", 1)
    assert told == [0.125, 0.25, 0.375, 0.5, 1.0]
