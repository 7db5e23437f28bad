"""The gate: what breaks a budget, and what the refusal says."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from llmc.bundle import Budget, PhaseQuality, Quality, Recipe
from llmc.errors import BuildError
from llmc.optimize.build import build
from llmc.optimize.judge.gate import check, name_better, violations
from llmc.optimize.judge.layers import LayerError
from llmc.optimize.recipe import BuildRequest, Request, find_recipe, read_recipe, resolve
from llmc.optimize.targets import capabilities

QUALITY = Quality(
    text="notes.txt",
    sha256="a" * 64,
    positions=1000,
    window=256,
    reference_perplexity=20.0,
    phases={"prefill": PhaseQuality(20.1, 0.01, 0.1, 0.97), "decode": PhaseQuality(20.6, 0.04, 0.3, 0.9)},
    greedy_match=None,
    greedy_tokens=0,
)
ERRORS = tuple(
    LayerError(name, phase, ratio)
    for phase in ("prefill", "decode")
    for name, ratio in [
        ("model.layers.0", 0.02),
        ("model.layers.1", 0.001),
        ("model.layers.2", 0.01),
        ("model.layers.3", 0.0001),
        ("lm_head", 0.005),
    ]
)


def recipe(name: str = "int4", **changes: Any) -> Recipe:
    """A recipe that comes with llmc, as a build resolves it."""
    path = find_recipe(name)
    assert path is not None
    return dataclasses.replace(resolve(read_recipe(path), capabilities("cpu"), 4096, name, True)[0], **changes)


def refused(budget: Budget) -> str:
    with pytest.raises(BuildError) as error:
        check(QUALITY, recipe(budget=budget), lambda: ERRORS)
    return str(error.value)


@pytest.mark.parametrize(
    "budget",
    [Budget(), Budget(max_kl=0.04), Budget(min_agreement=0.9), Budget(max_perplexity_increase=0.031), Budget(1, 0, 1)],
)
def test_a_budget_that_is_kept_lets_pass_without_measuring_anything(budget):
    check(QUALITY, recipe(budget=budget), lambda: pytest.fail("nothing is to be explained"))


@pytest.mark.parametrize(
    ("budget", "phases"),
    [
        (Budget(max_kl=0.039), ["decode"]),
        (Budget(max_kl=0.009), ["prefill", "decode"]),
        (Budget(min_agreement=0.95), ["decode"]),
        (Budget(max_perplexity_increase=0.02), ["decode"]),
    ],
)
def test_a_breach_is_found_in_every_phase_that_has_it(budget, phases):
    assert [phase for _, phase in violations(QUALITY, budget)] == phases


def test_the_message_has_all_numbers_and_the_worst_layers_on_one_line():
    message = refused(Budget(max_kl=0.02, min_agreement=0.91))
    assert "\n" not in message
    assert "broken on notes.txt" in message
    assert "mean KL 0.04, at most 0.02 is allowed (decode)" in message
    assert "top-1 agreement 90.00%, at least 91.00% is required (decode)" in message
    assert "model.layers.0 (17.0 dB, decode), model.layers.2 (20.0 dB, decode), lm_head (23.0 dB, decode)" in message
    assert "Build with --recipe int4-quality, " in message
    assert message.endswith("Nothing was published")


@pytest.mark.parametrize(
    ("name", "phases", "better"),
    [
        ("int4", ["decode"], "--recipe int4-quality"),
        ("int4", ["prefill"], "--recipe int8-exact"),
        ("int4-quality", ["prefill", "decode"], "--int8"),
        ("int8", ["decode"], "--recipe int8-exact"),
        ("int8-exact", ["prefill"], "--fp32"),
        ("int8-fast", ["decode"], "--recipe int8-exact"),
    ],
)
def test_every_recipe_has_one_that_loses_less(name, phases, better):
    assert name_better(recipe(name), phases) == better


@pytest.mark.parametrize(
    ("name", "excess", "better"),
    [
        ("int4", 3, "--recipe int4-quality"),
        ("int4", 4, "--int8"),
        ("int4", 51, "--fp16"),
        ("int8", 3, "--recipe int8-exact"),
        ("int8", 4, "--fp16"),
        ("int8-exact", 4, "--fp16"),
        ("int8", float("nan"), "--fp16"),
    ],
)
def test_a_breach_too_wide_for_the_next_recipe_names_one_further_up(name, excess, better):
    assert name_better(recipe(name), ["decode"], excess) == better


@pytest.mark.parametrize(("most", "better"), [(0.02, "--recipe int4-quality"), (1e-6, "--fp16"), (0.0, "--fp16")])
def test_the_message_names_what_can_meet_the_budget(most, better):
    assert f"Build with {better}, " in refused(Budget(max_kl=most))


@pytest.mark.parametrize(
    ("changes", "better"),
    [
        ({"scheme": "rtn", "block_size": 32}, "--recipe int4-quality"),
        ({"precision": "source"}, "--small"),
        ({"precision": "source", "phases": "shared"}, "--fp32"),
        ({"compute": "float16"}, "--int8"),
        ({"compute": "float16", "head": "fp16"}, "--fp16"),
        ({"compute": "float16", "precision": "int8"}, "--fp16"),
    ],
)
def test_what_does_not_come_with_llmc_has_one_too(changes, better):
    assert name_better(recipe(**changes), ["decode"]) == better


CONTEXT = 64


@pytest.fixture(scope="module")
def text(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short piece of the validation text."""
    path = tmp_path_factory.mktemp("gate") / "short.txt"
    path.write_text((tiny_checkpoint.parent / "validation.txt").read_text(encoding="utf-8")[:3500], encoding="utf-8")
    return path


def test_a_build_beyond_its_budget_publishes_nothing_and_more_bits_mend_it(tiny_export, text, tmp_path):
    output, budget = tmp_path / "bundle", Budget(max_kl=0.009)
    request = Request(precision="int4", phases="shared", max_context=CONTEXT)
    with pytest.raises(BuildError, match=r"mean KL 0\.0\d+, at most 0\.009 is allowed"):
        build(BuildRequest(tiny_export, output, recipe=request, budget=budget, text=text))
    assert list(tmp_path.iterdir()) == []
    mended = dataclasses.replace(request, layers={"*.mlp.*": "int8", "*.v_proj": "int8"})
    quality = build(BuildRequest(tiny_export, output, recipe=mended, budget=budget, text=text)).manifest.quality
    assert (quality.text, quality.window) == ("short.txt", CONTEXT)
