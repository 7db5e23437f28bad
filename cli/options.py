"""Arguments and options that several verbs share, the parameters of a request among them."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from llmc.cli.reading import read_text
from llmc.errors import RequestError, UsageError


class NewPath(click.Path):
    """A path that need not exist, but has a name: without one it would be the folder that one is in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path.

        Raises:
            click.BadParameter: it is empty.
        """
        if not str(value):
            self.fail("'' is no path; name one, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)


EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FOLDER = NewPath(path_type=Path)
NEW_FILE = NewPath(dir_okay=False, path_type=Path)

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_QUOTED = re.compile(r"""((?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(?!\w))""")
_Command = TypeVar("_Command", bound=Callable[..., Any])


def size(text: str) -> int:
    """Bytes as people write them: 800MB, 2GB, 1.5GiB, 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    count = float(match[1]) * _UNITS.get(match[2].upper(), 0) if match else 0.0
    if not 1 <= count < float("inf"):
        raise click.BadParameter(f"{text!r} is no size, expected for example 2GB, 1.5GiB or 800MB")
    return int(count)


def _remember_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(dict)["debug"] = True


debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of an error.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
force_option = click.option("--force", is_flag=True, help="Replace an existing output folder.")
output_option = click.option("-o", "--output", type=NEW_FOLDER, required=True, help="Folder to write.")
threads_option = click.option(
    "--threads", type=click.IntRange(min=1), help="Threads to compute with.  [default: as many as are usable]"
)
memory_option = click.option("--memory", type=size, help="Memory it may take, as 2GB.  [default: what is available]")
emulate_option = click.option(
    "--emulate", is_flag=True, help="Run the graph of a GPU's bundle on the CPU: slow, to check it without the GPU."
)
bundle_argument = click.argument("bundle", type=EXISTING_FOLDER)


# ---------------------------------------------------------------------------------------------------- kinds of values


def tokens(text: str) -> tuple[int, ...]:
    """Token ids with commas between them."""
    ids = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d+", part, re.ASCII) for part in ids):
        raise click.BadParameter(f"{text!r} is no list of token ids, expected for example 13 or 13,198")
    return tuple(map(int, ids))


def biases(text: str) -> tuple[tuple[int, float], ...]:
    """Token ids with what to add to their logits: 13=-5,198=2.5."""
    pairs = [re.fullmatch(r"\s*(\d+)\s*=\s*([+-]?(?:\d+\.?\d*|\.\d+))\s*", part, re.ASCII) for part in text.split(",")]
    if not all(pairs):
        raise click.BadParameter(f"{text!r} is no list of biases, expected ID=NUMBER, for example 13=-5,198=2.5")
    return tuple((int(pair[1]), float(pair[2])) for pair in pairs if pair)


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(part.strip() for part in text.split(","))


def early_stopping(text: str) -> bool | str:
    """true, false or never."""
    values: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in values:
        raise click.BadParameter(f"{text!r} is not one of {', '.join(values)}")
    return values[text]


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


# ------------------------------------------------------------------------------------------ a request's parameters


class Parameter(NamedTuple):
    """A field of SamplingParams as an option.

    Attributes:
        name: the field; the flag is called the same.
        kind: type of the value; bool is a switch with a counterpart ``--no-...``.
        help: what it does.
        default: shown in the help, where the help does not tell what the option is without.
        many: whether the option may be repeated.
    """

    name: str
    kind: Any
    help: str
    default: object = None
    many: bool = False


# A test holds these against llmc.runtime.SamplingParams, which --help must not import.
SAMPLING: dict[str, tuple[Parameter, ...]] = {
    "Common parameters": (
        Parameter("max_tokens", int, "New tokens at most; fewer where the context ends.", 256),
        Parameter("temperature", float, "0 always takes the most probable token.  [default: the checkpoint's]"),
        Parameter("top_k", int, "Sample from the k most probable tokens; 0 from all.  [default: the checkpoint's]"),
        Parameter("top_p", float, "Sample from the most probable tokens that hold this mass."),
        Parameter("min_p", float, "Sample from tokens this probable, relative to the most probable one."),
        Parameter("repetition_penalty", float, "Above 1 discourages every token of prompt and output."),
        Parameter("seed", int, "The same seed gives the same text."),
        Parameter("stop", str, "End before this text; may be repeated.", many=True),
        Parameter("n", int, "Draw so many outputs.", 1),
        Parameter("num_beams", int, "Beam search with so many beams; 1 is off.", 1),
        Parameter("json_schema", schema, "The output is JSON of this schema: a file, or the schema itself."),
        Parameter(
            "on_overflow",
            click.Choice(["refuse", "truncate_left", "sink"]),
            "When the context is full: refuse, drop the oldest tokens, or keep the first ones and a window.",
            "refuse",
        ),
    ),
    "Where the output ends": (
        Parameter("stop_token_ids", tokens, "Tokens that end the output, as 2,13."),
        Parameter("ignore_eos", bool, "Go on after the checkpoint's end-of-sequence tokens."),
        Parameter(
            "min_tokens",
            int,
            "New tokens before the output may end, by --stop too; a finished grammar ends sooner.",
        ),
    ),
    "More ways to sample": (
        Parameter("typical_p", float, "Keep the tokens whose surprise is nearest to the entropy, up to this mass."),
        Parameter("epsilon_cutoff", float, "Keep tokens at least this probable."),
        Parameter("eta_cutoff", float, "As --epsilon-cutoff, less strict where the entropy is high."),
        Parameter("top_n_sigma", float, "Keep logits within so many standard deviations of the largest."),
        Parameter("xtc_probability", float, "How often to drop all but the least probable tokens over the threshold."),
        Parameter("xtc_threshold", float, "From 0 to 1.", 0.1),
        Parameter("dynatemp_range", float, "The temperature varies by this much with the entropy."),
        Parameter("dynatemp_exponent", float, "Shape of that curve.", 1.0),
        Parameter("mirostat", int, "1 or 2 steers the surprise of the output; 0 is off."),
        Parameter("mirostat_tau", float, "The surprise aimed at, in bits.", 5.0),
        Parameter("mirostat_eta", float, "How fast it is steered.", 0.1),
    ),
    "Repetition": (
        Parameter("presence_penalty", float, "Taken from the logit of every token of the output, -2 to 2."),
        Parameter("frequency_penalty", float, "The same for each time that it occurs."),
        Parameter("dry_multiplier", float, "How strongly to forbid going on with what occurred before (DRY)."),
        Parameter("dry_base", float, "Growth of that penalty with every token repeated.", 1.75),
        Parameter("dry_allowed_length", int, "Longest repetition that costs no more than the multiplier.", 2),
        Parameter("dry_range", int, "Tokens looked back at; 0 is all."),
        Parameter(
            "dry_sequence_breakers",
            str,
            'Text that no repetition reaches across; may be repeated.  [default: line end, ":", quote, "*"]',
            many=True,
        ),
        Parameter("no_repeat_ngram_size", int, "No sequence of so many tokens occurs twice."),
    ),
    "Single tokens": (
        Parameter("logit_bias", biases, "Added to logits, -100 to 100, as 13=-5,198=2.5."),
        Parameter("banned_tokens", tokens, "Tokens that may not come, as 2,13."),
        Parameter("allowed_tokens", tokens, "The only tokens that may come."),
        Parameter("processor_order", names, "Steps that take one another's places, as top_p,top_k."),
        Parameter("logprobs", int, "Report log-probabilities, and so many of the most probable tokens (run --json)."),
        Parameter("prompt_logprobs", int, "The same for the prompt (run --json)."),
    ),
    "Several outputs, and search": (
        Parameter("best_of", int, "Draw so many, return the --n best."),
        Parameter("consensus", click.Choice(["f1", "chrf"]), "Of --n samples the one most like the others."),
        Parameter("num_beam_groups", int, "Groups of beams that keep apart."),
        Parameter("diversity_penalty", float, "How much the groups keep apart."),
        Parameter("length_penalty", float, "Exponent of the length that scores are divided by.", 1.0),
        Parameter("early_stopping", early_stopping, "When the search ends: true, false or never.", False),
        Parameter("num_return_sequences", int, "Hypotheses to return."),
        Parameter("penalty_alpha", float, "Contrastive search among --top-k tokens, 0 to 1."),
    ),
    "Guided output": (
        Parameter("regex", str, "The output matches this regular expression."),
        Parameter("grammar", grammar, "The output is derived from this grammar (Lark): a file, or its text."),
        Parameter("choice", str, "The output is this text, or another one given so; may be repeated.", many=True),
    ),
    "Speculation": (
        Parameter("speculate", bool, "Let --draft guess tokens for this request.  [default: where it pays]"),
    ),
}
SAMPLING_NAMES = frozenset(parameter.name for section in SAMPLING.values() for parameter in section)
ENGINE_SECTION = "The engine"


class SectionOption(click.Option):
    """An option that ``--help`` lists under a heading of its own."""

    section = ""


class EngineOption(SectionOption):
    """An option of the engine."""

    section = ENGINE_SECTION


draft_option = click.option(
    "--draft", cls=EngineOption, help="Guess tokens: 'lookup', or a bundle with the same tokenizer."
)
determinism_option = click.option(
    "--determinism",
    cls=EngineOption,
    type=click.Choice(["fast", "batch", "strict"]),
    help="batch: tokens depend on no other request; strict: nor on speculation.  [default: fast]",
)
max_batch_option = click.option(
    "--max-batch",
    cls=EngineOption,
    type=click.IntRange(min=1),
    help="Rows that run at once.  [default: the bundle's]",
)
prefix_cache_option = click.option(
    "--prefix-cache-folder", cls=EngineOption, type=NEW_FOLDER, help="Keep prefixes of prompts here, across runs."
)


def flag(name: str) -> str:
    """The flag of a parameter: top_p -> --top-p."""
    return f"--{name.replace('_', '-')}"


def sampling_options(command: _Command) -> _Command:
    """Add an option for every parameter of a request."""
    for section, parameters in reversed(SAMPLING.items()):
        kind = type("SectionOption", (SectionOption,), {"section": section})
        for parameter in reversed(parameters):
            command = _sampling_option(parameter, kind)(command)
    return command


def _sampling_option(parameter: Parameter, kind: type[SectionOption]) -> Callable[[_Command], _Command]:
    switch = parameter.kind is bool
    spelled = flag(parameter.name) + (f"/--no-{parameter.name.replace('_', '-')}" if switch else "")
    shown = "" if parameter.default is None else f"  [default: {str(parameter.default).lower()}]"
    return click.option(
        spelled,
        parameter.name,
        cls=kind,
        type=parameter.kind,
        default=None,
        multiple=parameter.many,
        help=parameter.help + shown,
    )


def engine_options(command: _Command) -> _Command:
    """Add the options of :func:`llmc.runtime.load` that concern the engine."""
    for option in (prefix_cache_option, max_batch_option, determinism_option, draft_option):  # the last one is on top
        command = option(command)
    return command


ENGINE_NAMES = frozenset({"draft", "determinism", "max_batch", "prefix_cache_folder"})


def take(options: dict[str, Any], wanted: Iterable[str]) -> dict[str, Any]:
    """Remove the ``wanted`` options, and return those of them that were given."""
    taken = {name: options.pop(name) for name in sorted(wanted) if name in options}
    return {name: value for name, value in taken.items() if value is not None and value != ()}


class SectionCommand(click.Command):
    """Lists its options in sections, and names flags where an error of the library names parameters."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The plain options first, then each section, in the order of declaration."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it.

        Raises:
            UsageError, RequestError: with flags for names.
        """
        try:
            return super().invoke(ctx)
        except (UsageError, RequestError) as error:
            known = [option.name for option in self.params if isinstance(option, click.Option) and option.name]
            raise type(error)(with_flags(str(error), known)) from error


def with_flags(message: str, parameters: Iterable[str]) -> str:
    """Write ``--top-p`` for ``top_p``.

    A name that is a plain word too is a parameter only before what is said of it. In a list a name may be a value, and
    what stands in quotes is one, and stays as the user wrote it.
    """
    parts = _QUOTED.split(message)
    for name in parameters:
        after = "(?!,)" if "_" in name else r"(?= is | holds | cannot | -?\d|=)"
        named = re.compile(rf"(?<![\w-]){re.escape(name)}\b{after}")
        parts[::2] = [named.sub(flag(name), part) for part in parts[::2]]
    return "".join(parts)
