"""A library that compiles kernels while it runs: they are kept from run to run."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.cuda import SERVER, FakeDriver
from doubles.tensorrt import FakeTensorRT, KernelStrategy

from llmc.errors import GpuError
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
        found.append(session.run(Batch.of(Phase.DECODE, ids, np.array([past]), zeros)).copy())
    session.close()
    assert setup.driver.leaks == []
    return np.array(found)


def test_a_call_that_comes_again_is_recorded_with_the_kernels_of_its_first_run(bundle):
    setup = compiling(bundle())
    want = used(bundle())
    assert np.array_equal(used(setup), want), "the first steps ran with the kernels of the later ones"
    assert len({context.memory for context in setup.library.contexts}) == 1
    assert (setup.driver.calls["begin_capture"], setup.driver.calls["launch"]) == (1, 2)


def test_kernels_of_a_step_are_waited_for_and_those_of_a_prompt_are_not(bundle):
    setup = compiling(bundle())
    used(setup)
    when = [c.config.dynamic_shapes_kernel_specialization_strategy for c in setup.library.contexts]
    assert when == [KernelStrategy.EAGER, KernelStrategy.LAZY]


def test_a_session_whose_kernels_change_says_so(bundle):
    assert compiling(bundle()).open().changes_kernels
    assert not bundle().open().changes_kernels


def test_a_gpu_that_the_library_does_not_list_is_refused_before_the_engine_is_read(bundle):
    setup = compiling(bundle())
    setup.driver.device = replace(SERVER, name="NVIDIA H200", compute_capability="9.0")
    with pytest.raises(GpuError, match=r"runs on compute capability 7\.5, 8\.0, .* and newer, NVIDIA H200 has 9\.0"):
        setup.plan(compute_capabilities=()).open()
    assert setup.library.runtimes == []


def test_kernels_are_kept_from_run_to_run(bundle, kept):
    setup = bundle()
    first, second = compiling(setup), compiling(setup)
    used(first)
    (file,) = kept.glob("*/*")
    os.utime(file, (0, 0))
    used(second, steps=17)  # in two buckets
    assert second.library.compiled == []
    assert file.stat().st_mtime_ns == 0  # there was nothing new


@pytest.mark.parametrize("content", [b"", b"no kernels", b'{"version": "1.0", "kernels": []}'])
def test_kept_kernels_that_are_damaged_or_foreign_are_compiled_anew(bundle, kept, content):
    setup = bundle()
    used(compiling(setup))
    (file,) = kept.glob("*/*")
    good = file.read_bytes()
    file.write_bytes(content)
    again = compiling(setup)
    assert np.array_equal(used(again), used(bundle()))
    assert len(again.library.compiled) == 3
    assert file.read_bytes() == good
