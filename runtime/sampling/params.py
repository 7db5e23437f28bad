"""What a request may ask of its tokens: names, ranges, defaults, and what does not go together."""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from llmc.bundle import Generation
from llmc.errors import UsageError

_UINT64_MAX = 2**64 - 1
_MOST_SAMPLES = 1024
LARGEST_PENALTY = 1e30  # its sums over groups and steps stay within float32
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")  # what a checkpoint has defaults for
_CUTS = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_n_sigma", "xtc_probability")
_GUIDES = ("json_schema", "regex", "grammar", "choice")

# The steps between the model's logits and the draw, in the order that llmc.runtime.sampling.processors explains.
STEPS = (
    "logit_bias",
    "allowed_tokens",
    "min_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "dry",
    "no_repeat_ngram_size",
    "processors",
    "guide",
    "temperature",
    "dynamic_temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "top_n_sigma",
    "xtc",
)


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens, and when it ends.

    Names and meanings are those of transformers' ``GenerationConfig``, vLLM's ``SamplingParams`` and, for what these
    two lack, llama.cpp. Everything is off unless asked for.

    Args:
        max_tokens: new tokens at most, from 1.
        temperature: divides the logits; any finite number from 0. 0 is greedy: the most probable token, always,
            whatever the cuts below say.
        top_k: keep the k most probable tokens and their equals; 0 keeps all.
        top_p: keep a token if those strictly more probable hold less than this mass, above 0 and up to 1 (keeps all).
            Holtzman et al., The Curious Case of Neural Text Degeneration, https://arxiv.org/abs/1904.09751
        min_p: keep tokens at least this many times as probable as the most probable one, from 0 (keeps all) to 1.
            Nguyen et al., Turning Up the Heat, https://arxiv.org/abs/2407.01082
        seed: from 0 to 2**64 - 1; None takes one from the operating system, reported as ``sampler.seed``.
        stop: texts that end the output; they are not part of it.
        stop_token_ids: tokens that end the output, beside the checkpoint's end-of-sequence tokens.
        ignore_eos: go on after the checkpoint's end-of-sequence tokens.
        min_tokens: new tokens before one that ends the output may come, from 0 to max_tokens.
        dynatemp_range: the temperature varies by this much to either side, with the entropy of the distribution;
            from 0 (off) to ``temperature``. https://github.com/ggml-org/llama.cpp/pull/4972
        dynatemp_exponent: shape of that curve, above 0.
        typical_p: keep the tokens whose surprise is nearest to the entropy, up to this mass; above 0, 1 keeps all.
            Meister et al., Locally Typical Sampling, https://arxiv.org/abs/2202.00666
        epsilon_cutoff: keep tokens at least this probable, from 0 (off), below 1.
        eta_cutoff: as epsilon_cutoff, but less strict where the entropy is high; from 0 (off), below 1.
            Hewitt et al., Truncation Sampling as Language Model Desmoothing, https://arxiv.org/abs/2210.15191
        top_n_sigma: keep tokens whose logit is within so many standard deviations of the largest; 0 is off.
            Tang et al., Top-nσ, https://arxiv.org/abs/2411.07641
        xtc_probability: how often to drop all but the least probable of the tokens above ``xtc_threshold``, 0 to 1.
        xtc_threshold: from 0 to 1. https://github.com/oobabooga/text-generation-webui/pull/6335, which protects line
            ends too; here only the checkpoint's end-of-sequence tokens are protected.
        mirostat: 1 or 2 steers the surprise of the output to ``mirostat_tau`` instead of cutting; 0 is off.
            Basu et al., Mirostat, https://arxiv.org/abs/2007.14966
        mirostat_tau: the surprise aimed at, in bits, above 0.
        mirostat_eta: learning rate, above 0 and up to 1.
        repetition_penalty: divides positive logits and multiplies negative ones of every token of prompt and output;
            from 0.01 to 100, 1 is off. Keskar et al., CTRL, https://arxiv.org/abs/1909.05858
        presence_penalty: taken from the logit of every token of the output, from -2 to 2.
        frequency_penalty: the same for each time that it occurs.
            https://platform.openai.com/docs/api-reference/chat/create
        dry_multiplier: how strongly to forbid going on with a sequence that occurred before; 0 is off.
            https://github.com/oobabooga/text-generation-webui/pull/5677
        dry_base: growth of that penalty with every token repeated, from 1.
        dry_allowed_length: longest repetition that is not punished more than by ``dry_multiplier``, from 1.
        dry_range: tokens looked back at; 0 is all.
        dry_sequence_breakers: texts that no repetition reaches across.
        no_repeat_ngram_size: no sequence of so many tokens occurs twice in prompt and output; 0 is off.
        logit_bias: (token id, -100 ... 100) pairs to add to logits.
        banned_tokens: ids that may not come.
        allowed_tokens: the only ids that may come; None allows all.
        logprobs: report the log-probability of each token, and this many of the most probable ones, 0 to 20.
        prompt_logprobs: the same for the tokens of the prompt.
        n: outputs to draw, from 1 to 1024.
        best_of: draw so many (up to 1024) and return the ``n`` with the highest mean log-probability.
        processor_order: names of :data:`STEPS` that take one another's places in the order given; the rest stay.
        num_beams: beam search with so many beams; 1 is off.
        num_beam_groups: groups of beams that keep apart, a divisor of num_beams.
            Vijayakumar et al., Diverse Beam Search, https://arxiv.org/abs/1610.02424
        diversity_penalty: taken from a beam's score for each earlier group that chose the same token, from 0
            to 1e30.
        length_penalty: exponent of the length that a beam's score is divided by.
        early_stopping: when a beam search ends: True with num_beams hypotheses, False when none can get better by
            what is known, "never" when none can get better at all.
        num_return_sequences: hypotheses to return, up to num_beams; None is 1.
        penalty_alpha: contrastive search among ``top_k`` tokens, from 0 to 1; None is off.
            Su et al., A Contrastive Framework for Neural Text Generation, https://arxiv.org/abs/2202.06417
        consensus: return the one of ``n`` samples that is most like the others: "f1" of tokens or "chrf" of texts.
            Eikema and Aziz, Sampling-Based Approximations to Minimum Bayes Risk, https://arxiv.org/abs/2108.04718
        json_schema: the output is JSON of this schema (an object, or its text).
        regex: the output matches this regular expression.
        grammar: the output is derived from this grammar, in Lark's notation.
        choice: the output is one of these texts.
        on_overflow: when the context is full: refuse the request, drop its oldest tokens ("truncate_left"), or keep
            the first ones and a window ("sink").
        speculate: draft tokens and verify them; the tokens are the same. None leaves it to the engine.

    Raises:
        UsageError: a value is out of its range or of another type, or two do not go together.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    no_repeat_ngram_size: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_tokens: tuple[int, ...] = ()
    allowed_tokens: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    processor_order: tuple[str, ...] | None = None
    num_beams: int = 1
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int | None = None
    penalty_alpha: float | None = None
    consensus: Literal["f1", "chrf"] | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    on_overflow: Literal["refuse", "truncate_left", "sink"] = "refuse"
    speculate: bool | None = None

    def __post_init__(self) -> None:
        for name in _RULES:
            _check(name, getattr(self, name))
        check_combination(self)

    @classmethod
    def from_defaults(cls, generation: Generation, **overrides: Any) -> "SamplingParams":
        """Take the checkpoint's defaults for what the caller leaves out or sets to None.

        A checkpoint with ``do_sample`` false is greedy unless the caller names a temperature, top_k, top_p or min_p, or
        asks for something that only sampling can give. Beams and contrastive search do not sample, and mirostat does
        not cut, whatever the checkpoint says. ``stop`` may be one string, every tuple a list, and ``logit_bias`` a
        mapping.

        Raises:
            UsageError: a name is unknown, or a value is out of its range.
        """
        _refuse_unknown(overrides, list(_DEFAULTS))
        given = {name: _as_tuple(name, value) for name, value in overrides.items() if value is not None}
        for name, value in given.items():
            _check(name, value)
        return cls(**{**_checkpoint_defaults(generation, given), **given})


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_TUPLES = {name for name, default in _DEFAULTS.items() if isinstance(default, tuple)} | {
    "allowed_tokens",
    "choice",
    "processor_order",
}
_NEEDS_CHANCE = {"n", "best_of", "consensus", "mirostat", "dynatemp_range", *_CUTS}


def _as_tuple(name: str, value: Any) -> Any:
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name == "logit_bias" and isinstance(value, Mapping):
        return tuple(value.items())
    if name == "logit_bias" and isinstance(value, list):
        return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
    return tuple(value) if name in _TUPLES and isinstance(value, list) else value


def _checkpoint_defaults(generation: Generation, given: dict[str, Any]) -> dict[str, Any]:
    if given.get("num_beams", 1) != 1 or "penalty_alpha" in given:
        return {}
    chance = any(given.get(name, _DEFAULTS[name]) != _DEFAULTS[name] for name in _NEEDS_CHANCE)
    if not generation.do_sample and not chance and not given.keys() & set(_SAMPLED):
        return {"temperature": 0.0}
    names = ("temperature",) if given.get("mirostat") else _SAMPLED
    defaults = {name: getattr(generation, name) for name in names}
    return {name: value for name, value in defaults.items() if value is not None}


def _refuse_unknown(overrides: dict[str, Any], known: list[str]) -> None:
    for name in overrides.keys() - set(known):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
        raise UsageError(f"unknown sampling parameter {name!r}; {hint}")


# ------------------------------------------------------------------------------------------------------------ ranges

_Rule = tuple[str, Callable[[Any], bool]]  # what is expected, and whether a value is that


def _check(name: str, value: object) -> None:
    expected, holds = _RULES[name]
    if not holds(value):
        raise UsageError(f"{name} is {_written(value)}, expected {expected}")


def _written(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - Python refuses to write integers of thousands of digits
        return f"an {type(value).__name__} that cannot be written" if isinstance(value, int) else type(value).__name__


def _is_integer(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and low <= value <= high
    except OverflowError:  # an integer beyond float
        return False


def _is_tuple(value: object, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and all(is_item(item) for item in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_token(value: object) -> bool:
    return _is_integer(value, 0)


def _is_bias(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and _is_token(value[0]) and _is_number(value[1], -100, 100)


def _is_order(value: object) -> bool:
    if not _is_tuple(value, lambda name: isinstance(name, str) and name in STEPS):
        return False
    assert isinstance(value, tuple)
    return len(set(value)) == len(value) and "guide" not in step_order(value)[: step_order(value).index("processors")]


def _is_schema(value: object) -> bool:
    return _is_text(value) or isinstance(value, Mapping)


def _integer(low: int, note: str = "") -> _Rule:
    return f"an integer of at least {low}{note}", lambda value: _is_integer(value, low)


def _count(most: int) -> _Rule:
    return f"an integer from 1 to {most}", lambda value: _is_integer(value, 1, most)


def _number(low: float, note: str = "") -> _Rule:
    return f"a number of at least {low}{note}", lambda value: _is_number(value, low)


def _above(low: float, high: float = math.inf) -> _Rule:
    rest = f" and at most {high}" if high < math.inf else ""
    return f"a number above {low}{rest}", lambda value: _is_number(value, low, high) and value > low


def _between(low: float, high: float) -> _Rule:
    return f"a number from {low} to {high}", lambda value: _is_number(value, low, high)


def _cutoff() -> _Rule:
    return "a number of at least 0 and below 1 (0 is off)", lambda value: _is_number(value, 0, 1) and value < 1


def _one_of(*choices: object) -> _Rule:
    text = " or ".join(map(repr, choices))
    return text, lambda value: any(
        value is choice or (isinstance(value, str) and value == choice) for choice in choices
    )


def _texts() -> _Rule:
    return "a tuple of non-empty strings", lambda value: _is_tuple(value, _is_text)


def _tokens() -> _Rule:
    return "a tuple of token ids", lambda value: _is_tuple(value, _is_token)


def _or_none(rule: _Rule) -> _Rule:
    expected, holds = rule
    return f"{expected}, or None", lambda value: value is None or holds(value)


_FLAG: _Rule = "True or False", lambda value: isinstance(value, bool)
_TOP: _Rule = "an integer from 0 to 20, or None", lambda value: value is None or _is_integer(value, 0, 20)
_SEED = "an integer from 0 to 2**64 - 1, or None"
_ORDER = f"a tuple of different names, the processors before the guide, out of {', '.join(STEPS)}"

_RULES: dict[str, _Rule] = {
    "max_tokens": _integer(1),
    "temperature": _number(0),
    "top_k": _integer(0, " (0 keeps all)"),
    "top_p": _above(0, 1),
    "min_p": _between(0, 1),
    "seed": (_SEED, lambda value: value is None or _is_integer(value, 0, _UINT64_MAX)),
    "stop": _texts(),
    "stop_token_ids": _tokens(),
    "ignore_eos": _FLAG,
    "min_tokens": _integer(0),
    "dynatemp_range": _number(0),
    "dynatemp_exponent": _above(0),
    "typical_p": _above(0, 1),
    "epsilon_cutoff": _cutoff(),
    "eta_cutoff": _cutoff(),
    "top_n_sigma": _number(0, " (0 is off)"),
    "xtc_probability": _between(0, 1),
    "xtc_threshold": _between(0, 1),
    "mirostat": ("0, 1 or 2", lambda value: _is_integer(value, 0, 2)),
    "mirostat_tau": _above(0),
    "mirostat_eta": _above(0, 1),
    "repetition_penalty": _between(0.01, 100),
    "presence_penalty": _between(-2, 2),
    "frequency_penalty": _between(-2, 2),
    "dry_multiplier": _number(0, " (0 is off)"),
    "dry_base": _number(1),
    "dry_allowed_length": _integer(1),
    "dry_range": _integer(0, " (0 looks at all)"),
    "dry_sequence_breakers": _texts(),
    "no_repeat_ngram_size": _integer(0, " (0 is off)"),
    "logit_bias": (
        "a tuple of (token id, number from -100 to 100) with different ids",
        lambda value: _is_tuple(value, _is_bias) and len(dict(value)) == len(value),
    ),
    "banned_tokens": _tokens(),
    "allowed_tokens": _or_none(("a non-empty tuple of token ids", lambda value: _tokens()[1](value) and value != ())),
    "logprobs": _TOP,
    "prompt_logprobs": _TOP,
    "n": _count(_MOST_SAMPLES),
    "best_of": _or_none(_count(_MOST_SAMPLES)),
    "processor_order": _or_none((_ORDER, _is_order)),
    "num_beams": _integer(1),
    "num_beam_groups": _integer(1),
    "diversity_penalty": _between(0, LARGEST_PENALTY),
    "length_penalty": _between(-20, 20),
    "early_stopping": _one_of(True, False, "never"),
    "num_return_sequences": _or_none(_integer(1)),
    "penalty_alpha": _or_none(_between(0, 1)),
    "consensus": _or_none(_one_of("f1", "chrf")),
    "json_schema": _or_none(("a JSON schema as a mapping or a text", _is_schema)),
    "regex": _or_none(("a non-empty string", _is_text)),
    "grammar": _or_none(("a non-empty string", _is_text)),
    "choice": _or_none(("a non-empty tuple of non-empty strings", lambda value: _texts()[1](value) and value != ())),
    "on_overflow": _one_of("refuse", "truncate_left", "sink"),
    "speculate": _or_none(_FLAG),
}


def step_order(order: tuple[str, ...] | None) -> tuple[str, ...]:
    """:data:`STEPS` with the steps that ``order`` names in one another's places."""
    named = iter(order or ())
    return tuple(next(named) if step in (order or ()) else step for step in STEPS)


# ------------------------------------------------------------------------------------------------------ combinations

_ONE_OUTPUT = ("n", "best_of", "consensus")
_NOT_IN_LOCKSTEP = (
    *_ONE_OUTPUT,
    "mirostat",
    "dynatemp_range",
    *(cut for cut in _CUTS if cut != "top_k"),
    "stop",
    *_GUIDES,
    "logprobs",
    "on_overflow",
)
# What a request is when a condition holds, and what it cannot be with.
_MODES: tuple[tuple[str, Callable[[SamplingParams], bool], tuple[str, ...]], ...] = (
    ("beam search", lambda p: p.num_beams > 1, (*_NOT_IN_LOCKSTEP, "top_k", "penalty_alpha")),
    ("contrastive search", lambda p: p.penalty_alpha is not None, _NOT_IN_LOCKSTEP),
    ("mirostat", lambda p: p.mirostat > 0, ("dynatemp_range", *_CUTS)),
    ("consensus decoding", lambda p: p.consensus is not None, ("best_of",)),
)
# A parameter that means nothing without another.
_NEEDS: tuple[tuple[str, str, Callable[[SamplingParams], bool]], ...] = (
    ("num_beam_groups", "num_beams above 1", lambda p: p.num_beams > 1),
    ("num_beam_groups", "num_beams to be a multiple of it", lambda p: p.num_beams % p.num_beam_groups == 0),
    ("num_beam_groups", "diversity_penalty above 0", lambda p: p.diversity_penalty > 0),
    ("diversity_penalty", "num_beam_groups above 1", lambda p: p.num_beam_groups > 1),
    ("length_penalty", "num_beams above 1", lambda p: p.num_beams > 1),
    ("early_stopping", "num_beams above 1", lambda p: p.num_beams > 1),
    ("num_return_sequences", "num_beams above 1", lambda p: p.num_beams > 1),
    ("num_return_sequences", "num_beams of at least as many", lambda p: (p.num_return_sequences or 1) <= p.num_beams),
    ("penalty_alpha", "top_k of at least 2", lambda p: p.top_k >= 2),
    ("consensus", "n of at least 2", lambda p: p.n >= 2),
    ("best_of", "n of at most as many", lambda p: p.n <= (p.best_of or p.n)),
    ("n", "temperature above 0", lambda p: p.temperature > 0),
    ("best_of", "temperature above 0", lambda p: p.temperature > 0),
    ("mirostat", "temperature above 0", lambda p: p.temperature > 0),
    ("min_tokens", "max_tokens of at least as many", lambda p: p.min_tokens <= p.max_tokens),
    (
        "dynatemp_range",
        "temperature of at least as much, or 0",
        lambda p: p.dynatemp_range <= (p.temperature or math.inf),
    ),
    (
        "allowed_tokens",
        "a token that is not among banned_tokens",
        lambda p: not set(p.allowed_tokens or ()) <= set(p.banned_tokens),
    ),
)


def check_combination(params: SamplingParams) -> None:
    """Refuse parameters, each in its range, that contradict one another or that nothing here can do together.

    Raises:
        UsageError: naming the parameters.
    """
    for mode, is_on, excluded in _MODES:
        clash = next((name for name in excluded if _is_set(params, name)), None) if is_on(params) else None
        if clash:
            raise UsageError(f"{mode} cannot be combined with {_shown(params, clash)}; leave one of them out")
    guides = [name for name in _GUIDES if _is_set(params, name)]
    if len(guides) > 1:
        raise UsageError(f"{' and '.join(guides)} are given, expected at most one of {', '.join(_GUIDES)}")
    for name, needed, holds in _NEEDS:
        if _is_set(params, name) and not holds(params):
            raise UsageError(f"{_shown(params, name)} needs {needed}")
    lockstep = next((mode for mode, is_on, _ in _MODES[:2] if is_on(params)), None)
    if lockstep and params.temperature not in (0, 1):
        raise UsageError(f"{lockstep} draws nothing, so temperature={params.temperature} cannot be used; leave it out")
    if lockstep and params.speculate:
        raise UsageError(f"{lockstep} cannot be combined with speculate=True; leave one of them out")


def _is_set(params: SamplingParams, name: str) -> bool:
    return bool(getattr(params, name) != _DEFAULTS[name])


def _shown(params: SamplingParams, name: str) -> str:
    return f"{name}={_written(getattr(params, name))}"
