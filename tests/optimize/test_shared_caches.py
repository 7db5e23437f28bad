"""Gemma 4 goes the whole way: layers that read caches of others, inputs of layers, values from keys."""

from pathlib import Path

import numpy as np
import pytest

from llmc.bundle import read_bundle
from llmc.errors import BuildError
from llmc.optimize.build import build
from llmc.optimize.judge.layers import layer_errors
from llmc.optimize.judge.reference import Reference
from llmc.optimize.recipe import Request
from llmc.runtime import load

NAMES = ("gemma4-keys-are-values", "gemma4-shared-caches-per-layer-inputs")
PROMPTS = [np.random.default_rng(size).integers(5, 96, size).tolist() for size in (3, 19, 40)]
TOKENS = 8
# Decibels that each layer keeps in 8 bits: 30 to 36 were measured. A layer that reads a wrong cache has less than 5.
LEAST = 25


@pytest.fixture(params=NAMES)
def case(request, exported):
    return exported(request.param)


def choose_greedily(case, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(TOKENS):
        tokens.append(int(case.reference(np.array([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_tokens_equal_transformers_alone_together_and_in_chunks(case, tmp_path: Path):
    """Chunks of 16: most calls want no logits, and shared layers then have no row of their own."""
    folder = build(case.export, tmp_path / "bundle", precision="fp32", recipe=Request(prefill_chunk=16)).output
    wanted = [choose_greedily(case, prompt) for prompt in PROMPTS]
    with load(folder) as model:
        handles = [model.stream(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True) for prompt in PROMPTS]
        together = [list(handle.result().outputs[0].token_ids) for handle in handles]
        alone = [
            list(model.generate(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True).outputs[0].token_ids)
            for prompt in PROMPTS
        ]
    assert together == alone == wanted


def test_every_layer_keeps_its_precision_in_8_bits(case, tmp_path: Path):
    folder = build(case.export, tmp_path / "bundle", precision="int8", recipe=Request(smoothing=0.0)).output
    windows = np.array([PROMPTS[2]])
    for error in layer_errors(folder, read_bundle(folder), Reference(case.export), windows):
        assert error.decibels > LEAST, error


def test_another_target_is_refused_by_name(exported, tmp_path: Path):
    with pytest.raises(BuildError, match="gemma4_text is not lowered for cuda yet"):
        build(exported(NAMES[0]).export, tmp_path / "bundle", target="cuda", precision="fp16")


def test_an_integer_cache_is_refused_where_layers_share_it(exported, tmp_path: Path):
    with pytest.raises(BuildError, match="layers of gemma4_text read the caches of others"):
        build(exported(NAMES[1]).export, tmp_path / "bundle", precision="fp32", recipe=Request(cache="int8"))
