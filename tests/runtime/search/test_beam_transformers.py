"""Beam search chooses what transformers chooses: ten prompts under every setting."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from llmc.runtime.search.base import Hypothesis
from llmc.runtime.search.beam import BeamSearch

NEW_TOKENS = 12
# Sums of up to 12 float32 log-probabilities of a float32 model, computed in batches of other shapes: 1e-5 is seen.
SCORE_TOLERANCE = 1e-4
CASES: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4},
    {"num_beams": 4, "num_return_sequences": 4},
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True},
    {"num_beams": 4, "num_return_sequences": 3, "early_stopping": "never"},
    {"num_beams": 4, "num_return_sequences": 2, "early_stopping": "never", "length_penalty": 2.0},
    {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 4, "num_return_sequences": 4, "length_penalty": -1.0},
    {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.6, "early_stopping": True},
    {"num_beams": 4, "num_return_sequences": 4, "repetition_penalty": 1.3},
    {"num_beams": 4, "num_return_sequences": 4, "repetition_penalty": 1.1, "no_repeat_ngram_size": 2},
    {"num_beams": 7, "num_return_sequences": 7},
]
NAMES = [",".join(f"{name}={value}" for name, value in case.items()) for case in CASES]


def repetition_penalty(penalty: float) -> Any:
    def apply(tokens: Sequence[int], scores: np.ndarray) -> np.ndarray:
        seen = np.unique(tokens)
        scores[seen] *= np.where(scores[seen] < 0, np.float32(penalty), np.float32(1 / penalty))
        return scores

    return apply


def no_repeat_ngram(size: int) -> Any:
    def apply(tokens: Sequence[int], scores: np.ndarray) -> np.ndarray:
        last = tuple(tokens[len(tokens) - size + 1 :])
        banned = [
            tokens[i + size - 1] for i in range(len(tokens) - size + 1) if tuple(tokens[i : i + size - 1]) == last
        ]
        scores[banned] = -np.inf
        return scores

    return apply


def ours(case: dict[str, Any], prompts, eos: list[int], model, lockstep) -> list[list[Hypothesis]]:
    options = dict(case)
    processors = []
    if "repetition_penalty" in options:
        processors.append(repetition_penalty(options.pop("repetition_penalty")))
    if "no_repeat_ngram_size" in options:
        processors.append(no_repeat_ngram(options.pop("no_repeat_ngram_size")))
    options |= {"max_tokens": NEW_TOKENS, "eos_token_ids": eos, "processors": processors}
    return lockstep([BeamSearch(**options) for _ in prompts], prompts, model)


def differences(case: dict[str, Any], wanted: list, outputs: list[list[Hypothesis]]) -> list[str]:
    """What is not equal, prompt by prompt."""
    found = []
    for i, (expected, hypotheses) in enumerate(zip(wanted, outputs, strict=True)):
        tokens, scores = zip(*expected, strict=True)
        if tuple(hypothesis.token_ids for hypothesis in hypotheses) != tokens:
            found.append(f"prompt {i}: tokens")
            continue
        sums = np.array([len(output) ** case.get("length_penalty", 1.0) for output in tokens])
        if np.abs((np.array([h.score for h in hypotheses]) - scores) * sums).max() > SCORE_TOLERANCE:
            found.append(f"prompt {i}: scores")
    return found


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_hypotheses_and_scores_equal_those_of_transformers(
    case, prompts, common_tokens, torch_model, lockstep, transformers_beams
):
    wanted = transformers_beams(prompts, NEW_TOKENS, common_tokens, **case)
    outputs = ours(case, prompts, common_tokens, torch_model, lockstep)
    assert differences(case, wanted, outputs) == []


def test_one_end_token_or_none_is_as_in_transformers(prompts, common_tokens, torch_model, lockstep, transformers_beams):
    case = {"num_beams": 3, "num_return_sequences": 3}
    for eos in ([], common_tokens[:1]):
        wanted = transformers_beams(prompts, NEW_TOKENS, eos, **case)
        assert differences(case, wanted, ours(case, prompts, eos, torch_model, lockstep)) == []


def test_the_cases_end_early_and_late(prompts, common_tokens, torch_model, lockstep):
    """The comparison says little unless outputs end in both ways, at many lengths."""
    outputs = ours(CASES[2], prompts, common_tokens, torch_model, lockstep)
    lengths = {len(h.token_ids) for hypotheses in outputs for h in hypotheses if h.finish_reason == "stop"}
    assert len(lengths) >= 4
    assert {h.finish_reason for hypotheses in outputs for h in hypotheses} == {"stop", "length"}


@pytest.mark.parametrize(
    "planted",
    [{"length_penalty": 1.001}, {"length_penalty": 0.9}, {"num_beams": 5}, {"early_stopping": True}, {"eos": True}],
    ids=str,
)
def test_a_planted_error_is_noticed(planted, prompts, common_tokens, torch_model, lockstep, transformers_beams):
    case = {"num_beams": 4, "num_return_sequences": 4}
    wanted = transformers_beams(prompts, NEW_TOKENS, common_tokens, **case)
    eos = common_tokens[1:] if planted.get("eos") else common_tokens
    changed = {**case, **{name: value for name, value in planted.items() if name != "eos"}}
    assert differences(case, wanted, ours(changed, prompts, eos, torch_model, lockstep))


def test_a_row_with_the_wrong_parent_is_noticed(prompts, common_tokens, torch_model, lockstep, transformers_beams):
    class Confused:
        start = staticmethod(torch_model.start)

        @staticmethod
        def step(parents, tokens):
            return torch_model.step([parents[0], *parents[:-1]], tokens)

    case = {"num_beams": 4, "num_return_sequences": 4}
    wanted = transformers_beams(prompts, NEW_TOKENS, common_tokens, **case)
    assert differences(case, wanted, ours(case, prompts, common_tokens, Confused, lockstep))
