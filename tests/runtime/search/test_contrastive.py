"""Contrastive search is the formula of its paper, on the tiny checkpoint and on a made-up model."""

import functools

import numpy as np
import pytest

from llmc.errors import ProcessorError, RequestError
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import SamplingContext, build_processors
from llmc.runtime.search.base import Branch
from llmc.runtime.search.contrastive import Contrastive

PROMPT = [3, 1, 4]
NEW_TOKENS = 6
REAL_PROMPTS = 2
# Sums of up to 6 float32 log-probabilities of a float32 model against a float64 one.
SCORE_TOLERANCE = 1e-4


def transcribed(model, prompt, top_k: int, alpha: float, length: int) -> tuple[tuple[int, ...], float]:
    """Equation 5 of Su et al., from scratch in float64: every candidate is appended, and all states computed anew."""
    tokens, total = list(prompt), 0.0
    for _ in range(length):
        logits, _ = model(tokens)
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        candidates = sorted(range(len(logits)), key=lambda v: -probabilities[v])[:top_k]
        scores = []
        for candidate in candidates:
            _, states = model([*tokens, candidate])
            *before, state = states / np.linalg.norm(states, axis=1, keepdims=True)
            likeness = max(float(state @ other) for other in before)
            scores.append((1 - alpha) * probabilities[candidate] - alpha * likeness)
        chosen = candidates[int(np.argmax(scores))]
        total += float(np.log(probabilities[chosen]))
        tokens.append(chosen)
    return tuple(tokens[len(prompt) :]), total


@pytest.fixture(scope="module")
def double(tiny_checkpoint):
    """Logits and states of the tiny checkpoint in float64, of one sequence from scratch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float64).eval()

    @functools.cache
    def run(*tokens):
        with torch.no_grad():
            output = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        return output.logits[0, -1].numpy(), output.hidden_states[-1][0].numpy()

    return lambda tokens: run(*tokens)


@pytest.fixture(scope="module")
def plain():
    """The made-up model in float64, as ``transcribed`` wants it."""

    def adapt(model):
        return lambda tokens: (
            model.logits(tokens),
            np.array([model.hidden(tokens[: i + 1]) for i in range(len(tokens))]),
        )

    return adapt


def equal(output, wanted) -> bool:
    return output.token_ids == wanted[0] and abs(output.score - wanted[1]) < SCORE_TOLERANCE


@pytest.mark.parametrize(("top_k", "alpha"), [(4, 0.6), (2, 0.9)])
def test_it_chooses_what_the_paper_says_on_a_real_model(top_k, alpha, prompts, double, torch_model, lockstep):
    some = prompts[:REAL_PROMPTS]
    options = {"top_k": top_k, "penalty_alpha": alpha, "max_tokens": NEW_TOKENS}
    outputs = lockstep([Contrastive(**options) for _ in some], some, torch_model)
    for prompt, (output,) in zip(some, outputs, strict=True):
        assert equal(output, transcribed(double, prompt, top_k, alpha, NEW_TOKENS))


@pytest.mark.parametrize(("top_k", "alpha"), [(5, 0.6), (3, 0.3), (8, 1.0), (1, 0.6)])
@pytest.mark.parametrize("seed", range(5))
def test_it_chooses_what_the_paper_says_on_a_made_up_model(top_k, alpha, seed, made_up, plain, decode):
    strategy = Contrastive(top_k=top_k, penalty_alpha=alpha, max_tokens=NEW_TOKENS)
    (output,) = decode(strategy, PROMPT, made_up(30, seed))
    assert equal(output, transcribed(plain(made_up(30, seed)), PROMPT, top_k, alpha, NEW_TOKENS))


@pytest.mark.parametrize(("top_k", "alpha"), [(5, 0.5), (4, 0.6)])
def test_other_settings_are_noticed(top_k, alpha, made_up, plain, decode):
    wanted = [transcribed(plain(made_up(30, seed)), PROMPT, 5, 0.6, NEW_TOKENS) for seed in range(5)]
    options = {"top_k": top_k, "penalty_alpha": alpha, "max_tokens": NEW_TOKENS}
    outputs = [decode(Contrastive(**options), PROMPT, made_up(30, seed))[0] for seed in range(5)]
    assert not all(map(equal, outputs, wanted))


@pytest.mark.parametrize("hide", ["prompt", "candidates"])
def test_forgotten_hidden_states_are_noticed(hide, made_up, plain, decode):
    """A search that did not compare with the prompt, or not candidate by candidate, would choose otherwise."""

    class Forgetful(made_up):
        def start(self, prompts):
            logits, hidden = super().start(prompts)
            return logits, hidden * (hide != "prompt")

        def step(self, parents, tokens):
            logits, hidden = super().step(parents, tokens)
            return logits, hidden if hide == "prompt" else hidden[:1].repeat(len(hidden), axis=0)

    options = {"top_k": 5, "penalty_alpha": 0.6, "max_tokens": NEW_TOKENS}
    wanted = [transcribed(plain(made_up(30, seed)), PROMPT, 5, 0.6, NEW_TOKENS) for seed in range(5)]
    outputs = [decode(Contrastive(**options), PROMPT, Forgetful(30, seed))[0] for seed in range(5)]
    assert not all(map(equal, outputs, wanted))


def test_without_penalty_it_is_greedy(made_up, decode):
    (output,) = decode(Contrastive(top_k=4, penalty_alpha=0.0, max_tokens=7), PROMPT, made_up(30))
    tokens = list(PROMPT)
    for _ in range(7):
        tokens.append(int(np.argmax(made_up(30).logits(tokens))))
    assert list(output.token_ids) == tokens[len(PROMPT) :]
    assert output.finish_reason == "length"


def test_all_candidates_branch_from_the_row_that_was_chosen(made_up):
    model = made_up(30)
    strategy = Contrastive(top_k=3, penalty_alpha=0.6, max_tokens=5)
    logits, hidden = model.start([PROMPT])
    first = strategy.start(PROMPT, logits[0], hidden[0])
    assert first == [Branch(0, token) for token in np.argsort(-logits[0])[:3].tolist()]
    logits, hidden = model.step([0, 0, 0], [branch.token for branch in first])
    parents = {branch.parent for branch in strategy.step(logits, hidden)}
    assert len(parents) == 1
    assert strategy.outputs() == []


@pytest.mark.parametrize("by", ["eos_token_ids", "stops"])
def test_it_stops_after_an_end_token_or_a_criterion(by, made_up, decode):
    options = {"top_k": 4, "penalty_alpha": 0.4, "max_tokens": 8}
    (whole,) = decode(Contrastive(**options), PROMPT, made_up(30))
    end = whole.token_ids[3]
    ending = {"eos_token_ids": [end]} if by == "eos_token_ids" else {"stops": lambda tokens: tokens[-1] == end}
    (output,) = decode(Contrastive(**options, **ending), PROMPT, made_up(30))
    assert output.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
    assert output.finish_reason == "stop"


def test_processors_shape_the_candidates_and_their_probabilities(made_up, decode):
    def only_even(tokens, scores):
        assert tokens[: len(PROMPT)] == tuple(PROMPT)
        scores[1::2] = -np.inf
        return scores

    model = made_up(30)
    logits, _ = model.start([PROMPT])
    before = logits.copy()
    options = {"top_k": 20, "penalty_alpha": 0.6, "max_tokens": 6}
    steps = build_processors(SamplingContext(SamplingParams(), 30, len(PROMPT), processors=[only_even]))
    (output,) = decode(Contrastive(**options, processors=steps), PROMPT, model)
    assert all(token % 2 == 0 for token in output.token_ids)
    assert (made_up(30).start([PROMPT])[0] == before).all()


def test_processors_that_forbid_everything_are_an_error(made_up, decode):
    options = {"top_k": 2, "penalty_alpha": 0.6, "max_tokens": 6}
    with pytest.raises(RequestError, match="forbid every token"):
        decode(Contrastive(**options, processors=[lambda tokens, scores: scores - np.inf]), PROMPT, made_up(30))
    with pytest.raises(ProcessorError, match="raised"):
        steps = build_processors(
            SamplingContext(SamplingParams(), 30, len(PROMPT), processors=[lambda tokens, scores: 1 // 0])
        )
        decode(Contrastive(**options, processors=steps), PROMPT, made_up(30))


def test_a_state_of_length_zero_resembles_nothing(made_up, decode):
    class Silent(made_up):
        def hidden(self, tokens):
            return np.zeros(8)

    (output,) = decode(Contrastive(top_k=4, penalty_alpha=0.6, max_tokens=4), PROMPT, Silent(30))
    (greedy,) = decode(Contrastive(top_k=1, penalty_alpha=0.0, max_tokens=4), PROMPT, made_up(30))
    assert output.token_ids == greedy.token_ids
