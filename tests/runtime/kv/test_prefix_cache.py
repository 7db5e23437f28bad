"""The prefix cache finds the longest prefix it has, gives back what was put in, and keeps to its bound."""

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from llmc.runtime.kv.prefix_cache import Match, PrefixCache, Read

BLOCK = 2
LAYERS, HEADS, DIM = 2, 1, 3
BLOCK_BYTES = 2 * LAYERS * HEADS * BLOCK * DIM * 4
PLENTY = 1 << 20


def rows(tokens: Sequence[int], dtype: str = "float32") -> NDArray[Any]:
    """Keys and values that depend, as real ones do, on all tokens up to their position: [2 * layers, heads, n, dim]."""
    seeds = [zlib.crc32(repr(list(tokens[: n + 1])).encode()) for n in range(len(tokens))]
    values = [np.random.default_rng(seed).integers(-127, 128, (2 * LAYERS, HEADS, DIM)) for seed in seeds]
    return np.stack(values, axis=2).astype(dtype) if values else np.zeros((2 * LAYERS, HEADS, 0, DIM), dtype)


def blocks(values: NDArray[Any], start: int, end: int, size: int = BLOCK) -> list[NDArray[Any]]:
    """What a cache reads of these positions."""
    return [values[:, :, i : i + size].reshape(-1).copy() for i in range(start, end, size)]


def reader(tokens: Sequence[int], dtype: str = "float32", size: int = BLOCK) -> Read:
    return lambda start, end: blocks(rows(tokens, dtype), start, end, size)


def joined(found: Match) -> NDArray[Any]:
    parts = [block.reshape(2 * LAYERS, HEADS, -1, DIM) for block in found.blocks]
    return np.concatenate(parts, axis=2) if parts else rows([])


def filled(cache: PrefixCache, *sequences: Sequence[int]) -> PrefixCache:
    for tokens in sequences:
        cache.insert(tokens, reader(tokens, size=cache.block))
    return cache


def cached(cache: PrefixCache, tokens: Sequence[int]) -> int:
    with cache.match(tokens) as found:
        return found.length


class Kept:
    """A match that stays until it is released."""

    def __init__(self, match: AbstractContextManager[Match]) -> None:
        self._stack = ExitStack()
        self.found = self._stack.enter_context(match)
        self.release = self._stack.close


class BruteForce:
    """The same cache as a dict of whole prefixes; the answer to every question is found by trying all."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.used: dict[tuple[int, ...], int] = {}
        self.held: list[tuple[int, ...]] = []
        self.now = 0

    def longest(self, tokens: Sequence[int], limit: int) -> int:
        lengths = range(BLOCK, min(limit, len(tokens)) + 1, BLOCK)
        return max((n for n in lengths if tuple(tokens[:n]) in self.used), default=0)

    def use(self, tokens: Sequence[int], length: int) -> None:
        self.now += 1
        self.used.update({tuple(tokens[:n]): self.now for n in range(BLOCK, length + 1, BLOCK)})

    def insert(self, tokens: Sequence[int]) -> int:
        length = self.longest(tokens, len(tokens))
        self.held.append(tuple(tokens[:length]))
        room = self.blocks - len([entry for entry in self.used if self.pinned(entry)])
        end = min(len(tokens) // BLOCK, length // BLOCK + room) * BLOCK
        while len(self.used) + (end - length) // BLOCK > self.blocks:
            leaves = [entry for entry in self.used if not self.pinned(entry) and not self.continued(entry)]
            del self.used[min(leaves, key=lambda entry: (self.used[entry], -len(entry)))]
        self.use(tokens, end)
        self.held.pop()
        return end

    def pinned(self, entry: tuple[int, ...]) -> bool:
        return any(held[: len(entry)] == entry for held in self.held)

    def continued(self, entry: tuple[int, ...]) -> bool:
        return any(len(t) > len(entry) and t[: len(entry)] == entry for t in self.used)


TOKENS = st.lists(st.integers(0, 1), max_size=11)


class AgainstBruteForce(RuleBasedStateMachine):
    kind = PrefixCache

    @initialize(blocks=st.integers(0, 7))
    def start(self, blocks: int) -> None:
        self.cache = self.kind("model", BLOCK, max_bytes=blocks * BLOCK_BYTES + BLOCK_BYTES // 2)
        self.oracle = BruteForce(blocks)
        self.matches: list[Kept] = []

    @rule(tokens=TOKENS)
    def insert(self, tokens: list[int]) -> None:
        spans = []

        def read(start: int, end: int) -> Sequence[NDArray[Any]]:
            spans.append((start, end))
            return reader(tokens)(start, end)

        assert self.cache.insert(tokens, read) == self.oracle.insert(tokens)
        assert len(spans) <= 1

    @rule(tokens=TOKENS, limit=st.integers(0, 12), keep=st.booleans())
    def match(self, tokens: list[int], limit: int, keep: bool) -> None:
        length = self.oracle.longest(tokens, limit)
        match = Kept(self.cache.match(tokens, limit))
        assert match.found.length == length
        np.testing.assert_array_equal(joined(match.found), rows(tokens[:length]))
        self.oracle.use(tokens, length)
        if keep:
            self.matches.append(match)
            self.oracle.held.append(tuple(tokens[:length]))
        else:
            match.release()

    @precondition(lambda self: self.matches)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        self.matches.pop(which % len(self.matches)).release()
        self.oracle.held.pop(which % len(self.oracle.held))

    @invariant()
    def stays_within_its_bound(self) -> None:
        assert self.cache.bytes == len(self.oracle.used) * BLOCK_BYTES <= self.cache.max_bytes


MACHINE = settings(
    max_examples=200, stateful_step_count=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_it_does_what_a_dict_of_all_prefixes_does():
    run_state_machine_as_test(AgainstBruteForce, settings=MACHINE)


class EvictsWhatIsUsed(PrefixCache):
    def _use(self, path: Sequence[Any]) -> None:
        """Planted: the order of use is never renewed."""


class IgnoresPins(PrefixCache):
    def _pin(self, path: Sequence[Any]) -> None:
        """Planted: nothing is pinned."""

    def _unpin(self, path: Sequence[Any]) -> None:
        pass


class GivesTheWrongBlock(PrefixCache):
    def _add(self, hashes: Sequence[bytes], blocks: Sequence[NDArray[Any]]) -> list[Any]:
        return super()._add(hashes, blocks[::-1])


@pytest.mark.parametrize("broken", [EvictsWhatIsUsed, IgnoresPins, GivesTheWrongBlock])
def test_the_dict_of_all_prefixes_finds_a_planted_error(broken):
    class Planted(AgainstBruteForce):
        kind = broken

    quick = settings(MACHINE, max_examples=300, phases=list(settings.get_profile("default").phases)[:3])
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Planted, settings=quick)


def test_nobody_can_change_a_block():
    cache = filled(PrefixCache("model", BLOCK, max_bytes=PLENTY), [1, 2])
    with cache.match([1, 2]) as found:
        np.testing.assert_array_equal(joined(found), rows([1, 2]))
        with pytest.raises(ValueError, match="read-only"):
            found.blocks[0][:] = 0
