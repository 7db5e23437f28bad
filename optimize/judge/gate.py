"""The gate: a bundle beyond its quality budget is not published; its worst layers and a better recipe are named."""

import math
from collections.abc import Callable, Collection, Sequence

from llmc.bundle import Budget, Quality, Recipe
from llmc.errors import BuildError
from llmc.optimize.judge.layers import LayerError
from llmc.optimize.recipe import BITS, PLAIN_BLOCK, WIDER_BLOCK

WORST = 3
# Times that another recipe of as many bits divides KL by, and 8 bits that of 4: int8-exact 2, int4-quality 2 and
# int8 36 in decode of SmolLM2-135M.
SAME_BITS, MORE_BITS = 3.0, 50.0
# Largest mean KL, in nats, of a build in float32, which only adds in another order. The families' random tiny models
# are below 1e-9; a lowering that lost a factor of the logits had 0.8. Mixtures need no more: float32 and float64 chose
# the same of 128 random experts in all of 48 layers for 1,500 tokens, and had 7e-12.
UNROUNDED_KL = 1e-4
# Largest cross entropy of an unquantized model on llmc's own texts, as a share of that of chance, the logarithm of the
# vocabulary: SmolLM2-135M has 0.31 and the model of recipes/tiny, with 3 million weights and trained on code, 0.54.
# Random weights have 1, a wrong vocabulary more.
UNTRAINED_SHARE = 0.56


def violations(quality: Quality, budget: Budget) -> list[tuple[str, str]]:
    """Every broken limit of the budget, and the phase that breaks it, in words."""
    broken: list[tuple[str, str]] = []
    for phase, path in quality.phases.items():
        kl, same = path.mean_kl, path.top1_agreement
        assert kl is not None and same is not None and quality.reference_perplexity is not None
        increase = path.perplexity / quality.reference_perplexity - 1
        # Compare so that NaN fails.
        if budget.max_kl is not None and not kl <= budget.max_kl:
            broken.append((f"mean KL {kl:.4g}, at most {budget.max_kl:g} is allowed", phase))
        if budget.min_agreement is not None and not same >= budget.min_agreement:
            broken.append((f"top-1 agreement {same:.2%}, at least {budget.min_agreement:.2%} is required", phase))
        if budget.max_perplexity_increase is not None and not increase <= budget.max_perplexity_increase:
            allowed = f"at most {budget.max_perplexity_increase:+.2%} is allowed"
            broken.append((f"perplexity {increase:+.2%}, {allowed}", phase))
    return broken


def name_better(recipe: Recipe, phases: Collection[str], excess: float = 1.0) -> str:
    """The option with a recipe that loses less in these phases than ``recipe``; for CPUs one that may divide KL by
    ``excess``."""
    if recipe.sparsity:
        return "less sparsity in the recipe"
    if recipe.compute != "float32":  # a GPU's
        return "--int8" if recipe.precision == "int4" and recipe.head == "int8" else "--fp16"  # TensorRT's is fp16
    four_bits = recipe.precision == "int4" and ("decode" in phases or recipe.phases == "shared")
    if not excess <= (MORE_BITS if four_bits else SAME_BITS):  # NaN is not
        return "--fp16" if recipe.precision in BITS else "--fp32"
    if four_bits:
        if excess > SAME_BITS:
            return "--int8"
        if recipe.block_size > WIDER_BLOCK:
            return "--recipe int4"
        return "--recipe int4-quality" if (recipe.block_size, recipe.scheme) != (PLAIN_BLOCK, "gptq") else "--int8"
    if recipe.precision == "source":
        return "--small" if recipe.phases != "shared" else "--fp32"
    exact = (recipe.phases, recipe.activations, recipe.block_size) == ("shared", "none", PLAIN_BLOCK)
    return "--fp32" if exact or not recipe.block_size else "--recipe int8-exact"


def check(quality: Quality, recipe: Recipe, explain: Callable[[], Sequence[LayerError]]) -> None:
    """Raise BuildError for a bundle beyond its budget; only then ``explain`` measures its layers."""
    broken = violations(quality, recipe.budget)
    if broken:
        numbers = "; ".join(f"{text} ({phase})" for text, phase in broken)
        kl, most = quality.mean_kl, recipe.budget.max_kl
        excess = 1.0 if kl is None or most is None else kl / most if most else math.inf
        better = name_better(recipe, {phase for _, phase in broken}, excess)
        raise BuildError(
            f"the quality budget is broken on {quality.text}: {numbers}. Worst layers: {_worst(explain(), broken)}. "
            f"Build with {better}, give these layers more bits in the recipe's [layers], or allow more. Nothing was "
            "published"
        )


def check_unrounded(quality: Quality, recipe: Recipe) -> None:
    """Raise BuildError if a build without rounding differs from the unquantized model."""
    rounds = recipe.precisions() != {"fp32"} or recipe.cache != "float32" or recipe.sparsity
    kl = quality.mean_kl
    if not rounds and kl is not None and not kl <= UNROUNDED_KL:
        raise BuildError(
            f"all of this build is float32, yet its mean KL from the unquantized model is {kl:.2g} nats on "
            f"{quality.text}, expected at most {UNROUNDED_KL}: llmc made another model of this checkpoint. Nothing was "
            "published; please report it with the checkpoint's config.json"
        )


def list_doubts(quality: Quality, vocab_size: int) -> list[str]:
    """A warning about an unquantized model that predicts llmc's own text badly, as with a wrong tokenizer."""
    perplexity = quality.reference_perplexity
    if perplexity is None or perplexity <= vocab_size**UNTRAINED_SHARE:  # NaN is not
        return []
    return [
        f"the unquantized model has a perplexity of {perplexity:.4g} on {quality.text} (English for the most part), "
        f"where chance has {vocab_size} and a language model at most {vocab_size**UNTRAINED_SHARE:.3g}: the checkpoint "
        "has another model's tokenizer, or is not trained on such text"
    ]


def _worst(errors: Sequence[LayerError], broken: Sequence[tuple[str, str]]) -> str:
    phases = {phase for _, phase in broken}
    ranked = sorted((error for error in errors if error.phase in phases), key=lambda error: -error.decibels)
    worst = list({error.name: error for error in ranked}.values())  # each in the phase where it is worst
    worst.sort(key=lambda error: error.decibels)
    return ", ".join(f"{error.name} ({error.decibels:.1f} dB, {error.phase})" for error in worst[:WORST])
