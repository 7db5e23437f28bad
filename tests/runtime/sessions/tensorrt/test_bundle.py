"""A whole model on TensorRT's session: its lowered graph behind doubles gives the tokens that were recorded."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from doubles.cuda import SERVER, FakeDriver
from doubles.tensorrt import FakeTensorRT, make_plan

from llmc.bundle import EngineConfig, FileEntry, Manifest, read_bundle, write_manifest
from llmc.errors import LlmcError
from llmc.runtime import load, model
from llmc.runtime.model import Model
from llmc.runtime.selftest import replay
from llmc.runtime.sessions.tensorrt.engine import platform_name
from llmc.runtime.sessions.tensorrt.session import TensorRTSession

VERSION = "10.16.1.11"


@pytest.fixture(scope="module")
def folder(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model lowered, with an engine of the double's."""
    from llmc.optimize.build import build
    from llmc.optimize.recipe.engine import EngineRequest

    output = tmp_path_factory.mktemp("lowered") / "bundle"
    asked = EngineRequest(deferred=True)
    built = build(
        tiny_export, output, target="tensorrt", precision="fp32", max_context=512, max_batch=4, engine=asked
    ).output
    manifest = read_bundle(built)
    assert manifest.engine is not None
    write_manifest(with_engine(built, manifest, manifest.engine), built)
    return built


def with_engine(folder: Path, manifest: Manifest, plan: EngineConfig) -> Manifest:
    """As if the engine had been built here."""
    graph = folder / manifest.graphs["decode"].file
    content = make_plan(graph, plan.decode, plan.prefill, plan.buckets)
    (folder / "engine.plan").write_bytes(content)
    files = {**manifest.files, "engine.plan": FileEntry(len(content), "0" * 64)}
    made = replace(
        plan, file="engine.plan", platform=platform_name(), compute_capabilities=(SERVER.compute_capability,)
    )
    target = replace(manifest.target, engine_version=VERSION)
    return replace(manifest, engine=made, files=files, target=target)


@pytest.fixture
def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Model, FakeDriver]]:
    """The bundle loaded as a user would, but for the doubles."""
    driver = FakeDriver()

    def open_session(folder: Path, manifest: Manifest, threads: int, device: int) -> TensorRTSession:
        return TensorRTSession(folder, manifest, threads, driver=driver, library=FakeTensorRT(driver, VERSION))

    monkeypatch.setattr(model, "open_session", open_session)
    with load(folder, self_test=False) as loaded:
        yield loaded, driver
    assert driver.closed
    assert driver.lost or driver.leaks == []


def test_golden_prompts_give_the_recorded_tokens(opened: tuple[Model, FakeDriver]):
    loaded, driver = opened
    assert len(loaded.manifest.golden) > 0
    replay(loaded)
    assert driver.calls["launch"] > 0


def test_requests_that_share_batches_get_their_own_tokens(opened: tuple[Model, FakeDriver]):
    loaded, _ = opened
    prompts = [golden.prompt for golden in loaded.manifest.golden[:4]]
    handles = [loaded.stream(prompt, max_tokens=8, temperature=0.0, ignore_eos=True) for prompt in prompts]
    found = [handle.result().token_ids for handle in handles]
    for golden, tokens in zip(loaded.manifest.golden, found, strict=False):
        assert tuple(tokens) == golden.tokens[:8]


def test_a_gpu_that_is_lost_while_requests_run_ends_them_and_closes(opened: tuple[Model, FakeDriver]):
    loaded, driver = opened
    prompt = loaded.manifest.golden[0].prompt
    handle = loaded.stream(prompt, max_tokens=400, temperature=0.0, ignore_eos=True)
    next(iter(handle))
    driver.kill()
    with pytest.raises(LlmcError):
        handle.result()
    with pytest.raises(LlmcError):
        loaded.generate(prompt, max_tokens=2)
