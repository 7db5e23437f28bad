"""What a built engine says of itself, where a GPU can load it."""

import json
from pathlib import Path
from typing import Any

import pytest
from doubles.engines import build_decoder
from doubles.recorded import VERSIONS, RecordedLibrary, replaced

from llmc.bundle import EngineConfig
from llmc.optimize.tensorrt.inspector import inspect_engine

LAYERS = [{"Name": "attention", "LayerType": "fused"}]
TENSORS = ["input_ids", "logits"]
MEMORY = 12_345


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets recorded libraries load engines, whose inspector calls inputs and outputs by ``key``."""

    def install(key: str) -> None:
        said = json.dumps({"Layers": LAYERS, key: TENSORS})
        inspector = ("EngineInspector", "get_engine_information")
        replaced(
            monkeypatch,
            "Runtime",
            "deserialize_cuda_engine",
            lambda library, self, data: library.make("ICudaEngine", device_memory_size_v2=MEMORY),
        )
        replaced(
            monkeypatch,
            "ICudaEngine",
            "create_engine_inspector",
            lambda library, self: library.make("EngineInspector"),
        )
        replaced(monkeypatch, *inspector, lambda library, self, form: said)

    return install


@pytest.mark.parametrize("key", ["Bindings", "I/O Tensors"])
@pytest.mark.parametrize("version", VERSIONS)
def test_layers_tensors_and_memory_are_read_under_either_name(version: str, key: str, loads: Any, tmp_path: Path):
    loads(key)
    (tmp_path / "engine.plan").write_bytes(b"plan")
    engine = inspect_engine(RecordedLibrary(version), tmp_path / "engine.plan")
    assert engine is not None
    assert engine == {"layers": LAYERS, "tensors": TENSORS, "device_memory": MEMORY}


def test_the_summary_holds_what_the_engine_says(loads: Any, decoder: Path, config: EngineConfig):
    loads("I/O Tensors")
    build_decoder(RecordedLibrary("11.4"), decoder, config)
    found = json.loads(decoder.with_name("engine.json").read_text())
    assert found["engine"] == {"layers": LAYERS, "tensors": TENSORS, "device_memory": MEMORY}


def test_an_engine_that_cannot_be_loaded_here_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "engine.plan").write_bytes(b"plan")
    assert inspect_engine(RecordedLibrary("10.3"), tmp_path / "engine.plan") is None

    def fail(library: RecordedLibrary, self: Any, native: Any) -> None:
        raise TypeError("factory function returned nullptr")

    replaced(monkeypatch, "Runtime", "__init__", fail)
    assert inspect_engine(RecordedLibrary("10.3"), tmp_path / "engine.plan") is None
