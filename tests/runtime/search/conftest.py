"""A driver that runs strategies on any model, a small made-up model, and the tiny checkpoint in torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.runtime.search.base import Hypothesis, Strategy

Floats = NDArray[np.float32]
PROMPTS = 10
PROMPT_LENGTH = 24


class Rows(Protocol):
    """A model with a cache of rows."""

    def start(self, prompts: Sequence[Sequence[int]]) -> Floats:
        """A row for every prompt: logits [rows, V] after it."""

    def step(self, parents: Sequence[int], tokens: Sequence[int]) -> Floats:
        """Row i becomes row parents[i] and tokens[i]: logits [rows, V]."""


def run_in_lockstep(
    strategies: Sequence[Strategy], prompts: Sequence[Sequence[int]], model: Rows
) -> list[list[Hypothesis]]:
    """Every strategy with its prompt, all in one batch; returns the outputs of each."""
    logits = model.start(prompts)
    plans = [
        strategy.start(prompt, logits[i]) for i, (strategy, prompt) in enumerate(zip(strategies, prompts, strict=True))
    ]
    firsts = list(range(len(prompts)))  # the first row of each strategy in the step before
    while any(plans):
        parents = [first + branch.parent for first, plan in zip(firsts, plans, strict=True) for branch in plan]
        logits = model.step(parents, [branch.token for plan in plans for branch in plan])
        ends = np.cumsum([len(plan) for plan in plans]).tolist()
        firsts = [end - len(plan) for end, plan in zip(ends, plans, strict=True)]
        plans = [
            strategy.step(logits[first:end]) if end > first else []
            for strategy, first, end in zip(strategies, firsts, ends, strict=True)
        ]
    return [strategy.outputs() for strategy in strategies]


@dataclass
class MadeUpModel:
    """Logits that are a function of all tokens so far and look random."""

    vocab_size: int
    seed: int = 0
    rows: list[tuple[int, ...]] = field(default_factory=list)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Logits after ``tokens`` [V]."""
        return np.random.default_rng([self.seed, *tokens]).normal(size=self.vocab_size) * 2

    def start(self, prompts: Sequence[Sequence[int]]) -> Floats:
        self.rows = [tuple(prompt) for prompt in prompts]
        return self._logits()

    def step(self, parents: Sequence[int], tokens: Sequence[int]) -> Floats:
        self.rows = [(*self.rows[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        return self._logits()

    def _logits(self) -> Floats:
        return np.array([self.logits(row) for row in self.rows], np.float32)


class TorchModel:
    """A model of transformers and its cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._cache: Any = None

    def start(self, prompts: Sequence[Sequence[int]]) -> Floats:
        return self._run([list(prompt) for prompt in prompts])

    def step(self, parents: Sequence[int], tokens: Sequence[int]) -> Floats:
        import torch

        self._cache.reorder_cache(torch.tensor(parents))
        return self._run([[token] for token in tokens], past_key_values=self._cache)

    def _run(self, ids: list[list[int]], **past: Any) -> Floats:
        import torch

        with torch.no_grad():
            output = self.model(torch.tensor(ids), use_cache=True, **past)
        self._cache = output.past_key_values
        return output.logits[:, -1].numpy()


@pytest.fixture(scope="session")
def lockstep() -> Callable[..., list[list[Hypothesis]]]:
    """Runs strategies side by side."""
    return run_in_lockstep


@pytest.fixture(scope="session")
def decode() -> Callable[[Strategy, Sequence[int], Rows], list[Hypothesis]]:
    """Runs one strategy."""
    return lambda strategy, prompt, model: run_in_lockstep([strategy], [prompt], model)[0]


@pytest.fixture(scope="session")
def made_up() -> type[MadeUpModel]:
    return MadeUpModel


@pytest.fixture(scope="session")
def torch_model(tiny_checkpoint: Path) -> TorchModel:
    """The tiny checkpoint in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return TorchModel(AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval())


@pytest.fixture(scope="session")
def prompts(tiny_checkpoint: Path) -> list[list[int]]:
    """Pieces of the validation text, of equal length."""
    from tokenizers import Tokenizer

    text = (tiny_checkpoint.parent / "validation.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    starts = np.linspace(0, len(ids) - PROMPT_LENGTH, PROMPTS).astype(int)
    return [ids[start : start + PROMPT_LENGTH] for start in starts]


@pytest.fixture(scope="session")
def common_tokens(prompts: list[list[int]]) -> list[int]:
    """The most common tokens: taken for end-of-sequence tokens, they end outputs early and often."""
    ids, counts = np.unique(np.concatenate(prompts), return_counts=True)
    return ids[np.argsort(-counts, kind="stable")][:3].tolist()


@pytest.fixture(scope="session")
def transformers_beams(torch_model: TorchModel) -> Callable[..., list[list[tuple[tuple[int, ...], float]]]]:
    """Tokens and score of every output of every prompt, as transformers' beam search has them."""
    import torch

    def until_end(tokens: list[int], eos: list[int]) -> tuple[int, ...]:
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
        return tuple(tokens[:end])

    def generate(prompts: list[list[int]], max_tokens: int, eos: list[int], **options: Any) -> list[Any]:
        ids = torch.tensor(prompts)
        torch_model.model.generation_config.eos_token_id = None
        answer = torch_model.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=eos or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        new = [until_end(row, eos) for row in answer.sequences[:, ids.shape[1] :].tolist()]
        pairs = list(zip(new, answer.sequences_scores.tolist(), strict=True))
        count = len(pairs) // len(prompts)
        return [pairs[i : i + count] for i in range(0, len(pairs), count)]

    return generate
