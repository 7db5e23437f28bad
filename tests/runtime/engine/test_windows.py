"""Layers with a window hold the cache of their window only, and compute what they would with all of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.modules import random_checkpoints

from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest
from llmc.runtime import Model, Request, SamplingParams, load
from llmc.runtime.kv import host_cache

CONTEXT, WINDOW, CHUNK = 1024, 40, 96
PROMPT, NEW = 420, 120  # more than ten windows, and several times so much as is let go of at once
# Windows beside layers that see everything, with softcaps, and without ropes.
FAMILIES = ("gemma2-softcaps", "cohere2-window-rotated")
# Logits of float32 differ from transformers' by about 1e-5 (tests/export/test_parity.py); a lost position costs 1e-2.
TIE = 1e-3


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    changes = {"sliding_window": WINDOW, "max_position_embeddings": CONTEXT}
    return random_checkpoints().make_case(request.param, tmp_path_factory, **changes)


@pytest.fixture(scope="module")
def bundle(case: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    build(BuildRequest(case.export, folder, precision="fp32", max_batch=4, prefill_chunk=CHUNK))
    return folder


def prompt(seed: int, length: int = PROMPT) -> list[int]:
    return np.random.default_rng(seed).integers(2, 96, length).tolist()


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NEW, "temperature": 0, "ignore_eos": True, "detokenize": False, **more})


def answers(model: Model, *requests: Request) -> list[list[tuple[int, ...]]]:
    """The tokens of each output of each request, all of them submitted at once."""
    handles = [model.submit(request) for request in requests]
    return [[output.token_ids for output in handle.result(120).outputs] for handle in handles]


def everything(model: Model) -> list[Any]:
    """Tokens of all ways in which rows are fed, copied, moved and taken up again."""
    seeded = {"temperature": 1.0, "seed": 3}
    found: list[Any] = answers(
        model,
        Request(prompt(1), greedy(logprobs=2)),
        Request(prompt(2, 200), greedy(max_tokens=300)),  # leaves others behind, whose rows are moved
        Request(prompt(3), greedy(n=3, **seeded)),
        Request(prompt(4), greedy(num_beams=3, num_return_sequences=2)),
        Request(prompt(5) + prompt(5, 60), greedy(speculate=True)),
    )
    again = [*prompt(1), *found[0][0]]
    for tokens in (again + prompt(6, 40), prompt(1)[:300] + prompt(7, 40)):  # the conversation, and another branch
        handle = model.submit(Request(tokens, greedy()))
        result = handle.result(120)
        found.append((result.usage.cached_tokens, result.outputs[0].token_ids))
    return found


def opened(bundle: Path, **options: Any) -> Model:
    return load(bundle, self_test=False, threads=1, draft="lookup", prefix_cache_bytes=1 << 24, **options)


def test_greedy_tokens_are_those_of_transformers(case, bundle):
    with opened(bundle) as model:
        tokens = answers(model, Request(prompt(1), greedy(speculate=False)))[0][0]
        cache = model.runner.session.cache
        let_go = cache.whole_from(0)
    assert let_go > 3 * WINDOW
    logits = case.reference(np.array([[*prompt(1), *tokens]]))[0, PROMPT - 1 : -1]
    assert (logits.max(-1) - logits[np.arange(NEW), tokens] < TIE).all()


@pytest.mark.parametrize("level", ["fast", "strict"])
def test_every_way_of_feeding_gives_the_tokens_of_a_whole_cache(bundle, level, tmp_path, monkeypatch):
    options: dict[str, Any] = {"determinism": level, "max_batch": 4}
    with opened(bundle, prefix_cache_folder=tmp_path / "prefixes", **options) as model:
        found = everything(model)
        cache = model.runner.session.cache
        windowed = next(i for i, tensor in enumerate(cache.tensors) if tensor.window)
        assert model.engine.call(lambda: not cache.arrays[windowed][:, :, 128:192].any(axis=(1, 2, 3)).all())
    with opened(bundle, prefix_cache_folder=tmp_path / "prefixes", **options) as model:
        restored = model.submit(Request([*prompt(1), *prompt(6, 40)], greedy())).result(120)
        assert restored.usage.cached_tokens > 3 * WINDOW
    other = {"fast": "strict", "strict": "fast"}[level]
    with opened(bundle, prefix_cache_folder=tmp_path / "prefixes", **options | {"determinism": other}) as model:
        again = model.submit(Request([*prompt(1), *prompt(6, 40)], greedy())).result(120)
        assert again.usage.cached_tokens == 0  # what another level's calls left has other bits
    monkeypatch.setattr(host_cache, "LETS_GO", False)
    with opened(bundle, **options) as model:
        assert everything(model) == found
        expected = model.submit(Request([*prompt(1), *prompt(6, 40)], greedy())).result(120)
        assert expected.outputs[0].token_ids == restored.outputs[0].token_ids
