"""Weights of an ONNX file are moved without touching anything else in it, and checked before an engine maps them."""

import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.bundle import read_bundle, write_manifest
from llmc.errors import BundleError
from llmc.publish import file_entries
from llmc.runtime import load
from llmc.runtime.sessions.onnxruntime.onnx_file import ExternalData, check_weights, relocated

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def model(compiled_bundle: Path) -> bytes:
    return (compiled_bundle / "prefill.onnx").read_bytes()


def test_every_initializer_with_external_data_is_changed_and_nothing_else(model: bytes):
    seen: list[ExternalData] = []

    def change(entry: ExternalData) -> ExternalData:
        seen.append(entry)
        return {**entry, "location": "other.bin", "offset": str(int(entry["offset"]) + (1 << 40))}

    expected, found = onnx.ModelProto.FromString(model), onnx.ModelProto.FromString(relocated(model, change))
    external = [tensor for tensor in expected.graph.initializer if tensor.external_data]
    assert len(seen) == len(external) > 0
    for tensor in external:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "other.bin"
            if entry.key == "offset":
                entry.value = str(int(entry.value) + (1 << 40))
    assert found == expected


@pytest.mark.parametrize("broken", [b"\x3a\xff\xff\xff\x7f", b"\xff", b"\x3b", b"\x3a\x03\x2a\x7f\x00"])
def test_what_is_no_onnx_file_is_refused(broken: bytes):
    with pytest.raises(BundleError, match="a graph is no ONNX file"):
        relocated(broken, lambda entry: entry)


def test_a_file_cut_anywhere_is_refused_or_lacks_its_end(model: bytes):
    graph_end = len(model) - 1
    with pytest.raises(BundleError):
        relocated(model[: graph_end // 2], lambda entry: entry)


# ------------------------------------------------------------------------------------------------------------- places


def named(key: str, value: Callable[[str], str], *, only: str = "") -> Callable[[Any], None]:
    """Change an entry of the first tensor whose name ends with ``only`` and that has such an entry."""

    def change(model: Any) -> None:
        tensors = (tensor for tensor in model.graph.initializer if tensor.name.endswith(only))
        entry = next(e for tensor in tensors for e in tensor.external_data if e.key == key)
        entry.value = value(entry.value)

    return change


def packed(change: Callable[[list[int]], list[int]]) -> Callable[[Any], None]:
    def changed(value: str) -> str:
        kernel, _, numbers = value.rpartition("|")
        return kernel + "|" + ";".join(map(str, change([int(number) for number in numbers.split(";")])))

    return named("prepacked_0", changed)


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
    "a shape of more bytes": (larger, "are not where"),
    "packed, short": (packed(lambda numbers: [numbers[0], numbers[1] - 1, numbers[2]]), "are not where"),
    "packed, none": (packed(lambda numbers: [numbers[0], 0, 0]), "0 bytes at"),
    "packed, in two parts": (packed(lambda numbers: [numbers[0], 0, 0, *numbers]), "0 bytes at"),
    "packed, beyond the end": (packed(lambda numbers: [1 << 40, *numbers[1:]]), "bytes at 1099511627776 of"),
    "packed, incomplete": (packed(lambda numbers: [*numbers, 0]), "is shorter than"),
}


@pytest.fixture(scope="module")
def copied(compiled_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield Path(shutil.copytree(compiled_bundle, tmp_path_factory.mktemp("hostile") / "bundle"))


@pytest.mark.parametrize("graph", ["compiled-prefill.onnx", "compiled-decode.onnx", "prefill.onnx", "decode.onnx"])
def test_the_graphs_of_a_build_name_places_where_their_weights_can_be(compiled_bundle: Path, graph: str):
    """With nothing to spare: on x86-64, one byte less of anything packed is refused below."""
    check_weights(compiled_bundle / graph, {"weights.bin"})


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("graph", ["compiled-prefill.onnx", "compiled-decode.onnx"])
def test_a_place_that_an_engine_must_not_map_is_refused(compiled_bundle: Path, copied: Path, graph: str, case: str):
    change, words = HOSTILE[case]
    if case == "packed, short" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("only what kernels of x86-64 add is known to the byte")
    model = onnx.load(compiled_bundle / graph, load_external_data=False)
    change(model)
    (copied / graph).write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=words):
        check_weights(copied / graph, {"weights.bin"})


def test_a_bundle_whose_packed_weights_are_cut_is_run_without_them(
    copied: Path, compiled_bundle: Path, caplog: pytest.LogCaptureFixture
):
    """Mapped as they are, they would end the process."""
    model = onnx.load(compiled_bundle / "compiled-decode.onnx", load_external_data=False)
    packed(lambda numbers: [numbers[0], 64, 0])(model)
    (copied / "compiled-decode.onnx").write_bytes(model.SerializeToString())
    files = file_entries(copied, ["compiled-decode.onnx", "compiled-prefill.onnx"])
    manifest = read_bundle(compiled_bundle)
    write_manifest(replace(manifest, files=manifest.files | files), copied)
    with load(copied, self_test=False) as loaded:
        assert loaded.generate([1, 2, 3], max_tokens=2, temperature=0).token_ids
    assert "using the plain graphs" in caplog.text
