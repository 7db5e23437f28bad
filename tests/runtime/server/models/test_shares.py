"""Shares of memory: at least what a model needs, at most what it can use, and the oldest idle model makes room."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from llmc.errors import ResourceError
from llmc.runtime.loading import MemoryNeed
from llmc.runtime.server.models.shares import MemoryShares, choose_idle

SHARES = MemoryShares(memory=100, needed=40)
NEED = MemoryNeed(least=10, most=60, draft=5)


def test_a_share_is_fair_and_no_more_than_is_free_or_of_use():
    assert SHARES.share(NEED, taken=0) == 25  # 10 of the 40 bytes that all need
    assert SHARES.share(NEED, taken=80) == 15  # the draft has the other 5
    assert SHARES.share(MemoryNeed(10, 12, 0), taken=0) == 12
    assert SHARES.share(NEED, taken=95) == 10


def test_what_is_missing_counts_the_draft():
    assert [SHARES.missing(NEED, taken) for taken in (0, 85, 90)] == [0, 0, 5]


def test_a_model_that_does_not_fit_even_alone_is_refused():
    SHARES.check(MemoryNeed(95, 95, 5), Path("a"))
    with pytest.raises(ResourceError, match="a: 1 MB are needed"):
        SHARES.check(MemoryNeed(96, 96, 5), Path("a"))


def test_the_idle_model_used_longest_ago_makes_room():
    busy, old, new = (SimpleNamespace(users=users, used=used) for users, used in ((1, 1), (0, 2), (0, 3)))
    assert choose_idle([new, busy, old]) is old
    assert choose_idle([busy]) is None
