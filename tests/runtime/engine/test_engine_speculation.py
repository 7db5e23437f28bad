"""Speculation, prefixes and saved conversations through a real engine: the same tokens, with less work."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doubles.clocks import even_costs

from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest
from llmc.optimize.recipe import Request as Recipe
from llmc.runtime import GenerationResult, Model, load

LENGTH = 40
SETTINGS = ({"temperature": 0}, {"temperature": 0.9, "top_k": 20, "seed": 5})
# Text that repeats itself, and text that does not.
PROMPTS = ("import os\n" * 6, "def area(width, height):\n    return ", "class Stack:\n    def push(self, item):\n")


@pytest.fixture(scope="module")
def int4_bundle(tiny_in: Callable[[str], Path]) -> Path:
    return tiny_in("int4")


@pytest.fixture(scope="module")
def plain(tiny_bundle: Path) -> list[tuple[int, ...]]:
    """Every prompt under every setting, one by one, without speculation."""
    with load(tiny_bundle, determinism="strict", self_test=False) as model:
        return [result.token_ids for result in results(model)]


def results(model: Model) -> list[GenerationResult]:
    return [model.generate(prompt, max_tokens=LENGTH, **how) for prompt in PROMPTS for how in SETTINGS]


def together(model: Model) -> list[GenerationResult]:
    handles = [model.stream(prompt, max_tokens=LENGTH, **how) for prompt in PROMPTS for how in SETTINGS]
    return [handle.result(120) for handle in handles]


@pytest.fixture(scope="module", params=["lookup", "model"])
def drafting(request: pytest.FixtureRequest, tiny_bundle: Path, int4_bundle: Path) -> Iterator[Model]:
    draft = "lookup" if request.param == "lookup" else int4_bundle
    options = {"determinism": "strict", "draft": draft, "self_test": False}
    with pytest.MonkeyPatch.context() as patch, load(tiny_bundle, **options) as model:
        even_costs(patch)
        yield model


def test_drafts_are_accepted_and_change_no_token(drafting, plain):
    found = results(drafting)
    assert [result.token_ids for result in found] == plain
    assert sum(result.metrics.accepted for result in found) > 0


def test_drafts_change_no_token_in_a_shared_batch(drafting, plain):
    assert [result.token_ids for result in together(drafting)] == plain


def test_a_request_may_decline_drafts(drafting):
    result = drafting.generate(PROMPTS[0], max_tokens=LENGTH, temperature=0, speculate=False)
    assert result.metrics.drafted == 0


@pytest.fixture(scope="module", params=["float32", "int8"])
def bundle(request, tiny_bundle, tiny_export, tmp_path_factory) -> Path:
    """A bundle with each kind of KV cache."""
    if request.param == "float32":
        return tiny_bundle
    from llmc.export.streaming import StreamedDecoder

    calibration = {"decoder": StreamedDecoder, "samples": 4, "length": 64}
    output = tmp_path_factory.mktemp("int8-cache") / "bundle"
    return build(BuildRequest(tiny_export, output, recipe=Recipe(cache="int8"), **calibration)).output


LONG = "def walk(path):\n    for name in sorted(os.listdir(path)):\n        print(name)\n" * 8


@pytest.mark.parametrize("level", ["fast", "strict"])
def test_a_prefix_comes_back_after_a_restart_and_changes_no_token(bundle, tmp_path, level):
    how = {"max_tokens": 12, "temperature": 0}
    with load(bundle, determinism=level, prefix_cache_folder=tmp_path, self_test=False) as model:
        cold = model.generate(LONG, **how)
        warm = model.generate(LONG, **how)
    with load(bundle, determinism=level, prefix_cache_folder=tmp_path, self_test=False) as model:
        restarted = model.generate(LONG, **how)
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == restarted.usage.cached_tokens > cold.usage.prompt_tokens - 34
    assert cold.token_ids == warm.token_ids == restarted.token_ids
