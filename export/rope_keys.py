"""From the rope's keys of a config to :class:`Rope`.

Old checkpoints have ``rope_theta`` and ``rope_scaling``, those of transformers 5 ``rope_parameters``; families with
another rope for windowed layers have an object in it for each kind of layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log, sqrt
from typing import Any, cast

from llmc.export.keys import Keys
from llmc.export.parts.rope import Rope, RopeType

DEFAULT_THETA = 10_000.0  # transformers' default where a config says nothing
TYPES = {name: name for name in ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")}


@dataclass(frozen=True)
class RopeRules:
    """The form in which a family's config describes ropes."""

    theta: float = DEFAULT_THETA  # default base
    partial: float | None = None  # default of ``partial_rotary_factor``; None if the family always rotates whole heads
    interleaved: bool = False  # see :class:`Rope`
    # meaning of each rope type that the family knows, of :data:`TYPES`, or ``ntk_alpha``
    types: Mapping[str, str] = field(default_factory=TYPES.copy)
    # key and default of the base of the windowed layers' rope, to which scaling does not apply
    local: tuple[str, float] | None = None
    own: tuple[str, ...] = ()  # keys of the rope that the family reads itself


def read_ropes(keys: Keys, rules: RopeRules, head_dim: int, max_positions: int) -> tuple[Rope, ...]:
    """The rope of the full-attention layers and, if it differs, that of the windowed layers."""
    styles = [name for name in ("rope_scaling", "rope_parameters") if keys.raw(name) not in (None, {})]
    if len(styles) == 2 and keys.raw(styles[0]) != keys.raw(styles[1]):
        raise keys.error("rope_scaling", keys.raw("rope_scaling"), "the same as rope_parameters, or only one of them")
    inner = keys.inside(styles[0]) if styles else None
    reader = _Reader(keys, rules, head_dim, max_positions)
    if rules.local is None:
        return (reader.read(inner, "rope_theta", rules.theta),)
    if inner is None or styles == ["rope_scaling"]:
        return reader.read(inner, "rope_theta", rules.theta), reader.read(None, *rules.local)
    kinds = {"full_attention": ("rope_theta", rules.theta), "sliding_attention": rules.local}
    insides = {kind: None if inner.raw(kind) is None else inner.inside(kind) for kind in kinds}
    for each in (inner, *filter(None, insides.values())):  # transformers takes that beside the kinds, for all
        each.fixed("truncate", True)
    ropes = tuple(reader.read(insides[kind], *base) for kind, base in kinds.items())
    if flat := [name for name in keys.raw("rope_parameters") if name not in kinds]:
        keys.note(
            f"rope_parameters: {', '.join(flat):.80} is of no kind of layer and was left out, as transformers does"
        )
        inner.skip(*flat)
    inner.finish()
    return ropes


def require_both_ropes(keys: Keys) -> None:
    """Refuse ``rope_parameters`` without the ropes of both kinds of layers."""
    ropes = keys.raw("rope_parameters")
    if not isinstance(ropes, dict) or not (ropes.get("full_attention") and ropes.get("sliding_attention")):
        raise keys.error("rope_parameters", ropes, "an object with full_attention and sliding_attention")


@dataclass(frozen=True)
class _Reader:
    config: Keys
    rules: RopeRules
    head_dim: int
    max_positions: int

    def read(self, keys: Keys | None, theta_key: str, default_theta: float) -> Rope:
        config, rules = self.config, self.rules
        theta = config.number(theta_key, default_theta)
        if keys is None:
            return Rope(self._dim(config), theta, interleaved=rules.interleaved)
        stated = keys.choice("rope_type", tuple(rules.types), keys.choice("type", tuple(rules.types), "default"))
        kind, inner_theta = rules.types[stated], keys.number("rope_theta", theta)
        if inner_theta != theta and config.raw(theta_key) is not None:
            raise config.error(theta_key, theta, f"the same as in {keys.where.split(': ')[-1]} ({inner_theta})")
        scaling = {} if kind == "default" else self._read_scaling(keys, kind, inner_theta)
        dim = self.head_dim if kind == "proportional" else self._dim(keys)
        keys.skip(*rules.own)
        keys.finish()
        if kind == "ntk_alpha":
            inner_theta *= scaling.pop("alpha") ** (dim / (dim - 2))
        if kind in ("dynamic", "ntk_alpha"):
            kind = "default"
        for name, factors in (("short_factor", "factors"), ("long_factor", "long_factors")):
            if (count := len(scaling.get(factors, ()))) not in (0, dim // 2):
                raise keys.error(name, count, f"{dim // 2} numbers, one for each rotated pair")
        return Rope(dim, inner_theta, cast(RopeType, kind), interleaved=rules.interleaved, **scaling)

    def _dim(self, keys: Keys) -> int:
        """Number of rotated values of a head; ``partial_rotary_factor`` may be in the config or in the rope's
        object."""
        if self.rules.partial is None:
            return self.head_dim
        outer = self.config.number("partial_rotary_factor", self.rules.partial)
        factor = keys.number("partial_rotary_factor", outer)
        if factor != outer and self.config.raw("partial_rotary_factor") is not None:
            raise self.config.error("partial_rotary_factor", outer, f"the same as in {keys.where} ({factor:g})")
        dim = int(self.head_dim * factor)
        if dim < 2 or dim % 2:
            raise keys.error("partial_rotary_factor", factor, f"an even number of values of head_dim={self.head_dim}")
        return dim

    def _read_scaling(self, keys: Keys, kind: str, theta: float) -> dict[str, Any]:
        if kind == "ntk_alpha":  # transformers ignores the others too
            keys.skip("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            return {"alpha": keys.number("alpha")}
        if kind == "longrope":
            return self._longrope(keys)
        if kind == "proportional":
            return {"factor": keys.number("factor", 1.0), "share": keys.number("partial_rotary_factor", 1.0)}
        scaling: dict[str, Any] = {"factor": keys.number("factor")}
        if kind == "dynamic":  # the base grows with what lies beyond max_position_embeddings, where this context ends
            keys.skip("original_max_position_embeddings")
            self.config.note(f"dynamic rope scaling begins where this context ends, at {self.max_positions} positions")
            return {}
        if kind in ("llama3", "yarn"):
            scaling["original_max_positions"] = self._original(keys)
        if kind == "llama3":
            scaling |= _read_rising(keys, "low_freq_factor", "high_freq_factor")
        if kind == "yarn":
            keys.skip("finetuned")
            if theta <= 1:
                raise keys.error("rope_theta", theta, "more than 1, of which yarn takes the logarithm")
            scaling |= _read_rising(keys, "beta_slow", "beta_fast", 1.0, 32.0)
            magnitude = _magnitude(self.config, keys, scaling["factor"])
            # transformers takes null for false.
            scaling |= {"truncate": keys.flag("truncate", "truncate" not in keys), "magnitude": magnitude}
        return scaling

    def _original(self, keys: Keys) -> int:
        """Positions that the model was trained with first; the config's own key comes before that of the rope."""
        name = "original_max_position_embeddings"
        inner = keys.integer(name, self.max_positions)
        return self.config.integer(name, inner)

    def _longrope(self, keys: Keys) -> dict[str, Any]:
        """Longrope: factors of texts within the original positions and, if the model takes longer ones, of these."""
        original = self._original(keys)
        short, long = keys.numbers("short_factor"), keys.numbers("long_factor")
        factor = keys.number("factor", self.max_positions / original)
        advised = sqrt(1 + log(factor) / log(original)) if factor > 1 < original else 1.0
        return {
            "original_max_positions": original,
            "factors": short,
            "long_factors": long if self.max_positions > original else (),
            "magnitude": keys.number("attention_factor", advised),
        }


def _read_rising(
    keys: Keys, low: str, high: str, default_low: float | None = None, default_high: float | None = None
) -> dict[str, float]:
    values = {low: keys.number(low, default_low), high: keys.number(high, default_high)}
    if values[high] <= values[low]:
        raise keys.error(high, values[high], f"more than {low}={values[low]}")
    return values


def _magnitude(config: Keys, keys: Keys, factor: float) -> float:
    """Factor of yarn's sines and cosines: the one stated, else what the paper advises for ``factor``."""
    stated = keys.optional_number("attention_factor")
    scales = [keys.optional_number(name) for name in ("mscale", "mscale_all_dim")]
    if keys.raw("attn_factor") is not None:
        config.note(f"attn_factor={keys.raw('attn_factor')!r} was left out, as transformers does")
    if stated is not None:
        return stated
    upper, lower = scales if all(scales) else (1.0, 0.0)
    return compute_attention_factor(factor, upper) / compute_attention_factor(factor, lower)


def compute_attention_factor(factor: float, scale: float | None) -> float:
    """The factor of attention, on both sides, that yarn's paper advises where positions are spread by ``factor``."""
    return 0.1 * (scale or 0.0) * log(factor) + 1.0 if factor > 1 else 1.0
