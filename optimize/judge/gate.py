"""The gate: a bundle beyond its quality budget is not published, and what would mend it is said instead.

The head's KL is measured. The rest is shared among embedding and linears by the power of the noise that each adds to
the hidden state, for noise of different linears is nearly independent. Rebuilt with an override, the small model lost
0.7 ... 1.4 times the KL that was estimated.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from llmc.bundle import Budget, Manifest, Quality, Recipe
from llmc.errors import BuildError
from llmc.inventory import EMBEDDING, HEAD
from llmc.optimize.judge.layers import SMALLEST, WINDOWS, LayerError, layer_errors, linear_errors
from llmc.optimize.judge.reference import Ids, Reference
from llmc.optimize.lower.context import Float8, QuantConfig, WeightOnly, quant_configs
from llmc.optimize.progress import Progress, silent

log = logging.getLogger(__name__)

# Share of a linear's KL that is left when its weights go from 4 bits to 8, activations in blocks of 8 bits as before:
# 0.00043 of 0.0353 on the small model.
INT8_LEAVES = 1 / 80
# Overrides aim at this share of what is allowed: estimates are about that far off.
AIM = 0.7
WORST = 3
SHOWN = 16
# Mean KL of a build in float32, in nats: sums in another order. The families' random tiny models are below 1e-9, and a
# multiplier of the logits that the lowering had lost showed as 0.8.
UNROUNDED_KL = 1e-4
# An unquantized model may be so much in doubt about a token of llmc's own texts, as a share of what chance has, which
# is the logarithm of the vocabulary: SmolLM2-135M has 0.31 and the model of recipes/tiny, with 3 million weights and
# made for code, 0.54. Random weights have 1, and tokens of another vocabulary more.
UNTRAINED_SHARE = 0.56
BITS = {"int4": 4, "int8": 8, "fp8": 8, "fp16": 16}


@dataclass(frozen=True)
class Violation:
    """A limit that is broken. ``target`` is the mean KL that would about meet it."""

    text: str
    phase: str
    target: float


@dataclass(frozen=True)
class Part:
    """A linear that may be overridden: its precision, its weights, and the KL that it causes, about."""

    name: str
    precision: str
    weights: int
    kl: float


@dataclass(frozen=True)
class Override:
    """An entry of the recipe's ``[layers]`` table; what it removes of the mean KL, about, and the bytes it adds."""

    pattern: str
    precision: str
    removes: float
    adds: int

    def covers(self, part: Part) -> bool:
        """True if it gives a linear more bits."""
        return BITS[part.precision] < BITS[self.precision] and fnmatchcase(part.name, self.pattern)

    def __str__(self) -> str:
        return f'"{self.pattern}" = "{self.precision}" (+{self.adds / 1e6:.2g} MB, about -{self.removes:.2g} KL)'


@dataclass(frozen=True)
class KLBreakdown:
    """Causes of the KL of one path, about: linears whose weights may get more bits, and all else.

    ``floats`` tells that only floats mend them: int8 has no more bits than fp8.
    """

    parts: tuple[Part, ...]
    other: float
    floats: bool = False

    def after(self, overrides: Sequence[Override]) -> "KLBreakdown":
        """The breakdown that is left with overrides."""
        parts, removed = self.parts, 0.0
        for override in overrides:
            removed += _kept(override.precision) * sum(part.kl for part in parts if override.covers(part))
            parts = tuple(part for part in parts if not override.covers(part))
        return replace(self, parts=parts, other=self.other + removed)

    @property
    def kl(self) -> float:
        """All of it."""
        return self.other + sum(part.kl for part in self.parts)


@dataclass(frozen=True)
class Advice:
    """An explanation of lost quality: errors of the layers, worst first, and the causes of each path's KL.

    ``split`` tells whether prefill has a graph of its own, ``static`` whether a single one quantizes activations.
    """

    errors: tuple[LayerError, ...]
    paths: dict[str, KLBreakdown]
    split: bool
    static: bool = False


def broken_limits(kl: float, agreement: float, increase: float, budget: Budget) -> dict[str, str]:
    """The figure found and the one allowed, in words, by the name of each limit that is broken.

    ``kl`` is in nats, ``agreement`` 0 ... 1, ``increase`` that of the perplexity, 0.02 for 2 %.
    """
    found: dict[str, str] = {}
    # NaN compares false with everything, so ask for what must hold.
    if budget.max_kl is not None and not kl <= budget.max_kl:
        found["max_kl"] = f"mean KL {kl:.4g}, at most {budget.max_kl:g} is allowed"
    if budget.min_agreement is not None and not agreement >= budget.min_agreement:
        found["min_agreement"] = f"top-1 agreement {agreement:.2%}, at least {budget.min_agreement:.2%} is required"
    if budget.max_perplexity_increase is not None and not increase <= budget.max_perplexity_increase:
        allowed = f"at most {budget.max_perplexity_increase:+.2%} is allowed"
        found["max_perplexity_increase"] = f"perplexity {increase:+.2%}, {allowed}"
    return found


def violations(quality: Quality, budget: Budget) -> list[Violation]:
    """Every limit of the budget that a path breaks, with the mean KL that would about keep it."""
    found: list[Violation] = []
    for phase, path in quality.phases.items():
        kl, same = path.mean_kl, path.top1_agreement
        assert kl is not None and same is not None and quality.reference_perplexity is not None
        increase = path.perplexity / quality.reference_perplexity - 1
        for limit, text in broken_limits(kl, same, increase, budget).items():
            found.append(Violation(text, phase, _target(limit, getattr(budget, limit), kl, same, increase)))
    return found


def _target(limit: str, allowed: float, kl: float, agreement: float, increase: float) -> float:
    if limit == "max_kl":
        return allowed
    if limit == "min_agreement":  # the share of changed first choices grows as the logits' noise, so as the root of KL
        return kl * ((1 - allowed) / max(1 - agreement, 1e-9)) ** 2
    return kl * allowed / max(increase, 1e-9)


def check(quality: Quality, budget: Budget, explain: Callable[[], Advice]) -> None:
    """Let a bundle pass that keeps its budget; ``explain`` measures where quality is lost, only if it does not.

    Raises:
        BuildError: the budget is broken; the message has the numbers, the worst layers and the cheapest overrides.
    """
    broken = violations(quality, budget)
    if not broken:
        return
    advice = explain()
    for error in advice.errors:
        log.info("%s, %s: %.1f dB signal to noise", error.name, error.phase, error.decibels)
    numbers = "; ".join(f"{violation.text} ({violation.phase})" for violation in broken)
    raise BuildError(
        f"the quality budget is broken on {quality.text}: {numbers}. Worst layers: {_worst(advice.errors, broken)}. "
        f"{_remedy(broken, advice)}. Nothing was published"
    )


def check_unrounded(quality: Quality, recipe: Recipe) -> None:
    """Raise BuildError for a build that rounds nothing and yet is another model than the unquantized one."""
    rounds = recipe.precisions() != {"fp32"} or recipe.cache != "float32"
    kl = quality.mean_kl
    if not rounds and kl is not None and not kl <= UNROUNDED_KL:
        raise BuildError(
            f"all of this build is float32, yet its mean KL from the unquantized model is {kl:.2g} nats on "
            f"{quality.text}, expected at most {UNROUNDED_KL}: llmc made another model of this checkpoint. Nothing was "
            "published; please report it with the checkpoint's config.json"
        )


def doubted(quality: Quality, vocab_size: int) -> list[str]:
    """A sentence about an unquantized model that does not know llmc's own text, as none does with a wrong tokenizer."""
    found = quality.reference_perplexity
    if found is None or found <= vocab_size**UNTRAINED_SHARE:  # NaN is not
        return []
    return [
        f"the unquantized model has a perplexity of {found:.4g} on {quality.text} (English for the most part), where "
        f"chance has {vocab_size} and a language model at most {vocab_size**UNTRAINED_SHARE:.3g}: the checkpoint has "
        "another model's tokenizer, or is not trained on such text"
    ]


def _worst(errors: Sequence[LayerError], broken: Sequence[Violation]) -> str:
    phases = {violation.phase for violation in broken}
    worst = sorted((e for e in errors if e.phase in phases), key=lambda e: e.decibels)[:WORST]
    return ", ".join(f"{error.name} ({error.decibels:.1f} dB, {error.phase})" for error in worst)


# ------------------------------------------------------------------------------------------------------------ overrides


def _remedy(broken: Sequence[Violation], advice: Advice) -> str:
    """Advice for the recipe: overrides for decode, then those that prefill needs beyond them."""
    if advice.static:  # rebuilt with overrides, the small model kept three times the KL that was estimated
        return (
            "No overrides are named, for errors of activations in 8 bits do not add up layer by layer: "
            'activations = "none" keeps activations in floats'
        )
    chosen: list[Override] = []
    texts: list[str] = []
    for phase in ("decode", "prefill"):
        targets = [violation.target for violation in broken if violation.phase == phase]
        if not targets:
            continue
        breakdown = advice.paths[phase].after(chosen)
        precision = _more_bits(breakdown)
        found = cheapest(breakdown, AIM * min(targets), precision) or cheapest(breakdown, min(targets), precision)
        chosen += found
        if not found and breakdown.kl > min(targets):
            texts.append(_impossible(phase, precision, breakdown, min(targets), advice.split))
    if chosen:
        shown = ", ".join(map(str, chosen[:SHOWN]))
        more = f" and {len(chosen) - SHOWN} more" if len(chosen) > SHOWN else ""
        left = max(advice.paths[violation.phase].after(chosen).kl for violation in broken)
        texts.insert(
            0, f"The cheapest overrides in the recipe's [layers] leave a mean KL of about {left:.2g}: {shown}{more}"
        )
    return ". ".join(texts)


def _more_bits(breakdown: KLBreakdown) -> str:
    """From 8 bits there is only one way up, and it is dear: it is for models that have nothing below 8 bits."""
    return "int8" if not breakdown.floats and any(part.precision == "int4" for part in breakdown.parts) else "fp16"


def _impossible(phase: str, precision: str, breakdown: KLBreakdown, target: float, split: bool) -> str:
    left = breakdown.after([Override("*", precision, 0.0, 0)]).kl
    shared = 'phases = "shared" gives prefill the decode graph, whose activations stay in floats'
    remedy = shared if split and phase == "prefill" else "give a larger budget, or a higher precision"
    needed = f"a mean KL of about {left:.2g} ({phase}), where about {target:.2g} is needed"
    return f"Even {precision} everywhere leaves {needed}: {remedy}"


def cheapest(breakdown: KLBreakdown, target: float, precision: str) -> list[Override]:
    """Overrides that remove most KL per byte, one after another until ``target`` is left; none if all is too few."""
    chosen, left = list[Override](), breakdown
    while left.kl > target:
        options = [_override(pattern, precision, left.parts) for pattern in _patterns(left.parts, precision)]
        if not options:
            return []
        chosen.append(max(options, key=lambda option: option.removes / option.adds))
        left = left.after(chosen[-1:])
    for override in sorted(chosen, key=lambda override: -override.adds):  # the last one may have made another needless
        others = [other for other in chosen if other is not override]
        if breakdown.after(others).kl <= target:
            chosen = others
    return chosen


def _override(pattern: str, precision: str, parts: Iterable[Part]) -> Override:
    override = Override(pattern, precision, 0.0, 0)
    covered = [part for part in parts if override.covers(part)]
    adds = sum(part.weights * (BITS[precision] - BITS[part.precision]) // 8 for part in covered)
    return replace(override, removes=(1 - _kept(precision)) * sum(part.kl for part in covered), adds=max(1, adds))


def _kept(precision: str) -> float:
    return INT8_LEAVES if precision == "int8" else 0.0


def _patterns(parts: Iterable[Part], precision: str) -> list[str]:
    """The head, each layer, and each kind of linear, as far as there is something to override."""
    found: dict[str, None] = {}
    for part in parts:
        words = part.name.split(".")
        if BITS[part.precision] < BITS[precision]:
            whole = [HEAD] if part.name == HEAD else [".".join([*words[:3], "*"]), ".".join(["*", *words[-2:]])]
            found |= dict.fromkeys(whole)
    return list(found)


def advise(
    folder: Path, manifest: Manifest, export: Path, quality: Quality, windows: Ids, progress: Progress = silent
) -> Advice:
    """Measure where a bundle loses its quality, on the first :data:`WINDOWS` of windows of tokens [n, W]."""
    reference, few = Reference(export), windows[:WINDOWS]
    errors = layer_errors(folder, manifest, reference, few, progress)
    linears = linear_errors(folder, manifest, reference, few, progress)
    shared = {
        phase: _breakdown(path.mean_kl or 0.0, phase, errors, linears, manifest)
        for phase, path in quality.phases.items()
    }
    worst_first = tuple(sorted(errors, key=lambda error: error.decibels))
    recipe = manifest.recipe
    static = recipe.phases == "single" and recipe.activations == "static"
    return Advice(worst_first, shared, split=recipe.phases == "split", static=static)


def _breakdown(
    kl: float, phase: str, errors: Sequence[LayerError], linears: Sequence[LayerError], manifest: Manifest
) -> KLBreakdown:
    """The KL of a path by who causes it; a prefill graph that quantizes activations is mended by its head alone."""
    stored = quant_configs(manifest.recipe, manifest.geometry)
    config = stored.get(phase) or next(iter(stored.values()))
    of_path = {error.name: error for error in errors if error.phase == phase}
    head = min(kl, of_path[HEAD].kl or 0.0)
    found = {error.name: error.noise for error in linears}
    precisions = {name: _precision(config.of(name)) for name in (*found, HEAD)}
    noises = {name: noise for name, noise in found.items() if precisions[name]}
    embedding = of_path[EMBEDDING].noise
    whole = embedding + sum(error.noise for error in of_path.values() if error.name not in (EMBEDDING, HEAD))
    scale = (kl - head) / max(whole, embedding + sum(noises.values()), SMALLEST)
    caused = {name: noise * scale for name, noise in noises.items()}
    caused[HEAD] = head + (embedding * scale if manifest.geometry.tied_head else 0.0)
    parts = [
        Part(name, precision, manifest.geometry.linear[name].size, caused[name])
        for name, precision in precisions.items()
        if precision is not None
    ]
    other = max(0.0, kl - sum(part.kl for part in parts))
    return KLBreakdown(tuple(parts), other, floats="fp8" in precisions.values())


def _precision(config: QuantConfig) -> str | None:
    """The precision that an override raises; None for floats, and for activations in 8 bits."""
    match config:
        case WeightOnly(grid):
            return f"int{grid.bits}"
        case Float8():
            return "fp8"
    return None
