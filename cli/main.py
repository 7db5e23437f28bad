"""The command ``llmc``: finds the verb, and turns every error into one sentence and an exit code."""

import importlib
import io
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import click

from llmc import __version__
from llmc.cli.options import debug_option
from llmc.errors import LlmcError, printable

VERBS = {
    "export": "llmc.cli.export:export_command",
    "plan": "llmc.cli.plan:plan_command",
    "build": "llmc.cli.build:build_command",
    "adapter": "llmc.cli.adapter:adapter_command",
    "run": "llmc.cli.run:run_command",
    "chat": "llmc.cli.chat:chat_command",
    "embed": "llmc.cli.embed:embed_command",
    "rank": "llmc.cli.embed:rank_command",
    "serve": "llmc.cli.serve:serve_command",
    "bench": "llmc.cli.bench:bench_command",
    "eval": "llmc.cli.eval:eval_command",
    "inspect": "llmc.cli.inspect:inspect_command",
    "list": "llmc.cli.shelf:list_command",
    "rm": "llmc.cli.shelf:rm_command",
    "verify": "llmc.cli.verify:verify_command",
    "doctor": "llmc.cli.doctor:doctor_command",
}
INTERRUPTED = 130  # the exit code that shells report for SIGINT


class Verbs(click.Group):
    """Imports a verb's module on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order of a workflow."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name].partition(":")
        return cast(click.Command, getattr(importlib.import_module(module), name))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; rename the parameter in an error to the command line's name."""
        try:
            return super().invoke(ctx)
        except LlmcError as error:
            verb = self.get_command(ctx, ctx.invoked_subcommand or "")
            if verb and error.path is None:  # otherwise it is a key of that file
                error.parameter = _list_names(verb).get(error.parameter, error.parameter)
            raise


def _list_names(command: click.Command) -> dict[str, str]:
    """The command line's names of parameters, such as ``--top-p`` or ``BUNDLE``, by the library's names."""
    parts = command.commands.values() if isinstance(command, click.Group) else ()
    names = {name: shown for part in parts for name, shown in _list_names(part).items()}
    for parameter in command.params:
        name = parameter.name or ""
        names[name] = max(parameter.opts, key=len) if isinstance(parameter, click.Option) else name.upper()
    return names


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
)
@click.version_option(__version__, prog_name="llmc", message="%(prog)s %(version)s")
@debug_option
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Turn a Hugging Face checkpoint into a verified bundle, and run it."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 for success, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # print escapes on a terminal without the characters
    if sys.stdout is None:  # the result would be lost, and the next opened file would get its descriptor
        click.echo("llmc: error: stdout is closed; send unwanted output to /dev/null", err=True)
        sys.exit(1)
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = cli.main(arguments, "llmc", standalone_mode=False, obj=shlex.join(["llmc", *arguments]))
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001  the last place to turn an error into a sentence
        if "--debug" in arguments:
            traceback.print_exc()
        message, code = explain(error)
        line = printable(" ".join(message.split()))  # one line, whatever the message contains
        click.echo(f"llmc: error: {line}", err=True)
    sys.exit(code or 0)


# Other programs' short flags for these parameters, with the same kind of value.
SHORT = {"-c": "max_context", "-n": "max_tokens", "-t": "threads", "-np": "max_batch", "-md": "draft", "-s": "seed"}
MODEL = ("-m", "--model", "--model-path", "--hf-repo", "-hf", "--from-pretrained")


def other_name(flag: str, ctx: click.Context) -> str | None:
    """Advice on another program's flag with the same meaning; None if this command has no such option."""
    from llmc.runtime.sampling.neighbours import neighbour

    known = {option.name: option.opts[0] for option in ctx.command.params if isinstance(option, click.Option)}
    name = SHORT.get(flag) or neighbour(flag.lstrip("-").replace("-", "_"), [name for name in known if name])
    arguments = [each.make_metavar(ctx) for each in ctx.command.params if isinstance(each, click.Argument)]
    if flag in MODEL and arguments:
        return f"there is no {flag}: the model is an argument without a flag, as {ctx.command_path} {arguments[0]}"
    return f"there is no {flag}, did you mean {known[name]}? See {ctx.command_path} --help" if name in known else None


def explain(error: Exception) -> tuple[str, int]:
    """One sentence for the user, and the exit code."""
    if isinstance(error, LlmcError):
        return str(error), error.exit_code
    if isinstance(error, click.NoSuchOption) and error.ctx and (advice := other_name(error.option_name, error.ctx)):
        return advice, error.exit_code
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "llmc"
        return f"{error.format_message().rstrip('.')}; see {command} --help", error.exit_code
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, OSError):
        return str(error), 1
    if isinstance(error, MemoryError):
        return "out of memory; free some, or use a smaller model or context", 1
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line} (a bug of llmc: please report it with the output of --debug)", 1
