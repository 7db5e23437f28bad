"""The parameters of a request as options: their names, ranges and meanings are those of SamplingParams."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from llmc.cli.answering import refuse_several, refuse_unseen
from llmc.cli.options import ENGINE_NAMES, Command, SectionOption, flag
from llmc.cli.reading import read_text
from llmc.errors import UsageError, format_value
from llmc.runtime.sampling.neighbours import neighbour
from llmc.runtime.sampling.params import PARAMETERS, SAMPLED, SamplingParams
from llmc.runtime.sampling.ranges import Parameter, Range

COMMON = "Common parameters"
SAMPLING_NAMES = frozenset(PARAMETERS)

# ---------------------------------------------------------------------------------------------------- kinds of values


_ID = r"\s*\d{1,18}\s*"  # Python reads no integer of thousands of digits, and no vocabulary needs one
_NUMBER = r"\s*[+-]?(?:\d+\.?\d*|\.\d+)\s*"


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise click.BadParameter(f"{format_value(text)} is not a valid integer.") from error


def tokens(text: str) -> tuple[int, ...]:
    """Token ids with commas between them."""
    ids = text.split(",")
    if not all(re.fullmatch(_ID, part, re.ASCII) for part in ids):
        raise click.BadParameter(f"{format_value(text)} is no list of token ids, expected for example 13 or 13,198")
    return tuple(map(int, ids))


def biases(text: str) -> tuple[tuple[int, float], ...]:
    """Token ids with what to add to their logits: 13=-5,198=2.5."""
    pairs = [re.fullmatch(f"({_ID})=({_NUMBER})", part, re.ASCII) for part in text.split(",")]
    if not all(pairs):
        raise click.BadParameter(
            f"{format_value(text)} is no list of biases, expected ID=NUMBER, for example 13=-5,198=2.5"
        )
    return tuple((int(pair[1]), float(pair[2])) for pair in pairs if pair)


def schema(text: str) -> str:
    """JSON as it is, or the text of a file."""
    return _text_or_file(text, text.lstrip().startswith("{"), "a JSON object")


def grammar(text: str) -> str:
    """A grammar as it is, or the text of a file: every grammar defines something, with a colon."""
    return _text_or_file(text, ":" in text and not os.path.isfile(text), "a grammar in Lark's notation")


def _text_or_file(text: str, is_content: bool, expected: str) -> str:
    if is_content:
        return text
    try:
        return read_text(Path(text))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
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

# By the kind of a range: what reads the text, and what the help adds about it.
_KINDS: dict[str, tuple[Any, str]] = {
    "integer": (integer, ""),
    "number": (float, ""),
    "flag": (bool, ""),
    "text": (str, ""),
    "texts": (str, "may be repeated"),
    "tokens": (tokens, "as 2,13"),
    "biases": (biases, "as 13=-5,198=2.5"),
    "choice": (str, ""),
    "schema": (schema, "a file, or the schema itself"),
}
_NOTES = {
    "max_tokens": "fewer where the context ends",
    "grammar": "a file, or its text",
    "detokenize": "for run --json",
    "logprobs": "for run --json",
    "prompt_logprobs": "for run --json",
}


def add_sampling_options(command: Command) -> Command:
    """Add an option for every parameter of a request, the common ones first."""
    sections: dict[str, list[str]] = {COMMON: []}
    for name, stated in PARAMETERS.items():
        sections.setdefault(COMMON if stated.common else stated.section, []).append(name)
    for section, listed in reversed(sections.items()):
        for name in reversed(listed):
            command = _option(name, PARAMETERS[name], section)(command)
    return command


def _type(name: str, values: Range) -> Any:
    return one_of(values.choices) if values.choices else grammar if name == "grammar" else _KINDS[values.kind][0]


def change_parameter(sampling: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    """Parameters with another value of one of them, or without one where there is no text."""
    if name not in SAMPLING_NAMES:
        close = neighbour(name, SAMPLING_NAMES)
        hint = f"did you mean {close}?" if close else "llmc chat --help lists them"
        raise UsageError(f"there is no parameter {format_value(name)}; {hint}")
    rest = {each: value for each, value in sampling.items() if each != name}
    if not text:
        return rest
    values = PARAMETERS[name].range
    try:
        value = click.types.convert_type(_type(name, values))(text)
    except click.BadParameter as error:
        raise UsageError(f"{name}: {error.message}") from error
    found = {**rest, name: (value,) if values.kind == "texts" else value}
    SamplingParams(**found)
    refuse_several(found)
    refuse_unseen(found)
    return found


def _option(name: str, stated: Parameter, section: str) -> Callable[[Command], Command]:
    values = stated.range
    return click.option(
        flag(name) + (f"/--no-{name.replace('_', '-')}" if values.kind == "flag" else ""),
        name,
        cls=SectionOption,
        section=section,
        type=_type(name, values),
        metavar=f"[{'|'.join(map(str, values.choices)).lower()}]" if values.choices else None,
        default=None,
        multiple=values.kind == "texts",
        help=_help(name, stated.meaning, values),
    )


def _help(name: str, meaning: str, values: Range) -> str:
    added = [values.note, _KINDS[values.kind][1], _NOTES.get(name, "")]
    text = "; ".join([meaning[0].upper() + meaning[1:], *filter(None, added)])
    known = SAMPLING_NAMES | ENGINE_NAMES
    text = re.sub("`(.*?)`", lambda quoted: flag(quoted[1]) if quoted[1] in known else quoted[1], text)
    default = SamplingParams.__dataclass_fields__[name].default
    if name in SAMPLED:
        return f"{text}.  [default: the checkpoint's]"
    shown = " ".join(map(ascii, default)) if isinstance(default, tuple) else str(default).lower()
    return f"{text}." + (f"  [default: {shown}]" if default or (values.choices and default is not None) else "")
