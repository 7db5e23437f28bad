"""The cache on the device: contents survive every move, memory is zeroed, and failures change nothing."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from doubles.caches import read, write
from doubles.cuda import FakeDriver, array_at
from doubles.geometries import uniform

from llmc.bundle import Geometry, Limits, Manifest
from llmc.bundle.model.cache import Cache
from llmc.errors import BundleError, ResourceError
from llmc.runtime.kv import device_cache as module
from llmc.runtime.kv.device_cache import DeviceCache

LIMITS = Limits(512, 8, 16)
GEOMETRY = uniform("llama", 2, 64, 128, 4, 2, 16, 320, 512, True, (0, 0))
TENSORS, HEADS, WIDTH = 4, 2, 16
GENERATOR = np.random.default_rng(0)
Made = Callable[..., DeviceCache]


def values(count: int, dtype: str = "float16") -> np.ndarray:
    return GENERATOR.integers(1, 1000, (TENSORS, HEADS, count, WIDTH)).astype(dtype)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def made(driver: FakeDriver, manifest: Manifest) -> Made:
    """Makes caches of a type, for a geometry."""

    def make(kind: str = "float16", geometry: Geometry = GEOMETRY, **options: Any) -> DeviceCache:
        small = replace(manifest, geometry=geometry, limits=LIMITS, cache=kind, engine=None, device=None)
        return DeviceCache(small, driver, driver.stream(), **options)

    return make


@pytest.fixture
def cache(driver: FakeDriver, made: Made) -> Iterator[DeviceCache]:
    """Three rows of 32 positions."""
    cache = made()
    cache.reserve(3, 32)
    yield cache
    cache.close()
    assert driver.allocated == 0


def size(cache: DeviceCache) -> int:
    """Bytes on the device."""
    return cache._places(cache.rows, cache.capacity)[-1]


@pytest.mark.parametrize(("kind", "itemsize"), [("int8", 1), ("float16", 2), ("float32", 4)])
def test_what_is_written_is_read_in_the_type_of_the_cache(made, kind, itemsize):
    cache = made(kind=kind)
    cache.reserve(2, 8)
    given = values(5).astype(cache.dtype)
    write(cache, 1, 3, given)
    assert cache.dtype == np.dtype(kind)
    assert np.array_equal(read(cache, 1, 3, 8), given)
    assert not cache.read(0, 0, 8).any()
    assert size(cache) == 2 * HEADS * 8 * WIDTH * itemsize * TENSORS


def test_growth_keeps_what_was_written(cache):
    given = [values(count) for count in (32, 7, 20)]
    for row, content in enumerate(given):
        write(cache, row, 0, content)
    cache.reserve(5, 64)
    assert (cache.rows, cache.capacity, tuple(cache._written)) == (5, 64, (32, 7, 20, 0, 0))
    assert all(np.array_equal(read(cache, row, 0, len(c[0][0])), c) for row, c in enumerate(given))
    assert not cache.read(0, 32, 64).any()
    cache.close()
    assert (cache.rows, cache.capacity, size(cache)) == (0, 0, 0)


def test_too_little_memory_changes_nothing(driver, made):
    cache = made()
    cache.reserve(3, 32)
    given = values(32)
    write(cache, 1, 0, given)
    before = driver.allocated
    driver.fail_alloc = driver._allocations + 1
    with pytest.raises(ResourceError):
        cache.reserve(3, 64)
    assert driver.allocated == before
    assert (cache.rows, cache.capacity) == (3, 32)
    assert np.array_equal(read(cache, 1, 0, 32), given)
    cache.reserve(3, 64)
    assert np.array_equal(read(cache, 1, 0, 32), given)


LAYERS = ((2, 16), (1, 10), (4, 8))


def test_each_layer_has_its_own_shape(made, monkeypatch):
    caches = tuple(Cache(str(i), "kv", shape, 0) for i, shape in enumerate(LAYERS))
    cache = made(geometry=replace(GEOMETRY, caches=caches))
    position = sum(2 * heads * width for heads, width in LAYERS)
    monkeypatch.setattr(module, "STAGING_BYTES", 5 * position * 2)
    cache.reserve(2, 7)
    given = GENERATOR.integers(1, 9, 7 * position).astype(np.float16)
    cache.write(1, 0, 7, given)
    cache.copy(1, 0, 2, 7)
    start = 0
    for tensor, (heads, width) in enumerate(shape for shape in LAYERS for _ in range(2)):
        assert cache.address(tensor, 0) % module.ALIGNMENT == 0
        here = array_at(cache.address(tensor, 1), (heads, 7, width), np.float16)
        assert np.array_equal(here.reshape(-1), given[start : start + heads * 7 * width])
        start += heads * 7 * width
    cache.reserve(3, 20)
    assert np.array_equal(cache.read(1, 0, 7), given)
    assert np.array_equal(cache.read(0, 2, 7), cache.read(1, 2, 7))
    assert not cache.read(2, 0, 20).any()
    blocks = cache.read_blocks(1, 3, 0, 6)
    assert all(np.array_equal(block, cache.read(1, 3 * i, 3 * i + 3)) for i, block in enumerate(blocks))
    cache.close()


def test_states_are_refused(made):
    caches = (Cache("0", "kv", (2, 16), 0), Cache("1", "state", (4, 8), 0))
    with pytest.raises(
        BundleError, match=r"keep states \(past_state.1\), which .* on CPUs alone; build it for the cpu"
    ):
        made(geometry=replace(GEOMETRY, caches=caches))
