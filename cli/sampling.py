"""The options of ``llmc run`` and ``llmc chat``, including a request's parameters, and a summary of an answer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.cli.options import (
    COMMON,
    ENGINE_NAMES,
    ENGINE_OPTIONS,
    SectionOption,
    add_options,
    debug_option,
    engine_option,
    flag,
    memory_option,
    take,
    threads_option,
    verify_option,
)
from llmc.errors import UsageError, format_name, format_value
from llmc.runtime.sampling.neighbours import neighbour
from llmc.runtime.sampling.params import DEFAULTED, PARAMETERS, SamplingParams
from llmc.runtime.sampling.ranges import Parameter, Range
from llmc.strict import read_bytes

if TYPE_CHECKING:
    from llmc.runtime import GenerationResult

MAX_FILE_BYTES = 64_000_000

SAMPLING_NAMES = frozenset(PARAMETERS)
LOADING = ("threads", "max_context", "memory", "self_test", "verify", "emulate", "device")

# ---------------------------------------------------------------------------------------------------- kinds of values


_ID = r"\s*\d{1,18}\s*"  # longer numbers exceed every vocabulary, and Python's limit on digits
_NUMBER = r"\s*[+-]?(?:\d+\.?\d*|\.\d+)\s*"


def tokens(text: str) -> tuple[int, ...]:
    """Comma-separated token ids."""
    ids = text.split(",")
    if not all(re.fullmatch(_ID, part, re.ASCII) for part in ids):
        raise click.BadParameter(f"{format_value(text)} is no list of token ids, expected for example 13 or 13,198")
    return tuple(map(int, ids))


def biases(text: str) -> tuple[tuple[int, float], ...]:
    """Comma-separated token ids with biases: 13=-5,198=2.5."""
    pairs = [re.fullmatch(f"({_ID})=({_NUMBER})", part, re.ASCII) for part in text.split(",")]
    if not all(pairs):
        raise click.BadParameter(
            f"{format_value(text)} is no list of biases, expected ID=NUMBER, for example 13=-5,198=2.5"
        )
    return tuple((int(pair[1]), float(pair[2])) for pair in pairs if pair)


def schema(text: str) -> str:
    """A JSON schema, or the content of a file."""
    return _text_or_file(text, text.lstrip().startswith("{"), "a JSON object")


def grammar(text: str) -> str:
    """A grammar (it always contains a colon), or the content of a file."""
    return _text_or_file(text, ":" in text and not os.path.isfile(text), "a grammar in Lark's notation")


def _text_or_file(text: str, is_content: bool, expected: str) -> str:
    if is_content:
        return text
    try:
        return read_bytes(Path(text), MAX_FILE_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise click.BadParameter(
            f"{text!r:.80} is neither {expected} nor a file that can be read ({reason})"
        ) from error


def one_of(choices: tuple[str | bool, ...]) -> Callable[[str], str | bool]:
    values = {str(choice).lower(): choice for choice in choices}

    def read(text: str) -> str | bool:
        if text not in values:
            raise click.BadParameter(f"{format_value(text)} is not one of {', '.join(values)}")
        return values[text]

    return read


# ---------------------------------------------------------------------------------------------------------- options

# By kind of range: the function that parses the text, and an addition to the help.
_KINDS: dict[str, tuple[Any, str]] = {
    "integer": (int, ""),
    "number": (float, ""),
    "flag": (bool, ""),
    "text": (str, ""),
    "texts": (str, "may be repeated"),
    "words": (str, "may be repeated"),
    "tokens": (tokens, "as 2,13"),
    "biases": (biases, "as 13=-5,198=2.5"),
    "choice": (str, ""),
    "schema": (schema, "a file, or the schema itself"),
}
SEVERAL = ("texts", "words")
_NOTES = {
    "max_tokens": "fewer where the context ends",
    "grammar": "a file, or its text",
    "detokenize": "for run --json",
    "logprobs": "for run --json",
    "prompt_logprobs": "for run --json",
}


def _sampling_options() -> Iterator[Callable[[Any], Any]]:
    """An option for every request parameter, the common ones first."""
    sections: dict[str, list[str]] = {COMMON: []}
    for name, stated in PARAMETERS.items():
        sections.setdefault(COMMON if stated.common else stated.section, []).append(name)
    for section, listed in sections.items():
        for name in listed:
            yield _option(name, PARAMETERS[name], section)


def _type(name: str, values: Range) -> Any:
    return one_of(values.choices) if values.choices else grammar if name == "grammar" else _KINDS[values.kind][0]


def change_parameter(sampling: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    """Parameters with one of them changed, or reset if ``text`` is empty."""
    if name not in SAMPLING_NAMES:
        close = neighbour(name, SAMPLING_NAMES)
        hint = f"did you mean {close}?" if close else "llmc chat --help lists them"
        raise UsageError(format_name(name), "is no parameter", hint)
    rest = {each: value for each, value in sampling.items() if each != name}
    if not text:
        return rest
    values = PARAMETERS[name].range
    try:
        value = click.types.convert_type(_type(name, values))(text)
    except click.BadParameter as error:
        raise UsageError(name, error.message) from error
    changed = {**rest, name: (value,) if values.kind in SEVERAL else value}
    SamplingParams(**changed)
    refuse_several(changed)
    refuse_unseen(changed)
    return changed


def _option(name: str, stated: Parameter, section: str) -> Callable[[Any], Any]:
    values = stated.range
    return click.option(
        flag(name) + (f"/--no-{name.replace('_', '-')}" if values.kind == "flag" else ""),
        name,
        cls=SectionOption,
        section=section,
        type=_type(name, values),
        metavar=f"[{'|'.join(map(str, values.choices)).lower()}]" if values.choices else None,
        default=None,
        multiple=values.kind in SEVERAL,
        help=_help(name, stated.meaning, values),
    )


def _help(name: str, meaning: str, values: Range) -> str:
    added = [values.note, _KINDS[values.kind][1], _NOTES.get(name, "")]
    text = "; ".join([meaning[0].upper() + meaning[1:], *filter(None, added)])
    known = SAMPLING_NAMES | ENGINE_NAMES
    text = re.sub("`(.*?)`", lambda quoted: flag(quoted[1]) if quoted[1] in known else quoted[1], text)
    default = SamplingParams.__dataclass_fields__[name].default
    if name in DEFAULTED:
        return f"{text}.  [default: the checkpoint's]"
    shown = " ".join(map(ascii, default)) if isinstance(default, tuple) else str(default).lower()
    return f"{text}." + (f"  [default: {shown}]" if default or (values.choices and default is not None) else "")


answering_options = add_options(
    [
        click.option("--stats", is_flag=True, help="Print context used, speed and the seed on stderr at the end."),
        threads_option,
        memory_option,
        click.option(
            "--self-test/--no-self-test",
            default=None,
            help="Replay the bundle's golden prompts first.  [default: the first time on this machine]",
        ),
        verify_option,
        debug_option,
        *_sampling_options(),
        engine_option("--device", type=click.IntRange(min=0), default=0, help="Number of the GPU."),
        engine_option("--max-context", type=int, help="Longest sequence in tokens.  [default: the bundle's]"),
        *ENGINE_OPTIONS,
    ]
)

# -------------------------------------------------------------------------------------------------------------- answers


def collect_load_options(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of :func:`llmc.runtime.load`; engine options only if they were given."""
    given = {name: options[name] for name in LOADING if name in options} | take(options, ENGINE_NAMES)
    return {**given, "offline": True} if click.get_current_context().params.get("offline") else given


def refuse_unseen(sampling: dict[str, Any]) -> None:
    """Refuse parameters whose results only JSON shows."""
    for name in ("logprobs", "prompt_logprobs", "detokenize"):
        if sampling.get(name, True) is not True:
            raise UsageError(name, f"is {sampling[name]}, which only llmc run with --json shows", "add it, or leave it")


def refuse_several(sampling: dict[str, Any]) -> None:
    """Refuse parameters that ask for several answers to one turn."""
    counts = ("num_return_sequences",) if "consensus" in sampling else ("num_return_sequences", "n")
    if several := next((name for name in counts if sampling.get(name, 1) > 1), None):
        raise UsageError(several, "asks for several outputs, and a turn has one", "leave it out")


def is_one(sampling: dict[str, Any]) -> bool:
    """True if there is one output, which can be printed as it comes."""
    return all(sampling.get(name, 1) <= 1 for name in ("n", "best_of", "num_return_sequences"))


def status(result: GenerationResult, room: int) -> str:
    """The tokens of the context that are used, of ``room``, and speeds, in a short line."""
    usage, timings = result.usage, result.timings
    used = f"{usage.total_tokens:,} of {room:,} tokens"
    if result.metrics.calls:  # a diffusion model: tokens come by blocks, so times between them mean nothing
        seconds = timings.ttft_s + timings.decode_s - timings.queue_s
        return f"{used}, {usage.completion_tokens / seconds:.1f} tokens/s with the prompt"
    speed = f"{timings.decode_tokens_per_s:.1f} tokens/s, " if timings.decode_tokens else ""
    return f"{used}, {speed}first token after {timings.ttft_s:.2f} s"


def describe(result: GenerationResult, room: int) -> str:
    """:func:`status`, counts, the finish reason and the seed, in one line."""
    usage, metrics = result.usage, result.metrics
    cached = f", {usage.cached_tokens} cached" if usage.cached_tokens else ""
    cut = f", {usage.truncated_tokens} left out" if usage.truncated_tokens else ""
    parts = [status(result, room), f"prompt {usage.prompt_tokens:,} tokens{cached}{cut}"]
    parts.append(f"answer {usage.completion_tokens:,} tokens" + (f" in {metrics.calls} calls" if metrics.calls else ""))
    if metrics.drafted:
        parts.append(f"{metrics.accepted} of {metrics.drafted} drafts accepted")
    parts.append(f"ended by {result.finish_reason}")
    return "; ".join(parts if result.seed is None else [*parts, f"seed {result.seed}"])
