"""Memory that samplers of a thread share, and who gets none of it."""

import threading

import numpy as np

from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import SamplingContext
from llmc.runtime.sampling.samplers import make_sampler
from llmc.runtime.sampling.scratch import borrowed, masses

VOCABULARY = 1000


def test_blocks_one_after_the_other_get_the_same_memory_and_nested_ones_do_not():
    with borrowed(VOCABULARY) as first, borrowed(VOCABULARY) as inner:
        assert not np.shares_memory(first, inner)
    with borrowed(VOCABULARY) as again:
        assert np.shares_memory(again, first) or np.shares_memory(again, inner)


def test_memory_comes_back_from_a_block_that_fails():
    try:
        with borrowed(VOCABULARY) as first:
            raise KeyError
    except KeyError:
        pass
    with borrowed(VOCABULARY) as again:
        assert again is first


def test_threads_share_nothing():
    found = []

    def look() -> None:
        with borrowed(VOCABULARY) as array:
            found.append((array, masses(VOCABULARY)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    look()
    (one, its_masses), (other, our_masses) = found
    assert not np.shares_memory(one, other) and its_masses is not our_masses
    assert our_masses is masses(VOCABULARY) is not masses(VOCABULARY + 1)


def test_a_function_that_keeps_the_logits_it_saw_changes_nobody_elses():
    logits = np.random.default_rng(0).normal(size=VOCABULARY).astype(np.float32)
    kept = []

    def keep(tokens, seen):
        kept.append(seen)
        return seen

    params = SamplingParams(seed=1, top_k=50, repetition_penalty=1.2)
    curious = make_sampler(SamplingContext(params, VOCABULARY, prompt_length=0, processors=[keep]))
    curious(logits, [1, 2])
    alone = make_sampler(SamplingContext(params, VOCABULARY, prompt_length=0))(logits, [1, 2])
    before = kept[0].copy()
    beside = make_sampler(SamplingContext(params, VOCABULARY, prompt_length=0))(logits, [1, 2])
    assert np.array_equal(kept[0], before)
    kept[0][:] = np.nan
    assert alone == beside == make_sampler(SamplingContext(params, VOCABULARY, prompt_length=0))(logits, [1, 2])
    with borrowed(VOCABULARY) as array:
        assert not np.shares_memory(array, kept[0])
