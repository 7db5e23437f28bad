"""A library that compiles kernels while it runs: they are kept from run to run, and it records by itself."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.cuda import FakeDriver
from doubles.tensorrt import CudaGraphStrategy, FakeTensorRT

from llmc.runtime.host import disk_cache
from llmc.runtime.sessions import Batch, Phase
from llmc.runtime.sessions.tensorrt import kernels as module


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / module.KIND


def compiling(setup: Any, version: str = "10.16.1.11") -> Any:
    """The same bundle in a fresh process, so to speak."""
    driver = FakeDriver()
    return replace(setup, driver=driver, library=FakeTensorRT(driver, version, compiles=True))


def used(setup: Any, steps: int = 4) -> np.ndarray:
    """Logits of some steps of a session that is then closed."""
    session = setup.open()
    session.cache.reserve(1, 16)
    found = []
    for past in range(steps):
        ids, zeros = np.array([[past]]), np.zeros((1, 1), np.int64)
        found.append(session.run(Batch(Phase.DECODE, ids, np.array([past]), zeros)).copy())
    session.close()
    assert setup.driver.leaks == []
    return np.array(found)


def test_contexts_whose_calls_repeat_record_by_themselves(bundle: Callable[..., Any]):
    setup = compiling(bundle())
    want = used(bundle())
    assert np.array_equal(used(setup), want)
    strategies = [context.config.cuda_graph_strategy for context in setup.library.contexts]
    repeats, once = CudaGraphStrategy.WHOLE_GRAPH_CAPTURE, CudaGraphStrategy.DISABLED
    assert strategies == [repeats, once, repeats]  # decode, prefill, selection
    assert setup.driver.calls["begin_capture"] == 0


def test_kernels_are_kept_from_run_to_run(bundle: Callable[..., Any], kept: Path):
    setup = bundle(select=False)
    first, second = compiling(setup), compiling(setup)
    used(first)
    assert len(first.library.compiled) == 1
    (file,) = kept.glob("*/*")
    os.utime(file, (0, 0))
    used(second)
    assert second.library.compiled == []
    assert file.stat().st_mtime_ns == 0  # there was nothing new
    third = compiling(setup)
    used(third, steps=17)
    assert len(third.library.compiled) == 1  # of the next bucket
    assert file.stat().st_mtime_ns > 0


def test_kernels_of_another_version_are_not_used(bundle: Callable[..., Any], kept: Path, monkeypatch: Any):
    monkeypatch.setattr(module, "kernels_file", lambda *what: disk_cache.entry(module.KIND, "one") / module.FILE)
    monkeypatch.setattr("llmc.runtime.sessions.tensorrt.session.kernels_file", module.kernels_file)
    setup = bundle().plan(version_compatible=True)
    used(compiling(setup))
    later = compiling(setup, "10.17.0.1")
    used(later)
    assert len(later.library.compiled) == 1


def test_what_tells_kernels_apart_is_in_their_name():
    names = {module.kernels_file(*what) for what in (("a", "b"), ("ab", ""), ("a", "c"), ("a", "b", "c"))}
    assert len(names) == 4
    assert module.kernels_file("a", "b") in names


def test_kernels_that_cannot_be_kept_cost_nothing_but_time(
    bundle: Callable[..., Any], monkeypatch: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    occupied = tmp_path / "occupied"
    occupied.write_text("a file where a folder should be")
    monkeypatch.setattr("llmc.runtime.sessions.tensorrt.session.kernels_file", lambda *what: occupied / "kernels.bin")
    setup = bundle()
    assert np.array_equal(used(compiling(setup)), used(bundle()))
    assert "kernels cannot be kept" in caplog.text


def test_a_library_that_compiles_nothing_is_not_asked(bundle: Callable[..., Any], kept: Path):
    used(bundle())
    assert not kept.exists()
