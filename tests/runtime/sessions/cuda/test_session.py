"""The half that sessions on GPUs share, with an engine that computes nothing."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from doubles.cuda import FakeDriver
from doubles.geometries import uniform
from doubles.plans import plan_of

from llmc.bundle import Limits, Manifest
from llmc.errors import BundleError, GpuError, RequestError, UsageError
from llmc.runtime.sessions.base import Batch
from llmc.runtime.sessions.cuda.session import DeviceSession

GEOMETRY = uniform("llama", 2, 64, 128, 4, 2, 16, 320, 512, True, (0, 0))
LIMITS = Limits(max_context=40, max_batch=3, prefill_chunk=8)
MEMORY = plan_of(context=0, weights=0, workspace=0, cache_per_token=1, logits=0)


class Idle(DeviceSession):
    """A session that runs nothing."""

    engine_version = "0"

    def _run(self, batch: Batch, whole: bool) -> np.ndarray:
        raise NotImplementedError

    def __init__(self, manifest: Manifest, driver: FakeDriver, failure: Exception | None = None) -> None:
        super().__init__(
            Path("bundle"),
            replace(manifest, geometry=GEOMETRY, limits=LIMITS, cache="float16", engine=None, device=MEMORY),
            driver,
        )
        self.seen: list[tuple[int, int]] = []  # sizes of the cache when its addresses were forgotten
        self.doing: list[str] = []
        with self._free_on_error():
            self._begin(16)
            self._block(100)
            if failure is not None:
                raise failure
            self._make_cache()

    def call(self, ids: np.ndarray, past: list[int], first_row: int = 0) -> list[int]:
        return self.cache.begin(first_row, past, ids.shape[1])

    def fail(self, error: Exception) -> None:
        with self._guard_context("failing"):
            raise error

    def _forget_addresses(self) -> None:
        self.seen.append((self.cache.rows, self.cache.capacity))

    def _translate_errors(self, doing: str) -> AbstractContextManager[None]:
        @contextmanager
        def noted() -> Iterator[None]:
            self.doing.append(doing)
            try:
                yield
            except OSError as error:
                raise GpuError(f"{doing}: translated", lost=True) from error

        return noted()


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def session(driver: FakeDriver, manifest: Manifest) -> Iterator[Idle]:
    session = Idle(manifest, driver)
    yield session
    session.close()
    session.close()
    assert driver.closed
    assert session._lost or driver.leaks == []


def test_where_loading_fails_everything_is_freed(driver, manifest):
    with pytest.raises(BundleError, match="refused"):
        Idle(manifest, driver, BundleError("refused"))
    assert driver.closed
    assert driver.leaks == []


def test_more_than_the_bundle_was_built_for_is_refused(session):
    session.cache.reserve(3, 40)
    assert (session.cache.rows, session.cache.capacity) == (3, 40)
    with pytest.raises(RequestError, match=r"1 rows x 41 positions .* built for 3 x 40"):
        session.cache.reserve(1, 41)
    with pytest.raises(RequestError, match=r"4 rows x 1 positions"):
        session.cache.reserve(4, 1)


def test_addresses_are_forgotten_before_they_change(session):
    session.cache.reserve(1, 16)
    session.cache.reserve(3, 32)
    assert session.seen == [(0, 0), (1, 16)]


def test_a_call_ends_where_the_cache_does(session):
    session.cache.reserve(3, 16)
    assert session.call(np.zeros((2, 2), np.int64), [14, 3], first_row=1) == [16, 5]
    for past, first_row in (([15, 3], 1), ([0, 0], 2)):
        with pytest.raises(UsageError, match="the cache has 3 rows of 16; reserve room first"):
            session.call(np.zeros((2, 2), np.int64), past, first_row)


def test_a_lost_context_is_said_at_once_from_then_on(session, driver):
    session.cache.reserve(2, 16)
    with pytest.raises(GpuError, match="failing: translated"):
        session.fail(OSError("gone"))
    calls, doing = sum(driver.calls.values()), list(session.doing)
    for call in (
        lambda: session.cache.read(0, 0, 1),
        lambda: session.cache.reserve(3, 16),
        lambda: session.cache.copy(0, 1, 0, 1),
    ):
        with pytest.raises(GpuError, match="failing: translated") as caught:
            call()
        assert caught.value.lost
    assert (sum(driver.calls.values()), session.doing) == (calls, doing)
