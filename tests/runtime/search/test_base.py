"""The arithmetic that strategies share, and functions that came with the request and fail."""

import numpy as np
import pytest

from llmc.errors import ProcessorError, RequestError, UsageError
from llmc.runtime.search.base import Ending, guarded, largest, log_softmax, processed

# Rounding of a float32 logarithm of magnitude up to about 20.
LOG_TOLERANCE = 4e-6


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 127, 128, 129, 1000, 4096])
@pytest.mark.parametrize("k", [1, 2, 7, 100])
def test_largest_finds_what_a_stable_sort_finds(size, k):
    values = np.random.default_rng(size).integers(0, 50, size).astype(np.float32)  # with many equals
    wanted = np.argsort(-values, kind="stable")[:k]
    assert largest(values, k).tolist() == wanted.tolist()


@pytest.mark.parametrize("size", [5, 200, 5000])
def test_largest_leaves_out_what_is_forbidden(size):
    values = np.full(size, -np.inf, np.float32)
    values[[1, 4]] = [1, 2]
    assert largest(values, 3).tolist() == [4, 1]
    assert largest(np.full(size, -np.inf, np.float32), 3).tolist() == []


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


def test_a_row_without_any_possible_token_is_refused():
    with pytest.raises(RequestError, match="not finite"):
        log_softmax(np.full((1, 8), -np.inf, np.float32))


def test_processors_run_in_order_and_see_the_tokens():
    seen = []

    def double(tokens, scores):
        seen.append(list(tokens))
        scores *= 2
        return scores

    result = processed([double, lambda tokens, scores: scores + 1], [4, 2], np.ones(3, np.float32))
    assert result.tolist() == [3, 3, 3] and result.dtype == np.float32
    assert seen == [[4, 2]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (np.zeros(4, np.float32), r"float32 of shape \(4,\), expected real numbers of shape \(3,\)"),
        (np.zeros(3, np.complex64), "complex64 of shape"),
        (np.full(3, 1e39), "NaN or"),
        (None, "NoneType"),
        ([0.0, 0.0, 0.0], "list"),
        (np.array([0, np.nan, 0], np.float32), "NaN or"),
        (np.array([0, np.inf, 0], np.float32), "NaN or"),
    ],
    ids=["shape", "complex", "too large", "none", "list", "nan", "inf"],
)
def test_a_processor_that_returns_nonsense_is_named(result, message):
    def broken(tokens, scores):
        return result

    with pytest.raises(ProcessorError, match=f"processor broken returned .*{message}"):
        processed([broken], [1], np.zeros(3, np.float32))


def test_a_processor_that_raises_is_named_with_its_error():
    def broken(tokens, scores):
        return scores[99]

    with pytest.raises(ProcessorError, match="processor broken raised IndexError") as caught:
        processed([broken], [1], np.zeros(3, np.float32))
    assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_would_end_the_process_is_an_error_of_the_request(error):
    def broken(*_):
        raise error

    with pytest.raises(ProcessorError, match=f"processor broken raised {error.__name__}"):
        processed([broken], [1], np.zeros(3, np.float32))
    with pytest.raises(ProcessorError, match=f"stopping criterion raised {error.__name__}"):
        Ending(3, [], broken).reason([1])


def test_a_processor_may_do_with_its_array_what_it_likes():
    def freeze(tokens, scores):
        scores.flags.writeable = False
        return scores

    def reshape(tokens, scores):
        scores.shape = (1, 3)
        return scores

    def add(tokens, scores):
        scores += 1
        return scores

    result = processed([freeze, add], [1], np.zeros(3, np.float32))
    assert result.tolist() == [1, 1, 1]
    assert processed([freeze], [1], np.zeros(3, np.float32)).flags.writeable
    scores = np.zeros(3, np.float32)
    with pytest.raises(ProcessorError, match=r"reshape returned float32 of shape \(1, 3\), expected"):
        processed([reshape], [1], scores)
    assert scores.shape == (3,)


def test_a_criterion_whose_answer_is_no_answer_is_an_error_of_the_request():
    with pytest.raises(ProcessorError, match="stopping criterion raised ValueError"):
        Ending(3, [], lambda tokens: np.array([True, False])).reason([1])


def test_errors_of_our_own_pass_through():
    def refuse():
        raise UsageError("no")

    with pytest.raises(UsageError, match=r"^no$"):
        guarded("a function", refuse)


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
