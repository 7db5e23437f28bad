"""The steps that need a GPU, on the doubles of CUDA and TensorRT: an engine with two profiles and captured steps."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from doubles.cuda import SERVER, FakeDriver
from doubles.tensorrt import FakeTensorRT, make_plan, make_select_plan

from llmc.bundle import FileEntry, Manifest, read_bundle, write_manifest
from llmc.optimize.tensorrt.select import select_graph
from llmc.runtime import model
from llmc.runtime.sessions.tensorrt.engine import platform_name
from llmc.runtime.sessions.tensorrt.session import TensorRTSession

VERSION = "10.16.1.11"
CANDIDATES, ROWS, CONTEXT = 16, 8, 512
Part = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def bundle(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model for TensorRT in float32, with an engine of the double's."""
    from llmc.optimize.build import build
    from llmc.optimize.tensorrt.request import EngineRequest

    folder = tmp_path_factory.mktemp("bundles") / "native"
    limits: dict[str, Any] = {"precision": "fp32", "max_context": CONTEXT, "max_batch": ROWS}
    build(tiny_export, folder, target="tensorrt", engine=EngineRequest(deferred=True, form="native"), **limits)
    manifest = read_bundle(folder)
    plan, vocab = manifest.engine, manifest.geometry.vocab_size
    assert plan is not None
    onnx.save(select_graph(vocab, CANDIDATES), folder / "select.onnx")
    graph = folder / manifest.graphs["decode"].file
    contents = {
        "engine.plan": make_plan(graph, plan.decode, plan.prefill, plan.buckets, plan.capacity, aliased=True),
        "select.plan": make_select_plan(folder / "select.onnx", ROWS, vocab),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    entries = {name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()}
    made = replace(
        plan,
        file="engine.plan",
        select="select.plan",
        candidates=CANDIDATES,
        platform=platform_name(),
        compute_capabilities=(SERVER.compute_capability,),
    )
    target = replace(manifest.target, engine_version=VERSION)
    write_manifest(replace(manifest, engine=made, files=manifest.files | entries, target=target), folder)
    return folder


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> list[FakeDriver]:
    """Every driver that a session opens, in order."""
    opened: list[FakeDriver] = []

    def open_session(folder: Path, manifest: Manifest, threads: int) -> TensorRTSession:
        opened.append(FakeDriver())
        library = FakeTensorRT(opened[-1], VERSION)
        return TensorRTSession(folder, manifest, threads, driver=opened[-1], library=library)

    monkeypatch.setattr(model, "open_session", open_session)
    return opened


def test_an_engine_is_verified(part: Part, bundle: Path, drivers: list[FakeDriver], tmp_path: Path):
    found = part("verify").verify(str(bundle), str(tmp_path / "none.npz"), False)
    assert found["problems"] == [] and found["golden"]["equal_tokens"] == found["golden"]["tokens"] > 0
    assert found["engine_version"] == VERSION
    assert drivers[0].calls["launch"] > 0 and drivers[0].leaks == []


def test_a_captured_step_is_compared_with_the_plain_one(
    part: Part, bundle: Path, drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
):
    determinism, launched = part("determinism"), []
    compare = determinism.graph_apart

    def counted(*arguments: Any) -> Any:
        found = compare(*arguments)
        launched.append(drivers[0].calls["launch"])
        return found

    monkeypatch.setattr(determinism, "graph_apart", counted)
    found = determinism.determinism(str(bundle), False)
    assert found["problems"] == [] and found["graph_apart"] == {"rows_1": 0.0, f"rows_{ROWS}": 0.0}
    # Of the steps of one row and of all rows the first is run plainly, by what the session promises.
    assert 0 < launched[0] <= 2 * (determinism.STEPS - 1)


def test_an_engine_is_timed_alone_in_a_batch_and_by_bucket(
    part: Part, bundle: Path, drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
):
    measure, here = part("measure"), FakeDriver()
    monkeypatch.setattr("llmc.runtime.host.cuda.open_driver", lambda: here)
    for name, value in {"PROMPTS": (8, 40), "NEW_TOKENS": 4, "STEPS": 2}.items():
        monkeypatch.setattr(measure, name, value)
    found = measure.measure(str(bundle), False, True, 1)
    assert [entry["prompt"] for entry in found["alone"]] == [8, 40]
    assert found["batch"]["rows"] == ROWS and found["weight_bytes"] > found["cache_bytes_per_position"] > 0
    buckets = measure.buckets(str(bundle), False)
    manifest = read_bundle(bundle)
    assert manifest.engine is not None
    assert buckets["form"] == "native"
    assert [step["positions"] for step in buckets["steps"]] == list(manifest.engine.buckets)
    assert here.closed and all(driver.leaks == [] for driver in drivers)


def test_two_engines_are_compared(part: Part, bundle: Path, drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(part("measure"), "STEPS", 2)
    found = part("lengths").lengths(str(bundle), str(bundle))
    assert found["relative"] == {"prefill": 0.0, "decode": 0.0, "rows": 0.0} and found["problems"] == []
    assert found["forms"] == ["native", "native"] and len(drivers) == 2
