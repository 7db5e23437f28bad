from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.server.fleet import affinity
from llmc.runtime.server.fleet.affinity import IMBALANCE, MOST_HOLDERS, Affinity

PROMPT = (b"system", b"question", b"follow-up")
IDLE = {"a": 0, "b": 0, "c": 0}
LOADS = st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 50), min_size=1, max_size=12)


def test_a_prompt_goes_where_the_longest_part_of_it_was_computed() -> None:
    router = Affinity(rows=4)
    router.note(PROMPT[:1], "a")
    router.note(PROMPT, "b")
    router.note((b"other", b"question"), "c")
    assert router.order(PROMPT, IDLE)[:2] == ["b", "a"]
    assert router.order((PROMPT[0], b"new"), {**IDLE, "a": 3})[0] in ("a", "b")


def test_what_nobody_has_seen_goes_to_the_same_replica_from_every_front() -> None:
    for block in (b"x", b"y", b"z"):
        first, second = (Affinity(rows=4).order((block,), IDLE) for _ in range(2))
        assert first == second


def test_a_replica_that_leaves_takes_only_what_was_its_own() -> None:
    blocks = [bytes([number]) for number in range(200)]
    before = {block: Affinity(1).order((block,), IDLE)[0] for block in blocks}
    after = {block: Affinity(1).order((block,), {"a": 0, "b": 0})[0] for block in blocks}
    assert {before[block] for block in blocks} == set(IDLE)
    assert all(after[block] == before[block] for block in blocks if before[block] != "c")


def test_a_busy_replica_gives_to_the_next_one_which_has_the_prefix_from_then_on() -> None:
    router = Affinity(rows=2)
    router.note(PROMPT, "a")
    second = router.order(PROMPT, {"a": 2, "b": 0, "c": 0})[0]
    assert second != "a"
    router.note(PROMPT, second)
    assert set(router.order(PROMPT, IDLE)[:2]) == {"a", second}


def test_without_a_prefix_the_least_busy_one_is_first() -> None:
    assert Affinity(rows=9).order((), {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]


@given(loads=LOADS, rows=st.integers(1, 8))
def test_nobody_gets_more_than_its_share_while_others_have_room(loads: dict[str, int], rows: int) -> None:
    router = Affinity(rows)
    for replica in loads:
        router.note(PROMPT, replica)
    order = router.order(PROMPT, loads)
    assert sorted(order) == sorted(loads)
    assert loads[order[0]] + 1 <= max(rows, IMBALANCE * (sum(loads.values()) + 1) / len(loads), min(loads.values()) + 1)


def test_memory_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(affinity, "MOST_REMEMBERED", 10)
    router = Affinity(rows=1)
    for number in range(50):
        router.note((PROMPT[0], bytes([number])), f"replica {number}")
    assert len(router._holders) == 10
    assert len(router._holders[PROMPT[0]]) == MOST_HOLDERS
