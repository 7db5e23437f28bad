"""Diverse beam search is the algorithm of its paper."""

import numpy as np
import pytest

from llmc.runtime.search.beam import BeamSearch

PROMPT = [3, 1]
LENGTH = 6
# A float32 sum of a few logarithms against a float64 one.
SCORE_TOLERANCE = 2e-5


def transcribed(model, groups: int, beams: int, penalty: float) -> list[tuple[tuple[int, ...], float]]:
    """Algorithm 1 of Vijayakumar et al. in float64, with Hamming diversity and without end tokens, best first.

    Group g maximises, over the continuations of its B' beams, the augmented sum of log-probabilities; the Hamming term
    is - lambda times the number of beams of the groups before that chose the same token in this step. Their program
    adds it to the sum that the beam carries on.
    """
    kept = [[((), 0.0)] for _ in range(groups)]
    for _ in range(LENGTH):
        counts = np.zeros(model.vocab_size)
        for g in range(groups):
            continuations = []
            for tokens, total in kept[g]:
                logits = model.logits([*PROMPT, *tokens])
                augmented = logits - np.log(np.exp(logits).sum()) - penalty * counts
                continuations += [((*tokens, v), total + augmented[v]) for v in range(model.vocab_size)]
            kept[g] = sorted(continuations, key=lambda pair: -pair[1])[: beams // groups]
            for tokens, _ in kept[g]:
                counts[tokens[-1]] += 1
    everything = [(tokens, total / LENGTH) for group in kept for tokens, total in group]
    return sorted(everything, key=lambda pair: -pair[1])


def search(groups: int, beams: int, penalty: float, **options) -> BeamSearch:
    return BeamSearch(
        num_beams=beams,
        num_beam_groups=groups,
        diversity_penalty=penalty,
        max_tokens=LENGTH,
        num_return_sequences=beams,
        **options,
    )


def differs(outputs, wanted) -> bool:
    if [output.token_ids for output in outputs] != [tokens for tokens, _ in wanted]:
        return True
    return max(abs(o.score - score) for o, (_, score) in zip(outputs, wanted, strict=True)) > SCORE_TOLERANCE


@pytest.mark.parametrize(("groups", "beams"), [(1, 3), (2, 2), (2, 4), (3, 6), (4, 4)])
@pytest.mark.parametrize("penalty", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_groups_choose_what_the_paper_says(groups, beams, penalty, seed, made_up, decode):
    model = made_up(12, seed)
    assert not differs(
        decode(search(groups, beams, penalty), PROMPT, model), transcribed(model, groups, beams, penalty)
    )


@pytest.mark.parametrize(("groups", "beams", "penalty"), [(4, 4, 0.5), (2, 4, 0.501), (1, 4, 0.5)])
def test_a_planted_error_is_noticed(groups, beams, penalty, made_up, decode):
    models = [made_up(12, seed) for seed in range(5)]
    pairs = [(decode(search(groups, beams, penalty), PROMPT, m), transcribed(m, 2, 4, 0.5)) for m in models]
    assert any(differs(outputs, wanted) for outputs, wanted in pairs)


def test_the_first_group_is_a_beam_search_of_its_own(made_up, decode):
    options = {"eos_token_ids": [0, 1]}
    plain = decode(search(1, 2, 0.0, **options), PROMPT, made_up(12, 4))
    grouped = decode(search(3, 6, 0.7, **options), PROMPT, made_up(12, 4))
    assert set(plain) <= set(grouped)
    assert len({output.token_ids for output in grouped}) > len(plain)


def test_a_large_penalty_makes_all_first_tokens_different(made_up, decode):
    outputs = decode(search(4, 4, 100.0), PROMPT, made_up(12))
    assert len({output.token_ids[0] for output in outputs}) == 4
    same = decode(search(4, 4, 0.0), PROMPT, made_up(12))
    assert len({output.token_ids for output in same}) == 1


def test_a_token_that_ended_an_output_counts_for_the_groups_after(made_up, decode):
    best, second, *_ = np.argsort(-made_up(12).logits(PROMPT)).tolist()
    options = {"eos_token_ids": [best], "early_stopping": True}
    outputs = decode(search(2, 2, 100.0, **options), PROMPT, made_up(12))
    ended, other = sorted((output.token_ids for output in outputs), key=len)
    assert ended == (best,)
    assert other[0] == second


def test_a_group_that_has_ended_leaves_its_rows_to_the_others(made_up):
    model = made_up(12)
    best = int(np.argmax(model.logits(PROMPT)))
    strategy = search(2, 2, 100.0, eos_token_ids=[best], early_stopping=True)
    logits, _ = model.start([PROMPT])
    assert len(strategy.start(PROMPT, logits[0])) == 1


def test_it_works_on_a_real_model(prompts, torch_model, lockstep):
    """The groups differ, their first one is plain beam search, and rows of many requests share a batch."""
    plain = lockstep([search(1, 2, 0.0) for _ in prompts], prompts, torch_model)
    grouped = lockstep([search(2, 4, 1.0) for _ in prompts], prompts, torch_model)
    for alone, together in zip(plain, grouped, strict=True):
        assert {output.token_ids for output in alone} < {output.token_ids for output in together}
