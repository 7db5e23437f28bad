"""Weights of an ONNX file are moved without touching anything else in it."""

from pathlib import Path

import pytest

from llmc.errors import BundleError
from llmc.runtime.sessions.onnxruntime.onnx_file import ExternalData, relocated

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> bytes:
    return (tiny_bundle / "prefill.onnx").read_bytes()


def test_unchanged_entries_leave_the_same_model(model: bytes):
    same = relocated(model, lambda entry: entry)
    assert onnx.ModelProto.FromString(same) == onnx.ModelProto.FromString(model)


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
