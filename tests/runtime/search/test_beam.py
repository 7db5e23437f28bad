"""Beam search on models so small that every output can be listed."""

import itertools
import math

import numpy as np
import pytest

from llmc.errors import ProcessorError, RequestError
from llmc.runtime.search.beam import BeamSearch, log_softmax

PROMPT = [1, 2]
VOCABULARY, LENGTH, EOS = 4, 4, 0
# A float32 sum of four logarithms against a float64 one.
SCORE_TOLERANCE = 1e-5


def all_outputs(model, penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """Every output that ends with EOS or has LENGTH tokens, with its score in float64, best first."""
    found = []
    for length in range(1, LENGTH + 1):
        for tokens in itertools.product(range(VOCABULARY), repeat=length):
            if EOS in tokens[:-1] or (tokens[-1] != EOS and length < LENGTH):
                continue
            score = 0.0
            for i, token in enumerate(tokens):
                logits = model.logits([*PROMPT, *tokens[:i]])
                score += logits[token] - np.log(np.exp(logits).sum())
            found.append((score / length**penalty, tokens))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_with_room_for_all_outputs_it_finds_the_best(penalty, seed, made_up, decode):
    model = made_up(VOCABULARY, seed)
    everything = VOCABULARY**LENGTH
    search = BeamSearch(
        num_beams=everything, max_tokens=LENGTH, eos_token_ids=[EOS], num_return_sequences=10, length_penalty=penalty
    )
    wanted = all_outputs(model, penalty)[:10]
    outputs = decode(search, PROMPT, model)
    assert [output.token_ids for output in outputs] == [tokens for _, tokens in wanted]
    errors = np.abs([output.score - score for output, (score, _) in zip(outputs, wanted, strict=True)])
    assert errors.max() < SCORE_TOLERANCE
    assert np.abs(errors + 2e-5).max() > SCORE_TOLERANCE


def test_it_finds_what_greedy_search_misses(decode):
    """Token 1 looks best at first and leads nowhere."""

    class Garden:
        def start(self, prompts):
            self.rows = [[]]
            return self.logits()

        def step(self, parents, tokens):
            self.rows = [[*self.rows[parent], token] for parent, token in zip(parents, tokens, strict=True)]
            return self.logits()

        def logits(self):
            first, after_1, after_2 = [0.1, 0.5, 0.4], [0.33, 0.33, 0.34], [0.05, 0.05, 0.9]
            rows = [first if not row else after_1 if row[0] == 1 else after_2 for row in self.rows]
            return np.log(np.array(rows, np.float32))

    greedy = decode(BeamSearch(num_beams=1, max_tokens=2), PROMPT, Garden())
    beams = decode(BeamSearch(num_beams=2, max_tokens=2), PROMPT, Garden())
    assert greedy[0].token_ids == (1, 2)
    assert beams[0].token_ids == (2, 2)
    assert math.isclose(math.exp(beams[0].score * 2), 0.36, rel_tol=1e-5)


def test_a_row_with_children_keeps_one_in_its_place(made_up):
    """So rows can be copied one after another, and no row is overwritten that another child still needs."""
    model = made_up(30, seed=3)
    search = BeamSearch(num_beams=6, max_tokens=30, eos_token_ids=[0, 1, 2])
    logits = model.start([PROMPT])
    branches = search.start(PROMPT, logits[0])
    moved = steps = 0
    while branches:
        parents = [branch.parent for branch in branches]
        for row in set(parents):
            assert row >= len(branches) or parents[row] == row
        moved += sum(parent != row for row, parent in enumerate(parents))
        steps += 1
        logits = model.step(parents, [branch.token for branch in branches])
        branches = search.step(logits)
    assert steps > 5
    assert 0 < moved < 6 * steps / 2


def test_a_stopping_criterion_ends_outputs_like_an_end_token(made_up, decode):
    options = {"num_beams": 3, "max_tokens": 8, "num_return_sequences": 3, "length_penalty": -1.0}
    end = int(np.argsort(made_up(20).logits(PROMPT))[-2])
    by_token = decode(BeamSearch(**options, eos_token_ids=[end]), PROMPT, made_up(20))
    by_criterion = decode(BeamSearch(**options, stops=lambda tokens: tokens[-1] == end), PROMPT, made_up(20))
    assert by_criterion == by_token
    assert (end,) in {output.token_ids for output in by_token if output.finish_reason == "stop"}


def test_processors_see_prompt_and_new_tokens_of_their_beam(made_up, decode):
    seen = []

    def record(tokens, scores):
        seen.append(tuple(tokens))
        return scores

    model = made_up(20)
    plain = decode(BeamSearch(num_beams=2, max_tokens=3), PROMPT, made_up(20))
    assert decode(BeamSearch(num_beams=2, max_tokens=3, processors=[record]), PROMPT, model) == plain
    assert seen[0] == (1, 2)
    assert [len(tokens) for tokens in seen] == [2, 3, 3, 4, 4]
    assert plain[0].token_ids[:2] in {tokens[2:] for tokens in seen[-2:]}


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
    logits[1, 3] = np.nan
    with pytest.raises(RequestError, match="not finite"):
        log_softmax(logits)


@pytest.mark.parametrize("error", [SystemExit, ZeroDivisionError])
def test_a_stopping_criterion_that_raises_is_an_error_of_the_request(error, decode, made_up):
    def broken(*_):
        raise error

    with pytest.raises(ProcessorError, match=f"stopping criterion raised {error.__name__}"):
        decode(BeamSearch(num_beams=2, max_tokens=3, stops=broken), [1], made_up(8))


def test_an_output_ends_by_token_by_criterion_and_by_length(decode, made_up):
    search = BeamSearch(
        num_beams=8, num_return_sequences=8, max_tokens=3, eos_token_ids=[7], stops=lambda tokens: sum(tokens) > 10
    )
    for output in decode(search, [1], made_up(8)):
        ended = output.token_ids[-1] == 7 or sum(output.token_ids) > 10
        assert output.finish_reason == ("stop" if ended else "length")
        assert ended or len(output.token_ids) == 3
