"""Every way in which an engine is refused or fails: what is said, and that nothing is left behind."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from doubles.cuda import FakeDriver, small
from doubles.plans import plan_of
from doubles.tensorrt import FakeTensorRT

from llmc.errors import BundleError, GpuError, LlmcError, ResourceError
from llmc.runtime.sessions import Batch, Phase
from llmc.runtime.sessions.tensorrt.session import TensorRTSession

MB = 1_000_000


def step(session: TensorRTSession, past: int = 0) -> np.ndarray:
    zeros = np.zeros((1, 1), np.int64)
    return session.run(Batch.of(Phase.DECODE, zeros, np.array([past]), zeros))


def refused(setup: Any, error: type[LlmcError], match: str) -> None:
    """Opening fails, and gives everything back."""
    with pytest.raises(error, match=match):
        setup.open()
    assert setup.driver.leaks == []
    assert setup.driver.closed


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"platform": "linux-riscv64"}, "built for linux-riscv64, this is .*; llmc build --rebuild"),
        ({"compute_capabilities": ("8.7",)}, "compute capability 8.7, NVIDIA L4 has 8.9; llmc build --rebuild"),
        ({"file": ""}, "has not been built; build it on this machine: llmc build --rebuild"),
    ],
)
def test_an_engine_for_another_machine_is_refused(bundle, changes, match):
    setup = bundle().plan(**changes)
    with pytest.raises(BundleError, match=match):
        setup.open()
    assert setup.driver.leaks == []


def test_an_engine_is_for_its_version(bundle):
    setup = bundle()
    setup.library.__version__ = "10.17.2.10"
    refused(setup, BundleError, "built by tensorrt .*, here is 10.17.2.10; llmc build --rebuild")


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_a_damaged_engine_is_refused(bundle, content):
    setup = bundle()
    (setup.folder / "engine.plan").write_bytes(content)
    refused(setup, BundleError, "cannot be read|the magic tag does not match")


@pytest.mark.parametrize(
    ("wrong", "place"),
    [('"present.0.value": "past_key_values.0.key"', "past_key_values.0.key"), ('"x": "y"', "nothing")],
)
def test_an_engine_with_half_of_its_cache_in_place_is_refused(bundle, wrong, place):
    setup = bundle()
    plan = (setup.folder / "engine.plan").read_text()
    changed = plan.replace('"present.0.value": "past_key_values.0.value"', wrong)
    assert changed != plan
    (setup.folder / "engine.plan").write_text(changed)
    refused(setup, BundleError, f"present.0.value is updated in place of {place}; llmc build --rebuild")


def test_too_little_memory_is_refused_before_loading_with_what_would_fit(bundle):
    setup = bundle()
    setup.driver.device = small(total_memory=100 * MB)
    setup.manifest = replace(
        setup.manifest, device=plan_of(context=500 * MB, weights=60 * MB, workspace=8 * MB, cache_per_token=MB)
    )
    refused(setup, ResourceError, "needs 632 MB of GPU memory, 600 MB are free .* build with --max-context 32")
    assert setup.library.runtimes == []
    setup = bundle()
    setup.driver.device = small(total_memory=100 * MB)
    setup.manifest = replace(setup.manifest, device=plan_of(weights=160 * MB, workspace=8 * MB, cache_per_token=MB))
    refused(setup, ResourceError, "100 MB are free .* use a smaller precision or model")
    setup.driver = FakeDriver(small(total_memory=300 * MB))
    setup.library = FakeTensorRT(setup.driver)
    assert setup.open().cache.device_memory == 300 * MB


@pytest.mark.parametrize("number", (1, 3, 5, 7))
def test_whichever_allocation_fails_nothing_is_left_behind(bundle, number):
    setup = bundle()
    setup.driver.fail_alloc = number
    refused(setup, ResourceError, "failed")


def test_an_engine_that_fails_is_reported_and_the_session_goes_on(bundle):
    setup = bundle()
    session = setup.open()
    session.cache.reserve(1, 16)
    setup.library.fails_at = 1
    with pytest.raises(GpuError, match=r"running the engine failed in tensorrt .*invalid argument.*; see llmc doctor"):
        step(session)
    assert np.isfinite(step(session)).all()


@pytest.mark.parametrize("number", range(1, 60, 15))
def test_a_context_lost_at_any_call_never_shows_as_anything_else(bundle, number):
    setup = bundle()
    setup.driver.lose = number
    with pytest.raises(GpuError) as caught:
        session = setup.open()
        session.cache.reserve(2, 16)
        for past in range(8):
            step(session, past)
            session.cache.copy(0, 1, 0, past)
    assert caught.value.lost
