"""The parameters of a request: ranges, defaults, meanings, and which cannot be combined."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from llmc.bundle.model.diffusion import MOST_MASKS
from llmc.errors import UsageError, format_name, format_value
from llmc.runtime.sampling.neighbours import neighbour
from llmc.runtime.sampling.ranges import (
    FLAG,
    SCHEMA,
    TEXT,
    TEXTS,
    Parameter,
    above,
    biases,
    drop_empty,
    integer,
    number,
    one_of,
    optional,
    parameter,
    texts,
    tokens,
    words,
)

if TYPE_CHECKING:
    from llmc.bundle import Generation

_UINT64_MAX = 2**64 - 1
_MOST_SAMPLES = 1024
# Most samples of a request that consensus compares pair by pair, in a thread that holds Python's lock: 64 texts of 80
# words take 3 s with chrF; 1,024 took more than ten minutes.
MOST_COMPARED = 64
# The lists of a request are bounded so that no client slows down all others. Times are for one core of an AMD EPYC.
_MOST_TOKENS = 2**18  # no vocabulary is larger; 0.1 s to check, in the client's thread
_STOPS = texts(128, 8_192)  # looked for after every token: 0.15 ms; a million took 1 s
_BREAKERS = texts(64, 1_024)  # looked for in the bytes of the prompt, 0.3 s for half a megabyte at the worst
_BAD_WORDS = words(1_024, 8_192)  # 4 us per token for a thousand usual ones
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "typical_p")  # a request that names one of these samples
# Parameters whose defaults a checkpoint may set.
DEFAULTED = (*SAMPLED, "repetition_penalty", "no_repeat_ngram_size", "min_tokens", "banned_tokens", "bad_words")
_CUTS = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability")
GUIDES = ("json_schema", "regex", "grammar", "choice")  # parameters that constrain the output

# Sections of runtime/README.md, whose tables are generated from the fields below.
_end = partial(parameter, section="Length and end")
_shape = partial(parameter, section="Distribution")
_bias = partial(parameter, section="Repetition and bias")
_many = partial(parameter, section="Several outputs, and searches")
_form = partial(parameter, section="Form, report, speed")
_step = partial(parameter, section="Diffusion")
_OPENAI = "[OpenAI](https://platform.openai.com/docs/api-reference/chat/create)"


@dataclass(frozen=True)
class SamplingParams:
    """The choice of one request's tokens, and the end of its output.

    Names and meanings are those of transformers' ``GenerationConfig``, vLLM's ``SamplingParams`` and otherwise
    llama.cpp. Everything is off by default. Each field states its range, its meaning and its source.

    Raises:
        UsageError: a value is out of range or has the wrong type, or two values cannot be combined.
    """

    max_tokens: int = _end(256, integer(1), "maximum number of new tokens", common=True)
    temperature: float = _shape(1.0, number(0), "divides the logits; 0 is greedy decoding", common=True)
    top_k: int = _shape(
        0, integer(0, note="0 keeps all"), "keep the k most probable tokens, ties included", common=True
    )
    top_p: float = _shape(
        1.0,
        above(0, 1),
        "keep the smallest set of most probable tokens with at least this total probability, ties included",
        source="[Holtzman et al.](https://arxiv.org/abs/1904.09751)",
        common=True,
    )
    min_p: float = _shape(
        0.0,
        number(0, 1),
        "keep tokens with at least `min_p` times the top token's probability",
        source="[Nguyen et al.](https://arxiv.org/abs/2407.01082)",
        common=True,
    )
    seed: int | None = _shape(
        None,
        optional(integer(0, _UINT64_MAX, most="2**64 - 1")),
        "same seed, same tokens; None: a random seed, which the result reports",
        common=True,
    )
    stop: tuple[str, ...] = _end((), _STOPS, "texts that end the output; they are not part of it", common=True)
    stop_token_ids: tuple[int, ...] = _end(
        (), tokens(_MOST_TOKENS), "tokens that end the output, besides the checkpoint's"
    )
    ignore_eos: bool = _end(False, FLAG, "go on after the checkpoint's end-of-sequence tokens")
    min_tokens: int = _end(0, integer(0), "number of new tokens before the output may end", short="0 to `max_tokens`")
    typical_p: float = _shape(
        1.0,
        above(0, 1),
        "keep the smallest set of tokens with surprise closest to the entropy and at least this total probability",
        source="[Meister et al.](https://arxiv.org/abs/2202.00666)",
    )
    top_n_sigma: float = _shape(
        0.0,
        number(0, note="0 is off"),
        "keep logits within this many standard deviations of the largest",
        source="[Tang et al.](https://arxiv.org/abs/2411.07641)",
    )
    xtc_probability: float = _shape(
        0.0,
        number(0, 1),
        "probability of dropping all tokens above `xtc_threshold` except the least probable of them",
        source="[XTC](https://github.com/oobabooga/text-generation-webui/pull/6335)",
    )
    xtc_threshold: float = _shape(
        0.1,
        number(0, 1),
        "probability above which XTC may drop a token; above 0.5 XTC is off",
        more=". End-of-sequence tokens are never dropped; line ends may be, unlike in the original",
    )
    mirostat: int = _shape(
        0,
        integer(0, 2, note="0 is off"),
        "version of Mirostat, which holds the surprise of the output at a target; it replaces top-k and its like",
        more=", see [Mirostat](#mirostat)",
        source="[Basu et al.](https://arxiv.org/abs/2007.14966)",
    )
    mirostat_tau: float = _shape(5.0, above(0, 100), "target surprise of Mirostat in bits")
    mirostat_eta: float = _shape(0.1, above(0, 1), "learning rate of Mirostat")
    repetition_penalty: float = _bias(
        1.0,
        number(0.01, 100),
        "divides positive and multiplies negative logits of tokens in prompt and output",
        source="[Keskar et al.](https://arxiv.org/abs/1909.05858)",
        common=True,
    )
    presence_penalty: float = _bias(
        0.0, number(-2, 2), "subtracted from the logit of every token in the output", source=_OPENAI
    )
    frequency_penalty: float = _bias(
        0.0, number(-2, 2), "subtracted once for each time that the token occurs there", source=_OPENAI
    )
    dry_multiplier: float = _bias(
        0.0,
        number(0, note="0 is off"),
        "strength of the penalty for continuing a sequence that occurred before",
        source="[DRY](https://github.com/oobabooga/text-generation-webui/pull/5677)",
    )
    dry_base: float = _bias(1.75, number(1), "growth of that penalty with every repeated token")
    dry_allowed_length: int = _bias(2, integer(1), "length of a repetition from which on the penalty grows")
    dry_range: int = _bias(0, integer(0, note="0 searches all"), "number of last tokens that are searched")
    dry_sequence_breakers: tuple[str, ...] = _bias(
        ("\n", ":", '"', "*"), _BREAKERS, "texts that end a repetition", more=", see [DRY](#dry)"
    )
    no_repeat_ngram_size: int = _bias(
        0, integer(0, note="0 is off"), "no sequence of this many tokens occurs twice in prompt and output"
    )
    logit_bias: tuple[tuple[int, float], ...] = _bias((), biases(100, _MOST_TOKENS), "added to the tokens' logits")
    banned_tokens: tuple[int, ...] = _bias((), tokens(_MOST_TOKENS), "tokens that are never chosen")
    allowed_tokens: tuple[int, ...] | None = _bias(
        None,
        optional(drop_empty(tokens(_MOST_TOKENS))),
        "the only tokens that may be chosen",
        short=f"1 to {_MOST_TOKENS:,} token ids",
    )
    logprobs: int | None = _form(
        None, optional(integer(0, 20)), "report the log-probability of each token and of this many most probable ones"
    )
    prompt_logprobs: int | None = _form(
        None, optional(integer(0, 20)), "the same for the prompt's tokens, except the first"
    )
    n: int = _many(
        1, integer(1, _MOST_SAMPLES), "number of samples; sample i draws with seed + i, modulo 2**64", common=True
    )
    best_of: int | None = _many(
        None,
        optional(integer(1, _MOST_SAMPLES)),
        "draw this many samples, return the `n` with the highest mean log-probability",
        short=f"`n` to {_MOST_SAMPLES}",
    )
    num_beams: int = _many(1, integer(1), "beams of a beam search; 1 is off", common=True)
    length_penalty: float = _many(1.0, number(-20, 20), "a beam's score is divided by its length to this power")
    early_stopping: bool | Literal["never"] = _many(
        False,
        one_of(True, False, "never"),
        "the search ends when `num_beams` hypotheses are complete (True), when no better one is likely (False), or "
        "when no better one is possible (`never`)",
    )
    num_return_sequences: int | None = _many(
        None, optional(integer(1)), "hypotheses to return; None: one", short="1 to `num_beams`"
    )
    consensus: Literal["f1", "chrf"] | None = _many(
        None,
        optional(one_of("f1", "chrf")),
        "order the `n` samples by how much they agree with the others, best first",
        source="[Eikema and Aziz](https://arxiv.org/abs/2108.04718)",
    )
    json_schema: Mapping[str, Any] | str | None = _form(
        None, optional(SCHEMA), "the output is JSON that follows this schema", common=True
    )
    compact_json: bool = _form(False, FLAG, "no white space between tokens of such JSON and of tool arguments")
    regex: str | None = _form(None, optional(TEXT), "the output matches this regular expression")
    grammar: str | None = _form(None, optional(TEXT), "the output follows this grammar")
    choice: tuple[str, ...] | None = _form(None, optional(drop_empty(TEXTS)), "the output is one of these")
    on_overflow: Literal["refuse", "truncate_left", "sink"] = _end(
        "refuse",
        one_of("refuse", "truncate_left", "sink"),
        "if prompt and new tokens exceed the context: refuse, drop the oldest tokens, or keep the first tokens and a "
        "window",
        more=", see [Overflow](#overflow)",
        common=True,
    )
    speculate: bool | None = _form(
        None,
        optional(replace(FLAG, short="True, False")),
        "True: draft tokens, which needs an engine with `draft`; False: never; None: the engine decides",
        more=". The distribution is the same",
    )

    include_stop_str_in_output: bool = _end(
        False, FLAG, "keep the stop text, or the text of the stop token, in the output"
    )
    bad_words: tuple[str | tuple[int, ...], ...] = _bias(
        (),
        _BAD_WORDS,
        "texts that may not appear, with or without a space before them, and sequences of token ids",
        more=", see [Sequences](#sequences)",
    )
    detokenize: bool = _form(True, FLAG, "decode the tokens to text; if False every text is empty")

    block_length: int | None = _step(
        None, optional(integer(1, MOST_MASKS)), "masks of a block; a block is filled before the next one; None: 32"
    )
    confidence_threshold: float | None = _step(
        None,
        optional(number(0, 1)),
        "each step fills the masks whose best token has at least this probability, and at least one mask; 0.9 if "
        "neither this nor `diffusion_steps` is given",
        source="[Fast-dLLM](https://arxiv.org/abs/2505.22618)",
    )
    diffusion_steps: int | None = _step(
        None,
        optional(integer(1, 1 << 20)),
        "model calls for `max_tokens` tokens; each fills equally many masks",
        source="[LLaDA](https://arxiv.org/abs/2502.09992)",
    )

    def __post_init__(self) -> None:
        for name, values in _RANGES.items():
            value = getattr(self, name)
            if value is not _DEFAULTS[name]:
                values.check(name, value)
        check_combination(self)

    @classmethod
    def from_defaults(cls, generation: "Generation", **overrides: Any) -> "SamplingParams":
        """Take the checkpoint's defaults for each parameter that the caller leaves out or sets to None.

        A checkpoint with ``do_sample`` false is greedy unless the caller names one of :data:`SAMPLED` or asks for
        something that needs sampling. Beam search never samples, and Mirostat replaces the other cuts. ``stop`` may be
        one string, every tuple a list, and ``logit_bias`` a mapping.

        Raises:
            UsageError: a name is unknown, or a value is out of its range.
        """
        _refuse_unknown(overrides, list(_DEFAULTS))
        given = {name: _as_tuple(name, value) for name, value in overrides.items() if value is not None}
        for name, value in given.items():
            _RANGES[name].check(name, value)
        return cls(**{**_checkpoint_defaults(generation, given), **given})


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
PARAMETERS: dict[str, Parameter] = {field.name: field.metadata["parameter"] for field in fields(SamplingParams)}
_RANGES = {name: stated.range for name, stated in PARAMETERS.items()}
_TUPLES = {name for name, values in _RANGES.items() if values.kind in ("texts", "words", "tokens", "biases")}
_OF_DIFFUSION = {name for name, stated in PARAMETERS.items() if stated.section == "Diffusion"}
_OF_BOTH = {"max_tokens", "temperature", "seed", "stop", "stop_token_ids", "ignore_eos", "on_overflow"}
_OF_BOTH |= {"include_stop_str_in_output", "detokenize"}
_NEEDS_CHANCE = {"n", "best_of", "consensus", "mirostat", *_CUTS}


def _as_tuple(name: str, value: Any) -> Any:
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name == "logit_bias" and isinstance(value, Mapping):
        return tuple(value.items())
    if name == "bad_words" and isinstance(value, list):
        return tuple(tuple(word) if isinstance(word, list) else word for word in value)
    if name == "logit_bias" and isinstance(value, list):
        return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
    return tuple(value) if name in _TUPLES and isinstance(value, list) else value


def _checkpoint_defaults(generation: "Generation", given: dict[str, Any]) -> dict[str, Any]:
    defaults = {name: value for name in DEFAULTED if (value := getattr(generation, name)) not in (None, ())}
    if "allowed_tokens" in given:
        defaults.pop("banned_tokens", None)
    if "min_tokens" in defaults:
        defaults["min_tokens"] = min(defaults["min_tokens"], given.get("max_tokens", _DEFAULTS["max_tokens"]))
    chance = any(given.get(name, _DEFAULTS[name]) != _DEFAULTS[name] for name in _NEEDS_CHANCE)
    beams = given.get("num_beams", 1) != 1
    greedy = not generation.do_sample and not chance and not given.keys() & set(SAMPLED)
    unused = SAMPLED if beams or greedy else _CUTS if given.get("mirostat") else ()
    defaults = {name: value for name, value in defaults.items() if name not in unused}
    return {"temperature": 0.0, **defaults} if greedy and not beams else defaults


def _refuse_unknown(overrides: dict[str, Any], known: list[str]) -> None:
    for name in overrides.keys() - set(known):
        close = neighbour(name, known)
        hint = f"did you mean {close}?" if close else f"expected one of {', '.join(known)}"
        raise UsageError(format_name(name), "is no sampling parameter", hint)


# ------------------------------------------------------------------------------------------------------ combinations

_ONE_OUTPUT = ("n", "best_of", "consensus")
_NOT_WITH_BEAMS = (*_ONE_OUTPUT, *_CUTS, "mirostat", "stop", *GUIDES, "logprobs", "on_overflow")
# Kinds of requests: the condition, and the parameters that the kind excludes.
_MODES: tuple[tuple[str, Callable[[SamplingParams], bool], tuple[str, ...]], ...] = (
    ("beam search", lambda p: p.num_beams > 1, _NOT_WITH_BEAMS),
    ("consensus decoding", lambda p: p.consensus is not None, ("best_of",)),
    ("Mirostat", lambda p: p.mirostat > 0, _CUTS),
)
# Parameters that need another one.
_NEEDS: tuple[tuple[str, str, Callable[[SamplingParams], bool]], ...] = (
    ("length_penalty", "num_beams above 1", lambda p: p.num_beams > 1),
    ("early_stopping", "num_beams above 1", lambda p: p.num_beams > 1),
    ("num_return_sequences", "num_beams above 1", lambda p: p.num_beams > 1),
    ("num_return_sequences", "num_beams of at least as many", lambda p: (p.num_return_sequences or 1) <= p.num_beams),
    ("consensus", "n of at least 2", lambda p: p.n >= 2),
    ("consensus", f"n of at most {MOST_COMPARED}", lambda p: p.n <= MOST_COMPARED),
    ("consensus", "detokenize", lambda p: p.detokenize),
    ("stop", "detokenize", lambda p: p.detokenize),
    ("include_stop_str_in_output", "detokenize", lambda p: p.detokenize),
    ("best_of", "n of at most as many", lambda p: p.n <= (p.best_of or p.n)),
    ("n", "temperature above 0", lambda p: p.temperature > 0),
    ("best_of", "temperature above 0", lambda p: p.temperature > 0),
    ("mirostat", "temperature above 0", lambda p: p.temperature > 0),
    ("mirostat_tau", "mirostat of 1 or 2", lambda p: p.mirostat > 0),
    ("mirostat_eta", "mirostat of 1 or 2", lambda p: p.mirostat > 0),
    ("diffusion_steps", "no confidence_threshold", lambda p: p.confidence_threshold is None),
    ("min_tokens", "max_tokens of at least as many", lambda p: p.min_tokens <= p.max_tokens),
    (
        "allowed_tokens",
        "a token that is not among banned_tokens",
        lambda p: not set(p.allowed_tokens or ()) <= set(p.banned_tokens),
    ),
)


def check_combination(params: SamplingParams) -> None:
    """Raise UsageError for parameters, each in its range, that contradict one another or cannot be combined."""
    for mode, is_on, excluded in _MODES:
        clash = next((name for name in excluded if _is_set(params, name)), None) if is_on(params) else None
        if clash:
            raise UsageError(
                clash, f"is {_show(params, clash)}, which {mode} cannot be combined with", "leave one of them out"
            )
    guides = [name for name in GUIDES if _is_set(params, name)]
    if len(guides) > 1:
        raise UsageError(
            guides[0], f"is given beside {' and '.join(guides[1:])}, expected at most one of {', '.join(GUIDES)}"
        )
    for name, needed, holds in _NEEDS:
        if _is_set(params, name) and not holds(params):
            raise UsageError(name, f"is {_show(params, name)}, which needs {needed}")
    if params.num_beams > 1 and params.temperature not in (0, 1):
        raise UsageError("temperature", f"is {params.temperature}, and beam search draws nothing", "leave it out")
    if params.num_beams > 1 and params.speculate:
        raise UsageError("speculate", "is True, which beam search cannot be combined with", "leave one of them out")


def check_diffusion(params: SamplingParams, diffuses: bool) -> None:
    """Raise UsageError for a parameter of the other kind of model: one that fills masks, or one that does not."""
    wrong = [
        name
        for name in PARAMETERS
        if _is_set(params, name) and (name in _OF_DIFFUSION) != diffuses and name not in _OF_BOTH
    ]
    if wrong or (diffuses and params.on_overflow == "sink"):
        model = "a diffusion model" if diffuses else "a model that fills no masks"
        name = wrong[0] if wrong else "on_overflow"
        raise UsageError(name, f"is {_show(params, name)}, which {model} cannot have", "leave it out")


def _is_set(params: SamplingParams, name: str) -> bool:
    return bool(getattr(params, name) != _DEFAULTS[name])


def _show(params: SamplingParams, name: str) -> str:
    return format_value(getattr(params, name))
