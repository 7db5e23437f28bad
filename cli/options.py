"""Arguments and options that several verbs share."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmc.cli import output as show
from llmc.cli.stopping import cleanly_stopped
from llmc.errors import UsageError
from llmc.sources import Kind, Located, locate

if TYPE_CHECKING:
    from llmc.optimize.recipe import BuildRequest

EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

ENGINE = ("compute_capabilities", "deferred")
LIMITS = ("max_kl", "min_agreement", "max_perplexity_increase")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
Command = TypeVar("Command", bound=Callable[..., Any])


def new_path(text: str) -> Path:
    """A path that need not exist; empty text is refused, for it would mean the current folder."""
    if not text:
        raise click.BadParameter("'' is no path; name one, or leave the option out")
    return Path(text)


def find_source(name: str, offline: bool | None) -> Located:
    """:func:`llmc.sources.locate` with progress on a terminal."""
    with cleanly_stopped(), show.progress() as progress:
        return locate(name, offline=offline, progress=progress)


def find_bundle(name: str, offline: bool | None) -> Path:
    """:func:`llmc.sources.built.find_bundle` with progress on a terminal, and its sentences on stderr."""
    from llmc.sources.built import find_bundle as find

    with cleanly_stopped(), show.progress() as progress:
        return find(name, offline=offline, progress=progress, say=partial(click.echo, err=True))


def take_path(source: Located, *kinds: Kind, advice: str) -> Path:
    """The path of a source of one of ``kinds``; refuse any other."""
    if source.kind not in kinds:
        expected = " or ".join(kind.value for kind in kinds if kind is not Kind.ADAPTER)
        raise UsageError("source", f"{source.name} is {source.kind.value}, expected {expected}", advice)
    return source.path


def size(text: str) -> int:
    """Bytes as people write them: 800MB, 2GB, 1.5GiB, 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    count = float(match[1]) * _UNITS.get(match[2].upper(), 0) if match else 0.0
    if not 1 <= count < float("inf"):
        raise click.BadParameter(f"{text!r} is no size, expected for example 2GB, 1.5GiB or 800MB")
    return int(count)


def boxes(text: str) -> tuple[int, ...]:
    """A number of stages, as a zero for each, or the memory of each one's box: 2, or 8GB,16GB."""
    if text.isascii() and text.isdigit() and len(text) < 4:
        if int(text) < 2:
            raise click.BadParameter(f"{text!r} is no number of stages, expected 2 or more; or leave the option out")
        return (0,) * int(text)
    return tuple(map(size, text.split(",")))


# main looks for it before options are parsed.
debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
force_option = click.option("--force", is_flag=True, help="Replace an existing output folder.")
output_option = click.option("-o", "--output", type=new_path, metavar="PATH", required=True, help="Folder to write.")
threads_option = click.option(
    "--threads", type=click.IntRange(min=1), help="Threads to compute with.  [default: as many as are usable]"
)
memory_option = click.option("--memory", type=size, help="Memory it may take, as 2GB.  [default: what is available]")
recipe_option = click.option(
    "--recipe",
    help="TOML file that says how weights are compiled, or a name: int8-exact (prompts as exact as decode), "
    "int8-fast (faster steps, twice the weights), int4-quality (4 bits, closer), int8, int4 or w8a8-static.",
)
small_option = click.option(
    "--small", is_flag=True, help="One graph for both phases: less disk and memory, slower prompts or steps."
)
stages_option = click.option(
    "--stages",
    type=boxes,
    metavar="N|SIZES",
    help="Cut it between layers to run on several boxes: how many, or the memory of each, as 8GB,16GB.",
)
emulate_option = click.option(
    "--emulate", is_flag=True, help="Run the graph of a GPU's bundle on the CPU: slow, to check it without the GPU."
)
verify_option = click.option(
    "--verify",
    is_flag=True,
    default=None,
    help="Hash every file first.  [default: 64 MiB of each, the first time on this machine]",
)
offline_option = click.option(
    "--offline", is_flag=True, default=None, help="Use no network, only what the hub's cache holds."
)


def source_argument(
    name: str, find: Callable[[str, bool | None], Any] = find_source, *, also: Sequence[str] = (), required: bool = True
) -> Callable[[Command], Command]:
    """An argument that takes any source, and ``--offline``. The verb gets what ``find`` makes of its text, and of the
    options ``also``; that happens after the whole line is parsed, for it may take minutes."""

    def add(command: Any) -> Any:
        @wraps(command)
        def with_sources(*, offline: bool | None, **given: Any) -> Any:
            for key in (name, *also):
                if given[key] == "":  # it would mean the current folder
                    raise UsageError(key, "is empty", "name a source")
                if given[key] is not None:
                    given[key] = find(given[key], offline)
            return command(**given)

        return click.argument(name, required=required)(offline_option(with_sources))

    return add


bundle_argument = source_argument("bundle", find_bundle)


class SectionOption(click.Option):
    """An option that ``--help`` lists under the heading ``section``."""

    def __init__(self, *names: Any, section: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.section = section


engine_option = partial(click.option, cls=SectionOption, section="The engine")
ENGINE_OPTIONS = (
    engine_option("--draft", help="Guess tokens: lookup, auto, none, or a bundle with the same tokenizer."),
    engine_option(
        "--determinism",
        type=click.Choice(["fast", "batch", "strict"]),
        help="batch: tokens depend on no other request; strict: nor on speculation.  [default: fast]",
    ),
    engine_option("--max-batch", type=click.IntRange(min=1), help="Rows that run at once.  [default: the bundle's]"),
    engine_option("--tool-format", help="Format of calls in a conversation, as hermes.  [default: the template's]"),
    engine_option(
        "--prefix-cache-folder", type=new_path, metavar="PATH", help="Keep prefixes of prompts here, across runs."
    ),
)
PRECISIONS = {
    "fp32": "Keep the weights in full precision.",
    "fp16": "Weights in 16 bits; CPUs compute in full precision, GPUs in 16 bits.",
    "bf16": "Weights and arithmetic in bfloat16, for TensorRT.",
    "int8": "8-bit weights.  [default, but of tensorrt]",
    "int4": "4-bit weights.  [default of tensorrt]",
    "source": "The integers that a quantized checkpoint has.  [its default]",
}


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    """The decorator that adds ``options``, the first of them on top."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


precision_options = add_options(
    [click.option(f"--{name}", f"as_{name}", is_flag=True, help=text) for name, text in PRECISIONS.items()]
)


ENGINE_NAMES = frozenset({"draft", "determinism", "max_batch", "prefix_cache_folder", "tool_format"})


def take(options: dict[str, Any], wanted: Iterable[str]) -> dict[str, Any]:
    """Remove the ``wanted`` options, and return the ones that were given."""
    taken = {name: options.pop(name) for name in sorted(wanted) if name in options}
    return {name: value for name, value in taken.items() if value is not None and value != ()}


COMMON = "Common parameters"
SHOWN = ("Options", COMMON, "Where it listens")  # sections of --help; --help-all shows all
_ALL = "llmc.help_all"


def _help(ctx: click.Context, option: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class SectionCommand(click.Command):
    """Lists its options in sections."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The options with ``--help-all`` before ``--help``, where there are sections to show."""
        options = super().get_params(ctx)
        if not any(hasattr(option, "section") for option in options):
            return options
        text = "Show this message with all options, and exit."
        every = click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_help, help=text)
        return [*options[:-1], every, options[-1]]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The plain options first, then each section, in the order of declaration; rare ones for ``--help-all``."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        rare = [] if ctx.meta.get(_ALL) else [title for title in sections if title not in SHOWN]
        for title, records in sections.items():
            if records and title not in rare:
                with formatter.section(title):
                    formatter.write_dl(records)
        if rare:
            formatter.write_paragraph()
            formatter.write_text(f"--help-all lists more: {'; '.join(rare)}.")


def make_request(source: Path, *, small: bool, recipe: str | None, **choices: Any) -> "BuildRequest":
    """The request that options of ``llmc build`` or ``llmc plan`` stand for."""
    from llmc.bundle import Budget
    from llmc.optimize.recipe import BuildRequest, find_recipe
    from llmc.optimize.recipe.engine import EngineRequest

    precisions = [name for name in PRECISIONS if choices.pop(f"as_{name}")]
    if len(precisions) > 1:
        raise click.UsageError(f"--{precisions[0]} and --{precisions[1]} contradict each other: give one of them")
    calibrates = not choices.pop("no_calibration", False)
    limits, engine = take(choices, LIMITS), take(choices, ENGINE)
    request = BuildRequest(
        source,
        precision=precisions[0] if precisions else None,
        phases="shared" if small else None,
        budget=Budget(**limits) if limits else None,
        engine=EngineRequest(**engine) if engine else None,
        recipe=find_recipe(recipe),
        decoder=open_decoder if calibrates else None,
        **choices,
    )
    if not calibrates and (option := request.calibration_option):
        raise UsageError(option, "is given beside --no-calibration", "leave one of them out")
    return request


def open_decoder(export: Path, device: str) -> Any:
    """The unquantized decoder of an export; imports torch."""
    from llmc.export.streaming import StreamedDecoder

    return StreamedDecoder(export, device)
