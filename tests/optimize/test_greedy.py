"""The float32 bundle of the small model says what transformers says, however its prompts are cut."""

from pathlib import Path

import numpy as np
import pytest

from llmc.optimize.build import build
from llmc.runtime import load

PROMPTS = 20
NEW_TOKENS = 64
# Fewer tokens than every chunk, more than the longest, and all between.
LENGTHS = [1, 2, 3, 5, 7, 8, 14, 20, 31, 48, 63, 64, 65, 100, 127, 128, 129, 200, 300, 520]


@pytest.fixture(scope="module")
def fp32(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model in float32."""
    return build(tiny_export, tmp_path_factory.mktemp("greedy") / "fp32", precision="fp32").output


@pytest.fixture(scope="module")
def prompts(fp32: Path, tiny_checkpoint: Path) -> list[list[int]]:
    """Pieces of the validation text."""
    with load(fp32) as model:
        ids = model.tokenizer.encode((tiny_checkpoint.parent / "validation.txt").read_text(encoding="utf-8"))
    starts = np.linspace(0, len(ids) - max(LENGTHS), PROMPTS).astype(int)
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


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_greedy_tokens_equal_transformers(fp32, prompts, wanted, chunk):
    assert len(prompts) == PROMPTS
    with load(fp32, prefill_chunk=chunk, threads=1) as model:
        answers = [
            list(model.generate(prompt, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True).token_ids)
            for prompt in prompts
        ]
    assert answers == wanted
    assert {len(answer) for answer in answers} == {NEW_TOKENS}
