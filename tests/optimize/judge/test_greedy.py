"""The float32 bundle of the small model says what transformers says, however its prompts are cut."""

from pathlib import Path

import numpy as np
import pytest

from llmc.runtime import Model, load

NEW_TOKENS = 40
# Fewer tokens than every chunk, more than the longest, and all between.
LENGTHS = [1, 7, 8, 64, 65, 520]


@pytest.fixture(scope="module")
def prompts(fp32_bundle: Path, tiny_checkpoint: Path) -> list[list[int]]:
    """Pieces of the validation text."""
    with load(fp32_bundle) as model:
        ids = model.tokenizer.encode((tiny_checkpoint.parent / "validation.txt").read_text(encoding="utf-8"))
    starts = np.linspace(0, len(ids) - max(LENGTHS), len(LENGTHS)).astype(int)
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def wanted(tiny_checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates in float32, past any end of text."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "use_cache": True}
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answers.append(answer[0, len(prompt) :].tolist())
    return answers


def greedy(model: Model, prompt: list[int]) -> list[int]:
    return list(model.generate(prompt, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True).token_ids)


@pytest.mark.parametrize("chunk", [7, 64])
def test_greedy_tokens_equal_transformers(fp32_bundle, prompts, wanted, chunk):
    with load(fp32_bundle, prefill_chunk=chunk, threads=1) as model:
        answers = [greedy(model, prompt) for prompt in prompts]
    assert answers == wanted
    assert {len(answer) for answer in answers} == {NEW_TOKENS}


def test_another_model_says_something_else(prompts, wanted, tiny_bundle):
    """As many tokens tell float32 from int8, so they tell it from a wrong number."""
    with load(tiny_bundle, threads=1) as model:
        answers = [greedy(model, prompt) for prompt in prompts]
    assert answers != wanted
