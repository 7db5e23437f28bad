"""Weights of an ONNX file are checked before an engine maps them."""

from collections.abc import Callable
from typing import Any

import pytest

from llmc.bundle import read_bundle
from llmc.errors import BundleError
from llmc.runtime.sessions.onnxruntime.onnx_file import check_weights

onnx = pytest.importorskip("onnx")


def named(key: str, value: Callable[[str], str], *, only: str = "") -> Callable[[Any], None]:
    """Change an entry of the first tensor whose name ends with ``only`` and that has such an entry."""

    def change(model: Any) -> None:
        tensors = (tensor for tensor in model.graph.initializer if tensor.name.endswith(only))
        entry = next(e for tensor in tensors for e in tensor.external_data if e.key == key)
        entry.value = value(entry.value)

    return change


def in_a_constant(model: Any) -> None:
    tensor = onnx.TensorProto(data_type=1, dims=[1], data_location=1)
    tensor.external_data.add(key="location", value="secret.bin")
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["unused"], value=tensor))


def in_a_graph_within(model: Any) -> None:
    tensor = onnx.TensorProto(name="inner", data_type=1, dims=[1], data_location=1)
    tensor.external_data.add(key="location", value="weights.bin")
    inner = onnx.helper.make_graph([], "inner", [], [], [tensor])
    model.graph.node.append(onnx.helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner))


def twice(model: Any) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    tensor.external_data.add(key="location", value="weights.bin")


def prepacked(model: Any) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    tensor.external_data.add(key="prepacked_0", value="MatMul|0;64;0")


def larger(model: Any) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    tensor.dims[0] *= 2


HOSTILE = {
    "a file that is not listed": (named("location", lambda _: "secret.bin"), "'secret.bin', which is no file"),
    "a file outside": (named("location", lambda _: "/etc/passwd"), "'/etc/passwd', which is no file"),
    "an address": (named("location", lambda _: "*/_ORT_MEM_ADDR_/*"), "which is no file of the bundle"),
    "a constant": (in_a_constant, "names weights outside of its list"),
    "a graph within": (in_a_graph_within, "names weights outside of its list"),
    "two places": (twice, "gives weights two places"),
    "beyond the end": (named("offset", lambda _: str(1 << 40)), "bytes at 1099511627776 of"),
    "below zero": (named("offset", lambda _: "-64"), "'-64' is no number of bytes"),
    "a number without end": (named("length", lambda _: "9" * 5000), "is no number of bytes"),
    "between cache lines": (named("offset", lambda offset: str(int(offset) + 1)), "are not where"),
    "fewer bytes than the shape": (named("length", lambda _: "64"), "64 bytes at"),
    "weights that were packed": (prepacked, "'prepacked_0' of a place"),
    "a shape of more bytes": (larger, "are not where"),
}


def test_the_graphs_of_a_build_name_places_where_their_weights_can_be(tiny_bundle, split_bundle):
    checked = [
        folder / graph.file for folder in (tiny_bundle, split_bundle) for graph in read_bundle(folder).graphs.values()
    ]
    assert len(set(checked)) == 3
    for graph in checked:
        check_weights(graph, {"weights.bin"})


@pytest.mark.threat("bundle-weights")
@pytest.mark.parametrize("case", HOSTILE)
def test_a_place_that_an_engine_must_not_map_is_refused(tiny_bundle, tmp_path, case):
    change, words = HOSTILE[case]
    (tmp_path / "weights.bin").symlink_to(tiny_bundle / "weights.bin")
    name = read_bundle(tiny_bundle).graphs["decode"].file
    model = onnx.load(tiny_bundle / name, load_external_data=False)
    change(model)
    (tmp_path / name).write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=words):
        check_weights(tmp_path / name, {"weights.bin"})


@pytest.mark.parametrize("broken", [b"\x3a\xff\xff\xff\x7f", b"\xff", b"\x3b", b"\x3a\x03\x2a\x7f\x00"])
def test_what_is_no_onnx_file_is_refused(tiny_bundle, tmp_path, broken):
    (tmp_path / "weights.bin").symlink_to(tiny_bundle / "weights.bin")
    (tmp_path / "decode.onnx").write_bytes(broken)
    with pytest.raises(BundleError, match="is no graph of this bundle"):
        check_weights(tmp_path / "decode.onnx", {"weights.bin"})
