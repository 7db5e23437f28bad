"""Who runs next: a fair queue, and chunks of prompts that neither starve nor are starved."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.engine.scheduler import ARRIVALS_PER_PRIORITY, ChunkedPrefill, Queue

WORST = 3  # priorities from -WORST to WORST are tried
SPACING = 4
CHUNK_S, STEP_S = 0.25, 0.125  # exact in binary


def test_a_better_priority_goes_first_and_is_worth_a_fixed_number_of_arrivals():
    queue = Queue()
    queue.push("early", 1)
    for _ in range(ARRIVALS_PER_PRIORITY - 1):
        queue.push("later", 0)
    queue.push("late", 0)  # as far behind as the priority is worth: who came first goes first
    order = [queue.pop() for _ in range(len(queue._heap))]
    assert order == ["later"] * (ARRIVALS_PER_PRIORITY - 1) + ["early", "late"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-WORST, WORST), min_size=1, max_size=40),
    st.integers(-WORST, WORST),
    st.integers(-WORST, WORST),
)
def test_nobody_waits_for_more_than_a_bounded_number_of_later_arrivals(before, own, rival):
    """Whatever the priorities of those who keep coming, one in and one out."""
    queue = Queue()
    for priority in before:
        queue.push("before", priority)
    queue.push("watched", own)
    later = 0
    while (unit := queue.pop()) != "watched":
        later += unit == "later"
        queue.push("later", rival)
    assert later <= max(0, own - rival) * ARRIVALS_PER_PRIORITY


def test_a_further_sample_waits_in_the_place_of_its_request():
    queue = Queue()
    ticket = queue.push("first", 0)
    queue.push("second", 0)
    assert queue.pop() == "first"
    queue.again(ticket, "first's sample")
    assert [queue.pop(), queue.pop()] == ["first's sample", "second"]


def test_while_others_decode_a_further_chunk_waits_for_steps_and_for_their_time():
    pacer = ChunkedPrefill(SPACING)
    assert pacer.allows(first_chunk=False, decoding=True)
    pacer.note_fed(CHUNK_S, first_chunk=False)
    for _ in range(SPACING):
        assert not pacer.allows(first_chunk=False, decoding=True)
        pacer.note_decoded(STEP_S)
    assert pacer.allows(first_chunk=False, decoding=True)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 10)), max_size=20))
def test_a_first_chunk_never_waits_nor_any_where_nobody_decodes(past):
    pacer = ChunkedPrefill(SPACING)
    for fed, seconds in past:
        pacer.note_fed(seconds, first_chunk=False) if fed else pacer.note_decoded(seconds)
    assert pacer.allows(first_chunk=True, decoding=True)
    assert pacer.allows(first_chunk=False, decoding=False)
