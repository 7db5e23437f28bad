"""Speculation loses nothing: the model's distribution whatever is drafted, and the very tokens that come without it.

Most tests run on a toy model whose logits depend on the last two tokens.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from llmc.runtime.sampling.draws import uniform
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import SamplingContext
from llmc.runtime.sampling.samplers import Sampler, make_sampler
from llmc.runtime.speculation.speculator import verify

VOCAB = 5
SEQUENCES = 4000
# The 99.9 % quantile of chi-square with 24 degrees of freedom (5 x 5 pairs of tokens, less one).
CHI_SQUARE_24 = 51.18

RULES = np.random.default_rng(3).normal(size=(VOCAB, VOCAB, VOCAB)).astype(np.float32)


def toy(tokens: Sequence[int]) -> np.ndarray:
    return RULES[tokens[-2], tokens[-1]]


Model = Callable[[Sequence[int]], np.ndarray]
Verify = Callable[[Sequence[int], Callable[[int], int]], Iterator[int]]


def drawn(model: Model, sampler: Sampler, tokens: list[int]) -> int:
    return sampler(model(tokens), tokens).token


def plain(model: Model, sampler: Sampler, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(drawn(model, sampler, tokens))
    return tokens[len(prompt) :]


def step(model: Model, sampler: Sampler, tokens: list[int], drafts: Sequence[int], rule: Verify = verify) -> list[int]:
    """One verification as an engine does it: all logits first, from the drafts that were fed; then the draws."""
    fed = [model([*tokens, *drafts[:i]]) for i in range(len(drafts) + 1)]
    committed: list[int] = []
    for token in rule(drafts, lambda i: sampler(fed[i], [*tokens, *committed]).token):
        committed.append(token)  # noqa: PERF402 - the draws see what was committed
    return committed


def random_sampler(seed: int, vocab_size: int = VOCAB) -> Sampler:
    return make_sampler(SamplingContext(SamplingParams(temperature=1.0, seed=seed), vocab_size, prompt_length=2))


ADVERSARIES: dict[str, Callable[[list[int], int], list[int]]] = {
    "most probable": lambda tokens, _: [int(toy(tokens).argmax())] * 2,
    "least probable": lambda tokens, _: [int(toy(tokens).argmin())] * 2,
    "always the same": lambda _, __: [2, 2],
    "at random": lambda _, seed: [int(VOCAB * uniform(99, seed, i)) for i in range(2)],
}


def pairs_drawn(adversary: str, rule: Verify = verify) -> Counter[tuple[int, int]]:
    """The first two tokens of many sequences."""
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(SEQUENCES):
        tokens, sampler = [0, 1], random_sampler(seed)
        while len(tokens) < 4:
            tokens += step(toy, sampler, tokens, ADVERSARIES[adversary](tokens, seed), rule)
        counts[tokens[2], tokens[3]] += 1
    return counts


def chi_square(counts: Counter[tuple[int, int]]) -> float:
    """Against the product of the model's probabilities, in float64."""
    total = 0.0
    for first in range(VOCAB):
        for second in range(VOCAB):
            wanted = SEQUENCES * softmax(toy([0, 1]))[first] * softmax(toy([1, first]))[second]
            total += (counts[first, second] - wanted) ** 2 / wanted
    return total


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64))
    return weights / weights.sum()


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_whatever_is_drafted_the_output_has_the_distribution_of_the_model(adversary):
    assert chi_square(pairs_drawn(adversary)) < CHI_SQUARE_24


def lenient(drafts: Sequence[int], draw: Callable[[int], int]) -> Iterator[int]:
    """A planted error: one rejection in ten is waived."""
    for i, draft in enumerate(drafts):
        token = draw(i)
        if token != draft and uniform(next(WAIVED), 0, 0) < 0.1:
            token = draft
        yield token
        if token != draft:
            return
    yield draw(len(drafts))


WAIVED = itertools.count()


def accepts_everything(drafts: Sequence[int], draw: Callable[[int], int]) -> Iterator[int]:
    yield from drafts
    yield draw(len(drafts))


@pytest.mark.parametrize("rule", [lenient, accepts_everything])
def test_another_rule_of_acceptance_shows_in_the_distribution(rule):
    assert chi_square(pairs_drawn("always the same", rule)) > CHI_SQUARE_24


def test_draws_stop_at_the_first_disagreement_which_is_committed():
    calls: list[int] = []

    def draw(i: int) -> int:
        calls.append(i)
        return [7, 8, 5, 4][i]

    assert list(verify([7, 8, 9], draw)) == [7, 8, 5]
    assert list(verify([7, 8, 5], draw)) == [7, 8, 5, 4]
    assert list(verify([], draw)) == [7]
    assert calls == [0, 1, 2, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_tokens_are_those_that_come_without_speculation(temperature, adversary):
    params = SamplingParams(temperature=temperature, top_p=0.95, seed=11)
    wanted = plain(toy, make_sampler(SamplingContext(params, VOCAB, prompt_length=2)), [0, 1], 200)
    sampler, tokens = make_sampler(SamplingContext(params, VOCAB, prompt_length=2)), [0, 1]
    while len(tokens) < 202:
        tokens += step(toy, sampler, tokens, ADVERSARIES[adversary](tokens, len(tokens)))
    assert tokens[2:202] == wanted
