"""Who shares a call of prefill: as many as fit into it, as long as it pays."""

from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.kv.rows import Slot
from llmc.runtime.runner.prefill import SHARED_TOKENS, list_sharing, make_shared_batch
from llmc.runtime.sessions import Phase

CHUNK, CAPACITY = 256, 512


def waiting(*lengths: int, cached: int = 0) -> list[Slot]:
    """Sequences of so many tokens to feed."""
    return [Slot(range(100 * row, 100 * row + cached + length), cached, row) for row, length in enumerate(lengths)]


def shared(*lengths: int, chunk: int = CHUNK, capacity: int = CAPACITY, cached: int = 0) -> int:
    return len(list_sharing(waiting(*lengths, cached=cached), chunk, capacity))


def test_short_prompts_share_up_to_as_many_tokens_as_may():
    assert shared(*[16] * 8) == 8
    assert shared(*[16] * 9) == 8
    assert shared(64, 64, 1) == 2
    assert shared(SHARED_TOKENS, 1) == shared(300, 4) == 1


def test_padding_stays_within_a_chunk():
    assert shared(60, *[8] * 7) == CHUNK // 60


def test_a_row_has_room_for_the_padding_behind_its_own_tokens():
    assert shared(4, 20, cached=30, capacity=50) == 2
    assert shared(4, 20, cached=30, capacity=49) == 1


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(2, 300))
def test_no_call_has_more_than_a_chunk_unless_it_is_one_prompt_alone(lengths, chunk):
    count = shared(*lengths, chunk=chunk)
    assert count == 1 or max(lengths[:count]) * count <= chunk


def test_a_shared_call_feeds_what_is_left_of_each():
    sequences = waiting(3, 1, cached=2)
    batch = make_shared_batch(sequences)
    assert batch.phase is Phase.PREFILL and batch.first_row == 0
    assert "new_lengths" in batch.feeds
    fed = [row[:length].tolist() for row, length in zip(batch.input_ids, batch.counts, strict=True)]
    assert fed == [[2, 3, 4], [102]]
    assert batch.past_lengths.tolist() == [2, 2]
    assert batch.logit_indices.tolist() == [[2], [0]]
