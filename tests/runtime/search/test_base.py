"""The arithmetic that strategies share, and functions that came with the request and fail."""

import numpy as np
import pytest

from llmc.errors import ProcessorError, RequestError
from llmc.runtime.search.base import Ending, log_softmax, processed

# Rounding of a float32 logarithm of magnitude up to about 20.
LOG_TOLERANCE = 4e-6


def log_softmax_errors(logits: np.ndarray, logarithms: np.ndarray) -> float:
    exact = logits.astype(np.float64)
    exact = exact - exact.max(axis=-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    return float(np.abs(exact - logarithms).max())


def test_log_softmax_is_right_and_leaves_the_logits_alone():
    logits = np.random.default_rng(0).normal(size=(3, 5000)).astype(np.float32) * 3 + 500
    before = logits.copy()
    assert log_softmax_errors(logits, log_softmax(logits)) < LOG_TOLERANCE
    assert (logits == before).all()
    assert log_softmax_errors(logits, log_softmax(logits) + np.float32(1e-5)) > LOG_TOLERANCE


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(wrong):
    logits = np.zeros((2, 8), np.float32)
    logits[1, 3] = wrong
    with pytest.raises(RequestError, match="not finite"):
        log_softmax(logits)


def test_processors_run_in_order_and_see_the_tokens():
    seen = []

    def double(tokens, scores):
        seen.append(list(tokens))
        scores *= 2
        return scores

    result = processed([double, lambda tokens, scores: scores + 1], [4, 2], np.ones(3, np.float32))
    assert result.tolist() == [3, 3, 3] and result.dtype == np.float32
    assert seen == [[4, 2]]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_would_end_the_process_is_an_error_of_the_request(error):
    def broken(*_):
        raise error

    with pytest.raises(ProcessorError, match=f"stopping criterion raised {error.__name__}"):
        Ending(3, [], broken).reason([1])


def test_an_output_ends_by_token_by_criterion_and_by_length():
    ending = Ending(3, [7], lambda tokens: sum(tokens) > 10)
    assert ending.reason([7]) == "stop"
    assert ending.reason([5, 6]) == "stop"
    assert ending.reason([1, 2]) is None
    assert ending.reason([1, 2, 3]) == "length"
    assert ending.reason([1, 2, 7]) == "stop"


def test_a_stopping_criterion_that_raises_is_an_error_of_the_request():
    with pytest.raises(ProcessorError, match="stopping criterion raised ZeroDivisionError"):
        Ending(3, [], lambda tokens: 1 // 0 > 0).reason([1])
