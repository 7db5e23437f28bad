"""The cache in the process's memory: layers of different shapes, states that cannot go back, growth that keeps."""

import mmap
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from weakref import WeakSet

import numpy as np
import pytest
from doubles.refusals import about

from llmc.bundle import Limits, Manifest
from llmc.bundle.model.cache import BACK, Cache
from llmc.errors import ResourceError, UsageError
from llmc.runtime.kv import host_cache as module
from llmc.runtime.kv import pages
from llmc.runtime.kv.host_cache import HostCache, LentCache
from llmc.runtime.kv.rows import Rows

LIMITS = Limits(2048, 8, 64)
RAGGED = (Cache("0", "kv", (2, 4), 0), Cache("1", "kv", (1, 6), 8), Cache("5", "kv", (3, 2), 0))
MIXED = (Cache("0", "kv", (2, 4), 0), Cache("1", "state", (3, 5), 0), Cache("2", "state", (2,), 0))
POSITION = 2 * (8 + 6 + 6)  # values of one, with the layers of RAGGED
Made = Callable[..., HostCache]


@pytest.fixture(params=["pages", "growth"])
def made(manifest: Manifest, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    """Makes caches of 3 rows x 32 positions, which share pages or, where few mappings are allowed, are copied."""
    if request.param == "growth":
        monkeypatch.setattr(pages, "MAX_MAPPINGS", few := tmp_path / "few")
        few.write_text("5\n", encoding="ascii")
    elif sys.platform != "linux":
        pytest.skip("rows share pages on Linux")

    def make(caches: Sequence[Cache] = RAGGED, kind: str = "float32", limits: Limits = LIMITS, **options: Any) -> Any:
        geometry = replace(manifest.geometry, caches=tuple(caches))
        cache = HostCache(replace(manifest, geometry=geometry, cache=kind, limits=limits), **options)
        cache.reserve(3, 32)
        return cache

    return make


def numbers(count: int, kind: str = "float32") -> np.ndarray:
    return np.random.default_rng(count).integers(1, 100, count).astype(kind)


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_what_is_written_is_read_and_lies_tensor_after_tensor(made, kind):
    cache = made(kind=kind)
    given = numbers(5 * POSITION, kind)
    cache.write(1, 3, 8, given)
    assert np.array_equal(cache.read(1, 3, 8), given)
    assert cache.read(1, 3, 8).dtype == np.dtype(kind)
    assert np.array_equal(cache.arrays[0][1, :, 3:8].reshape(-1), given[: 5 * 8])
    assert np.array_equal(cache.arrays[3][1, :, 3:8].reshape(-1), given[5 * 22 : 5 * 28])
    assert not any(array[[0, 2]].any() for array in cache.arrays)
    assert tuple(cache._written) == (0, 8, 0)


def test_a_lent_cache_shows_some_layers_of_another_and_lets_it_move(made, manifest):
    caches, told = tuple(replace(cache, lent=True) for cache in RAGGED[1:]), list[int]()
    cache = made()
    cache.on_move.append(lambda: told.append(0))
    lent = LentCache(replace(manifest, geometry=replace(manifest.geometry, caches=caches), limits=LIMITS), cache)
    cache.on_move.append(lambda: told.append(len(lent.arrays)))
    told.clear()
    for capacity in (32, 64):
        cache.reserve(3, capacity)
        assert lent.begin(2, [200], 1) == [201]
        assert all(mine is its for mine, its in zip(lent.arrays, cache.arrays[2:], strict=True))
        lent.note_computed(2, [201])
        assert tuple(cache._written) == (0, 0, 0)
    assert told == [0, 0], "nothing of the old memory is held when it moves"
    assert not any(it.bytes(32, 4) or it.outputs for it in caches)


def test_a_copied_range_reaches_its_row_and_no_other(made):
    cache = made()
    for row in range(3):
        cache.write(row, 0, 32, numbers(32 * POSITION) + 100 * row)
    before = [cache.read_blocks(row, 1, 0, 32) for row in range(3)]
    cache.copy(0, 2, 5, 20)
    cache.copy(1, 1, 0, 32)
    after = [cache.read_blocks(row, 1, 0, 32) for row in range(3)]
    before[2][5:20] = before[0][5:20]
    assert np.array_equal(before, after)


def test_growth_keeps_what_was_written_copied_and_computed(made):
    cache = made()
    cache.write(0, 0, 9, numbers(9 * POSITION))
    cache.copy(0, 1, 2, 9)
    cache.arrays[2][2, :, 20] = 7
    cache.note_computed(2, [21])
    before = [cache.read(row, 0, end) for row, end in ((0, 9), (1, 9), (2, 21))]
    cache.reserve(4, 300)
    assert (cache.rows, cache.capacity, tuple(cache._written)) == (4, 300, (9, 9, 21, 0))
    assert all(np.array_equal(cache.read(row, 0, end), before[row]) for row, end in ((0, 9), (1, 9), (2, 21)))
    assert not cache.read(0, 9, 300).any()
    cache.close()
    assert (cache.rows, cache.capacity, cache.arrays) == (0, 0, ())


def test_growth_that_memory_does_not_allow_is_refused_and_the_cache_stays(made, monkeypatch):
    cache = made()
    with monkeypatch.context() as patch:
        patch.setattr("llmc.runtime.kv.budget.available_memory", lambda: 100)
        with pytest.raises(ResourceError, match=r"cache for 512 tokens needs .* MB more, 0 MB are available"):
            cache.reserve(3, 512)
    assert (cache.rows, cache.capacity) == (3, 32)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", Mock(side_effect=OSError("no addresses")))
        with pytest.raises(ResourceError, match="growing the cache ran out of memory"):
            cache.reserve(3, 512)
    calls: list[int] = []

    def fails(shape: tuple[int, ...], dtype: Any, pieces: bool) -> tuple[np.ndarray, Any]:
        calls.append(1)
        if len(calls) == 3:
            raise ResourceError("no pages")
        return np.zeros(shape, dtype), None

    cache.write(0, 0, 4, given := numbers(4 * POSITION))

    def maps(self: pages.Pages, *where: int) -> None:
        fails((), None, False)
        map_at(self, *where)

    map_at = pages.Pages._map_at
    with monkeypatch.context() as patch:
        patch.setattr(module, "_fresh", fails)
        patch.setattr(pages.Pages, "_map_at", maps)
        with pytest.raises(ResourceError, match="no pages"):
            cache.reserve(3, 512)
    assert (cache.rows, cache.capacity) == (3, 32)
    assert np.array_equal(cache.read(0, 0, 4), given)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_positions_that_were_never_written_take_no_memory_and_others_give_it_back(made):
    capacity, width = 8192, 4 * 128
    cache = made((Cache("0", "kv", (4, 128), 0),), limits=replace(LIMITS, max_context=capacity))
    whole = 3 * 2 * capacity * width * 4  # 101 MB
    start = resident()
    cache.reserve(3, 1024)
    cache.reserve(3, capacity)
    assert resident() - start < whole // 4  # the rest of the process moves by some megabytes, too
    piece = np.ones(2 * 512 * width, np.float32)  # small, for the allocator keeps what large temporary arrays took
    for begin in range(0, capacity, 512):
        cache.write(0, begin, begin + 512, piece)
    cache.copy(0, 1, 0, capacity)
    cache.copy(0, 2, 0, capacity)
    taken = whole // 3 if cache._pages else whole
    assert all(array[:3].any(axis=(1, 2, 3)).all() for array in cache.arrays)  # reads all of them
    assert taken * 3 // 4 < resident() - start < taken * 5 // 4  # the measure notices memory that is taken
    cache.close()
    assert resident() - start < whole // 4


def resident() -> int:
    """Bytes of this process in memory, of which a page that several mappings share counts once."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))


def test_samples_share_the_pages_of_a_prompt_and_give_memory_back(made):
    cache = made((Cache("0", "kv", (2, 64), 0), Cache("1", "kv", (1, 64), 0)), limits=replace(LIMITS, max_batch=9))
    if cache._pages is None:
        pytest.skip("it shares none")
    cache.reserve(9, 2048)
    tokens = list(range(2000))
    fill(cache, 0, tokens)
    one = taken(cache)
    for row in range(1, 8):
        cache.copy(0, row, 0, 2000)
    assert taken(cache) <= 1.3 * one, "eight samples take little more than one"
    for row in range(8):
        fill(cache, row, [row] * 40, 2000)
    assert [seen(cache, row, 2040) for row in range(8)] == [[tokens + [row] * 40] * 4 for row in range(8)]
    fill(cache, 0, [7] * 1000)  # anew, in the row whose pages the others have
    fill(cache, 3, [8] * 10, 1000)  # before the end of what is shared
    assert seen(cache, 0, 1000) == [[7] * 1000] * 4
    assert seen(cache, 3, 1010) == [tokens[:1000] + [8] * 10] * 4
    assert all(seen(cache, row, 2000) == [tokens] * 4 for row in (1, 2, 4, 5, 6, 7))
    for row in range(8):
        cache.release(row)
    assert taken(cache) == 0


def test_tensors_of_other_widths_are_of_one_length_at_a_capacity_that_fills_no_page(made):
    cache = made((Cache("0", "kv", (2, 32), 0), Cache("1", "kv", (1, 64), 0)), limits=replace(LIMITS, max_context=1001))
    cache.reserve(3, 1001)
    assert len({array.shape[2] for array in cache.arrays}) == 1
    fill(cache, 0, [7] * 1001)
    assert seen(cache, 0, 1001) == [[7] * 1001] * 4


def test_what_only_a_row_that_ended_had_is_given_back_while_others_hold_its_common_pages(made):
    cache = made((Cache("0", "kv", (2, 64), 0), Cache("1", "kv", (1, 64), 0)))
    if cache._pages is None:
        pytest.skip("it shares none")
    cache.reserve(3, 2048)
    fill(cache, 0, list(range(2000)))
    cache.copy(0, 1, 0, 1000)
    cache.copy(1, 2, 0, 100)
    for row, end in ((0, 1000), (1, 100), (2, 0)):
        cache.release(row)
        whole = 2 * (2 + 1) * 64 * 4 * end
        assert taken(cache) <= whole * 5 // 4, "a last page is copied"
        assert all(seen(cache, other, 100) == [list(range(100))] * 4 for other in range(row + 1, 3))


def taken(cache: HostCache) -> int:
    """Bytes of the pages that rows have in all."""
    assert cache._pages is not None
    return os.fstat(cache._pages._file).st_blocks * 512


def feed(cache: HostCache, row: int, past: int, tokens: Sequence[int]) -> None:
    """What a graph would do: keys and values are the token, states depend on all tokens so far."""
    ends = cache.begin(row, [past], len(tokens))
    key, value, first, second = cache.arrays
    for position, token in enumerate(tokens, past):
        key[row, :, position] = value[row, :, position] = token
        first[row] = first[row] * 3 % 1009 + token
        second[row] += token
    cache.note_computed(row, ends)


def after(tokens: Sequence[int]) -> np.ndarray:
    """The contents of a row after ``tokens``, as they are read."""
    first = 0
    for token in tokens:
        first = first * 3 % 1009 + token
    repeated = np.repeat(np.array(tokens), 4)
    return np.concatenate([*[repeated] * 4, [first] * 15, [sum(tokens)] * 2]).astype(np.float32)


def holds(cache: HostCache, row: int, tokens: Sequence[int]) -> bool:
    found = cache.read(row, 0, len(tokens)), cache.read_states(row, len(tokens))
    return np.array_equal(np.concatenate(found), after(tokens))


def test_states_have_no_positions_and_the_cache_says_that_it_cannot_go_back(made):
    cache = made(MIXED)
    assert not cache.can_rewind
    assert [tensor.past for tensor in cache.tensors[2:]] == ["past_state.1", "past_state.2"]
    assert [tensor.present for tensor in cache.tensors[2:]] == ["present_state.1", "present_state.2"]
    assert [array.shape for array in cache.arrays[2:]] == [(3, 3, 5), (3, 2)]
    feed(cache, 0, 0, [5, 6, 7])
    feed(cache, 0, 3, [8])
    assert holds(cache, 0, [5, 6, 7, 8])
    for past in (1, 3, 5):
        with pytest.raises(UsageError, check=about("position")):
            cache.begin(0, [past], 1)
    assert holds(cache, 0, [5, 6, 7, 8])


def test_a_row_that_begins_anew_gets_an_empty_state_and_its_neighbour_keeps_its_own(made):
    cache = made(MIXED)
    feed(cache, 0, 0, [5, 6])
    feed(cache, 1, 0, [9, 9, 9])
    feed(cache, 0, 0, [7])
    assert holds(cache, 0, [7])
    assert holds(cache, 1, [9, 9, 9])


def test_states_go_where_a_row_is_copied_saved_or_grown(made):
    cache = made(MIXED)
    feed(cache, 0, 0, [5, 6, 7])
    cache.copy(0, 1, 0, 3)
    feed(cache, 1, 3, [8])
    cache.write(2, 0, 4, cache.read(1, 0, 4))
    assert not cache.can_resume(2, 4)
    cache.write_states(2, 4, cache.read_states(1, 4))
    cache.reserve(4, 64)
    for row, tokens in ((0, [5, 6, 7]), (1, [5, 6, 7, 8]), (2, [5, 6, 7, 8])):
        assert holds(cache, row, tokens)
        feed(cache, row, len(tokens), [1])
        assert holds(cache, row, [*tokens, 1])


@dataclass(eq=False)
class Held:
    """A sequence, and the row it has."""

    tokens: list[int]
    row: int = -1
    cached: int = 0


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_states_come_go_fork_and_change_places(made, seed):
    cache, chance = made(MIXED), random.Random(seed)
    cache.reserve(6, 32)
    rows, feeding, decoding = Rows(cache), [], []
    for _ in range(120):
        everyone = feeding + decoding
        move = chance.choice(["admit", "extend", "promote", "demote", "fork", "share", "release"])
        if move == "admit" and len(everyone) < 6:
            rows.admit(held := Held([]))
            feeding.append(held)
        elif move == "extend" and everyone:
            held = chance.choice([held for held in everyone if held.cached < 30] or [everyone[0]])
            feed(cache, held.row, held.cached, new := [chance.randint(1, 99)] * chance.randint(1, 2))
            held.tokens += new
            held.cached += len(new)
        elif move == "promote" and feeding:
            decoding.append(held := feeding.pop(chance.randrange(len(feeding))))
            rows.promote(held)
        elif move == "demote" and decoding:
            feeding.append(held := decoding.pop(chance.randrange(len(decoding))))
            rows.demote(held)
            held.tokens = []
        elif move == "fork" and decoding and len(everyone) < 6:
            parent = chance.choice(decoding)
            decoding.append(child := Held(list(parent.tokens)))
            rows.fork(parent, child, parent.cached)
        elif move == "share" and len(decoding) > 1:
            source, target = chance.sample(decoding, 2)
            agree = 0
            while agree < min(source.cached, target.cached) and source.tokens[agree] == target.tokens[agree]:
                agree += 1
            rows.copy(source, target, agree, source.cached)
            target.tokens = list(source.tokens)
        elif move == "release" and everyone:
            rows.release(held := chance.choice(everyone))
            (feeding if held in feeding else decoding).remove(held)
        assert all(holds(cache, held.row, held.tokens) for held in feeding + decoding if held.tokens)


# A page holds 32 positions of one head, so that pages are given back that lie within a head.
WINDOWED = (Cache("0", "kv", (1, 32), 0), Cache("1", "kv", (2, 32), 8))
needs_pages = pytest.mark.skipif(not module.LETS_GO, reason="pages that are given back keep what they hold here")


def fill(cache: HostCache, row: int, tokens: Sequence[int], past: int = 0) -> None:
    ends = cache.begin(row, [past], len(tokens))
    for array in cache.arrays:
        array[row, :, past : past + len(tokens)] = np.array(tokens)[:, None]
    cache.note_computed(row, ends)


def seen(cache: HostCache, row: int, end: int) -> list[list[int]]:
    """What a query at ``end`` sees of each layer."""
    keys = ((array[row, -1], tensor.window) for array, tensor in zip(cache.arrays, cache.tensors, strict=True))
    return [key[max(0, end - window) if window else 0 : end, 0].tolist() for key, window in keys]


@needs_pages
def test_memory_that_windows_have_passed_is_given_back_and_what_they_see_stays(made):
    cache, text = made(WINDOWED), list(range(1, 513))
    cache.reserve(3, 1024)
    fill(cache, 0, text)
    expected = seen(cache, 0, 512)
    cache.let_go(0, 512)
    assert seen(cache, 0, 512) == expected
    assert (
        seen(cache, 0, 512 - BACK)
        == [key[: len(key) - BACK] for key in expected[:2]] + [list(range(512 - BACK - 7, 512 - BACK + 1))] * 2
    )
    assert not cache.arrays[2][0, :, :384].any()
    cache.copy(0, 1, 0, 512)
    fill(cache, 2, [9, 9])
    cache.swap(2, 2, 1, 512)
    cache.reserve(4, 2048)
    assert seen(cache, 2, 512) == seen(cache, 0, 512) == expected
    assert seen(cache, 1, 2) == [[9, 9]] * 4
    assert not any(array[row, :, :384].any() for array in cache.arrays[2:] for row in (0, 2))
    fill(cache, 2, [5] * 20)  # anew, in the same row
    assert (cache.whole_from(2), seen(cache, 2, 20)) == (0, [[5] * 20] * 2 + [[5] * 8] * 2)
    assert not cache.arrays[2][2, :, 32:].any()


@needs_pages
def test_what_was_let_go_of_is_refused(made):
    cache = made(WINDOWED)
    cache.reserve(3, 1024)
    fill(cache, 0, [7] * 512)
    cache.let_go(0, 300)  # not enough yet that windows have passed
    assert cache.can_resume(0, 1)
    cache.let_go(0, 512)
    assert (cache.whole_from(0), cache.can_resume(0, 512 - BACK)) == (512 - BACK, True)
    with pytest.raises(UsageError, check=about("position")):
        cache.begin(0, [100], 1)
    with pytest.raises(UsageError, check=about("start")):
        cache.read(0, 0, 512)
    assert cache.read_blocks(0, 32, 448, 512)


@pytest.mark.skipif(sys.platform != "linux", reason="rows share pages on Linux")
def test_caches_of_a_process_share_its_mappings(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "_LIVING", WeakSet())
    monkeypatch.setattr(pages, "MAX_MAPPINGS", some := tmp_path / "some")
    some.write_text(str(20 * pages.PART_OF_MAPPINGS), encoding="ascii")

    def make() -> pages.Pages:
        return pages.Pages([(2, 4)], np.dtype("float32"), 3, 32)  # at most 12 mappings

    first = make()
    with pytest.raises(OSError, match="24 mappings"):
        make()
    del first
    make()
