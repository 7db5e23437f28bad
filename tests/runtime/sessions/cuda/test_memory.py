"""What a session may take of a GPU's memory, and when it is not even loaded."""

from pathlib import Path

import pytest
from doubles.cuda import ORIN, FakeDriver, small
from doubles.plans import plan_of

from llmc.errors import ResourceError
from llmc.runtime.sessions.cuda import session
from llmc.runtime.sessions.cuda.session import check_memory, free_memory

MB = 1_000_000
# One row of 256 positions needs 500 MB, of which the context is taken by now.
MEMORY = plan_of(context=100 * MB, weights=100 * MB, workspace=44 * MB, cache_per_token=MB, logits=0)


def with_free(megabytes: int) -> FakeDriver:
    return FakeDriver(small(total_memory=megabytes * MB))


def test_all_that_is_free_may_be_taken_beside_the_context():
    assert check_memory(Path("bundle"), with_free(400), MEMORY, 256) == 500 * MB


@pytest.mark.parametrize(("free", "advice"), [(399, "build with --max-context 255"), (144, "a smaller precision")])
def test_what_does_not_fit_is_refused_with_what_would(free, advice):
    words = f"bundle: to run one row of 256 positions it needs 500 MB .* {free + 100} MB are free .* {advice}"
    with pytest.raises(ResourceError, match=words):
        check_memory(Path("bundle"), with_free(free), MEMORY, 256)


@pytest.mark.parametrize(("system", "free"), [(300, 300), (50, 100)])
def test_an_integrated_gpu_may_take_what_the_system_would_give_up(system, free, monkeypatch):
    monkeypatch.setattr(session, "available_memory", lambda: system * MB)
    assert free_memory(FakeDriver(small(ORIN, 100 * MB))) == free * MB
    assert free_memory(with_free(100)) == 100 * MB
