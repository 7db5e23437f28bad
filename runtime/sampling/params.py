"""What a request may ask of its tokens: names, ranges, defaults, and what does not go together."""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from llmc.bundle import Generation
from llmc.errors import UsageError

_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_TUPLES = ("stop", "stop_token_ids")
_UINT64_MAX = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens, and when it ends.

    Names and meanings are those of transformers' ``GenerationConfig`` and vLLM's ``SamplingParams``.

    Args:
        max_tokens: new tokens at most, from 1.
        temperature: divides the logits; any finite number from 0. 0 is greedy: the most probable token, always.
        top_k: keep the k most probable tokens and their equals; 0 keeps all.
        top_p: keep a token if those strictly more probable hold less than this mass, above 0 and up to 1 (keeps all).
            Holtzman et al., The Curious Case of Neural Text Degeneration, https://arxiv.org/abs/1904.09751
        min_p: keep tokens at least this many times as probable as the most probable one, from 0 (keeps all) to 1.
            Nguyen et al., Turning Up the Heat, https://arxiv.org/abs/2407.01082
        seed: from 0 to 2**64 - 1; None takes one from the operating system, reported as ``sampler.seed``.
        stop: texts that end the output; they are not part of it.
        stop_token_ids: tokens that end the output, beside the checkpoint's end-of-sequence tokens.
        ignore_eos: go on after the checkpoint's end-of-sequence tokens.

    Raises:
        UsageError: a value is out of its range or of another type.
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

    def __post_init__(self) -> None:
        _require("max_tokens", self.max_tokens, "an integer of at least 1", _is_integer(self.max_tokens, 1))
        _require("temperature", self.temperature, "a number of at least 0", _is_number(self.temperature, 0.0))
        _require("top_k", self.top_k, "an integer of at least 0 (0 keeps all)", _is_integer(self.top_k, 0))
        in_range = _is_number(self.top_p, 0.0, 1.0) and self.top_p > 0
        _require("top_p", self.top_p, "a number above 0 and at most 1", in_range)
        _require("min_p", self.min_p, "a number from 0 to 1", _is_number(self.min_p, 0.0, 1.0))
        seed_fits = self.seed is None or _is_integer(self.seed, 0, _UINT64_MAX)
        _require("seed", self.seed, "an integer from 0 to 2**64 - 1, or None", seed_fits)
        _require("stop", self.stop, "a tuple of non-empty strings", _is_tuple(self.stop, _is_text))
        ids = _is_tuple(self.stop_token_ids, lambda token: _is_integer(token, 0))
        _require("stop_token_ids", self.stop_token_ids, "a tuple of token ids", ids)
        _require("ignore_eos", self.ignore_eos, "True or False", isinstance(self.ignore_eos, bool))

    @classmethod
    def from_defaults(cls, generation: Generation, **overrides: Any) -> "SamplingParams":
        """Take the checkpoint's defaults for what the caller leaves out or sets to None.

        A checkpoint with ``do_sample`` false is greedy unless the caller names a temperature, top_k, top_p or min_p.
        ``stop`` may be one string, and ``stop`` and ``stop_token_ids`` any list or tuple.

        Raises:
            UsageError: a name is unknown, or a value is out of its range.
        """
        _refuse_unknown(overrides, [field.name for field in fields(cls)])
        given = {name: value for name, value in overrides.items() if value is not None}
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        given |= {name: tuple(given[name]) for name in _TUPLES if isinstance(given.get(name), list)}
        return cls(**{**_checkpoint_defaults(generation, given), **given})


def _checkpoint_defaults(generation: Generation, given: dict[str, Any]) -> dict[str, Any]:
    if not generation.do_sample and not given.keys() & set(_FILTERS):
        return {"temperature": 0.0}
    defaults = {name: getattr(generation, name) for name in _FILTERS}
    return {name: value for name, value in defaults.items() if value is not None}


def _refuse_unknown(overrides: dict[str, Any], known: list[str]) -> None:
    for name in overrides.keys() - set(known):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
        raise UsageError(f"unknown sampling parameter {name!r}; {hint}")


def _require(name: str, value: object, expected: str, holds: bool) -> None:
    if not holds:
        raise UsageError(f"{name} is {value!r}, expected {expected}")


def _is_tuple(value: object, is_item: Callable[[object], bool]) -> bool:
    return isinstance(value, tuple) and all(is_item(item) for item in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_integer(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float = math.inf) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) and low <= value <= high
