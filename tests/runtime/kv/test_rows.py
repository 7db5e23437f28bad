"""Rows of the cache: whoever comes, goes, forks or changes places, each sequence finds its own positions in its row."""

import itertools
import random
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from llmc.bundle import Limits, Manifest
from llmc.bundle.model.cache import Cache
from llmc.runtime.kv.host_cache import HostCache
from llmc.runtime.kv.pages import Pages
from llmc.runtime.kv.rows import Rows, TornError

CAPACITY = 12
MOST = 6


@dataclass(eq=False)
class Sequence:
    """What a row should hold."""

    row: int = -1
    cached: int = 0
    tokens: list[int] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    """Random moves, against a list of what every row should hold."""

    cache_type: Any

    def __init__(self) -> None:
        super().__init__()
        self.cache = self.cache_type()
        self.cache.reserve(MOST, CAPACITY)
        self.rows = Rows(self.cache)
        self.feeding: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.written = 0

    @precondition(lambda self: len(self.feeding) + len(self.decoding) < MOST)
    @rule()
    def admit(self) -> None:
        self.feeding.append(held := Sequence())
        self.rows.admit(held)

    @precondition(lambda self: self.feeding or self.decoding)
    @rule(data=st.data(), count=st.integers(1, 3))
    def extend(self, data: st.DataObject, count: int) -> None:
        held = data.draw(st.sampled_from(self.feeding + self.decoding))
        for _ in range(min(count, CAPACITY - held.cached)):
            self.written += 1
            self.cache[held.row, held.cached] = self.written
            held.tokens.append(self.written)
            held.cached += 1

    @precondition(lambda self: self.feeding)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.feeding))
        self.rows.promote(held)
        self.feeding.remove(held)
        self.decoding.append(held)

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.decoding))
        self.rows.demote(held)
        held.tokens.clear()
        self.decoding.remove(held)
        self.feeding.append(held)

    @precondition(lambda self: self.decoding and len(self.feeding) + len(self.decoding) < MOST)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.decoding))
        cached = data.draw(st.integers(0, parent.cached))
        self.decoding.append(child := Sequence(tokens=parent.tokens[:cached]))
        self.rows.fork(parent, child, cached)

    @precondition(lambda self: len(self.decoding) > 1)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        source, target = data.draw(st.permutations(self.decoding))[:2]
        cached = data.draw(st.integers(0, source.cached))
        agree = 0
        while agree < min(cached, target.cached) and source.tokens[agree] == target.tokens[agree]:
            agree += 1
        self.rows.copy(source, target, data.draw(st.integers(0, agree)), cached)
        target.tokens = source.tokens[:cached]

    @precondition(lambda self: self.feeding or self.decoding)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.feeding + self.decoding))
        self.rows.release(held)
        assert held.row == -1
        (self.decoding if held in self.decoding else self.feeding).remove(held)

    @rule()
    def clear(self) -> None:
        self.rows.clear()
        assert all(held.row == -1 for held in self.feeding + self.decoding)
        self.feeding.clear()
        self.decoding.clear()

    @invariant()
    def rows_are_packed_and_those_that_decode_come_first(self) -> None:
        decoding, everyone = len(self.decoding), len(self.decoding) + len(self.feeding)
        assert (self.rows.decoding, len(self.rows)) == (decoding, everyone)
        assert sorted(held.row for held in self.decoding) == list(range(decoding))
        assert sorted(held.row for held in self.feeding) == list(range(decoding, everyone))
        assert all(self.rows.at(held.row) is held for held in self.decoding + self.feeding)
        assert self.rows.at(everyone) is None

    @invariant()
    def every_row_holds_its_sequence(self) -> None:
        for held in self.decoding + self.feeding:
            assert held.cached == len(held.tokens)
            assert self.cache[held.row, : held.cached].tolist() == held.tokens


def check(cache_type: Any) -> None:
    machine = type("Rows", (Machine,), {"cache_type": cache_type})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            phases=[Phase.generate],
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_rows_stay_packed_and_keep_what_they_hold(remembering):
    check(remembering.cache_type)


@pytest.fixture
def paged(manifest: Manifest) -> Any:
    """A host's cache whose positions are whole pages, or five for four pages, with the token in all of their values."""
    layers = (Cache("0", "kv", (2, 1024), 0), Cache("1", "kv", (1, 1280), 0))
    small = replace(manifest, geometry=replace(manifest.geometry, caches=layers), limits=Limits(64, MOST, 64))

    class Paged(HostCache):
        def __init__(self) -> None:
            super().__init__(small)

        def __setitem__(self, place: Any, token: int) -> None:
            row, position = place
            ends = self.begin(row, [position], 1)
            for array in self.arrays:
                array[row, :, position] = token
            self.note_computed(row, ends)

        def __getitem__(self, place: Any) -> np.ndarray:
            row, positions = place
            first = self.arrays[0][row, 0, positions, 0]
            assert all((array[row, :, positions] == first[None, :, None]).all() for array in self.arrays)
            return first

    return Paged


def walk(cache: Any, seed: int) -> None:
    """Random moves of which many fork and share, as hypothesis seldom finds them."""
    cache.reserve(MOST, CAPACITY)
    chance, rows, held, token = random.Random(seed), Rows(cache), list[Sequence](), 0
    for _ in range(150):
        move = chance.choice(["begin", "extend", "extend", "fork", "fork", "share", "anew", "release"])
        one, other = (chance.choice(held), chance.choice(held)) if held else (None, None)
        if move == "begin" and len(held) < MOST:
            held.append(Sequence())
            rows.admit(held[-1])
            rows.promote(held[-1])
        elif move == "extend" and one:
            for _ in range(min(4, CAPACITY - one.cached)):
                token += 1
                cache[one.row, one.cached] = token
                one.tokens.append(token)
                one.cached += 1
        elif move == "fork" and one and len(held) < MOST:
            cached = chance.randint(0, one.cached)
            held.append(Sequence(tokens=one.tokens[:cached]))
            rows.fork(one, held[-1], cached)
        elif move == "share" and one is not other:
            pairs = zip(one.tokens, other.tokens, strict=False)
            rows.copy(one, other, len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))), one.cached)
            other.tokens = list(one.tokens)
        elif move == "anew" and one:  # from its start, or from a token on, as after rejected drafts
            one.cached = chance.choice([0, one.cached // 2])
            del one.tokens[one.cached :]
        elif move == "release" and one:
            rows.release(one)
            held.remove(one)
        assert all(cache[it.row, : it.cached].tolist() == it.tokens for it in held)


@pytest.mark.skipif(sys.platform != "linux", reason="rows share pages on Linux")
class TestPages:
    @pytest.mark.parametrize("seed", range(5))
    def test_rows_that_share_pages_keep_what_they_hold(self, paged, seed):
        walk(paged(), seed)

    @pytest.mark.parametrize("broken", ["renew", "exchange", "shares"])
    def test_a_page_that_another_row_holds_is_not_written(self, paged, broken, monkeypatch):
        def renew(self: Pages, row: int, end: int = 0) -> None:
            self._map(row, self._own[row], None)

        errors = {"renew": renew, "exchange": lambda *_: None, "shares": lambda *_: 0}
        monkeypatch.setattr(Pages, broken, errors[broken])
        with pytest.raises(AssertionError):
            for seed in range(5):
                walk(paged(), seed)


@pytest.mark.parametrize("broken", ["copy", "swap"])
def test_a_position_left_behind_is_noticed(remembering, broken):
    whole = remembering.cache_type

    def copy(self: Any, source: int, target: int, start: int, end: int) -> None:
        whole.copy(self, source, target, start, max(start, end - 1))

    def swap(self: Any, one: int, its_end: int, other: int, others_end: int) -> None:
        whole.swap(self, one, its_end, other, others_end)
        self.tokens[other, max(0, its_end - 1)] = -1

    with pytest.raises(AssertionError):
        check(type("Lossy", (whole,), {broken: {"copy": copy, "swap": swap}[broken]}))


@pytest.mark.parametrize(("move", "call"), [("release", "swap"), ("promote", "swap"), ("share", "copy")])
def test_a_move_that_fails_says_that_rows_are_torn_and_why(remembering, move, call):
    cache = remembering.cache_type()
    cache.reserve(MOST, CAPACITY)
    rows = Rows(cache)
    held = [Sequence(cached=2) for _ in range(4)]
    for each in held:
        rows.admit(each)
    rows.promote(held[0])
    rows.promote(held[1])

    def failing(*_: Any) -> None:
        raise OSError("the bus is gone")

    setattr(cache, call, failing)
    moves = {
        "release": lambda: rows.release(held[0]),
        "promote": lambda: rows.promote(held[3]),
        "share": lambda: rows.copy(held[0], held[1], 0, 2),
    }
    with pytest.raises(TornError, match="between rows: the bus is gone") as torn:
        moves[move]()
    assert isinstance(torn.value.__cause__, OSError)
    rows.clear()
    assert len(rows) == rows.decoding == 0
