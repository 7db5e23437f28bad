"""``llmc run``: bundle -> text."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.bundle import read_bundle
from llmc.cli import output as show
from llmc.cli.options import (
    ENGINE_NAMES,
    EngineOption,
    SectionCommand,
    bundle_argument,
    debug_option,
    emulate_option,
    engine_options,
    memory_option,
    take,
    threads_option,
)
from llmc.cli.reading import at_terminal, read_stdin, stdin_limit
from llmc.cli.sampling import SAMPLING_NAMES, sampling_options
from llmc.errors import UsageError

if TYPE_CHECKING:
    from llmc.runtime import GenerationResult, Handle, Output

LOADING = ("threads", "max_context", "memory", "self_test", "emulate")
max_context_option = click.option(
    "--max-context", type=int, cls=EngineOption, help="Longest sequence in tokens.  [default: the bundle's]"
)
self_test_option = click.option(
    "--self-test/--no-self-test",
    default=None,
    help="Replay the bundle's golden prompts first.  [default: the first time on this machine]",
)
stats_option = click.option("--stats", is_flag=True, help="Print counts, times and the seed on stderr at the end.")


@click.command("run", cls=SectionCommand)
@bundle_argument
@click.option("-p", "--prompt", help="Text to continue. Without it, stdin is read to its end.")
@click.option("--chat", is_flag=True, help="Answer the prompt through the model's chat template; on a terminal, talk.")
@click.option("--json", "as_json", is_flag=True, help="Print texts, tokens, counts, times and parameters as JSON.")
@stats_option
@threads_option
@memory_option
@self_test_option
@emulate_option
@debug_option
@sampling_options
@max_context_option
@engine_options
def run_command(bundle: Path, prompt: str | None, chat: bool, as_json: bool, stats: bool, **options: Any) -> None:
    """Stream the completion of a prompt from BUNDLE.

    From stdin, one newline at the end is not part of the prompt. Several outputs are printed one after another, each
    under a line that begins with "---".
    """
    from llmc.runtime import load

    sampling = take(options, SAMPLING_NAMES)
    talk = chat and prompt is None and at_terminal()
    if not as_json:
        refuse_unseen(sampling)
    if talk and as_json:
        raise UsageError("--json prints one answer, and --chat without a prompt talks; give a prompt with -p")
    text = "" if talk else read_prompt(prompt, bundle)
    with load(bundle, **loading(options)) as model:
        if talk:
            from llmc.cli.chat import converse

            converse(model, sampling, stats=stats)
            return
        messages = [{"role": "user", "content": text}]
        stream = model.stream_chat(messages, **sampling) if chat else model.stream(text, **sampling)
        write(stream, as_json, is_one(sampling))
        if stats:
            click.echo(describe(stream.result()), err=True)


def loading(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of :func:`llmc.runtime.load`; those of the engine only where they were given."""
    return {name: options[name] for name in LOADING if name in options} | take(options, ENGINE_NAMES)


def refuse_unseen(sampling: dict[str, Any]) -> None:
    """Refuse what only JSON shows.

    Raises:
        UsageError: log-probabilities were asked for.
    """
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling:
            raise UsageError(f"{name} is {sampling[name]}, which only llmc run with --json shows; add it, or leave it")


def is_one(sampling: dict[str, Any]) -> bool:
    """Whether one output is generated, so that its text can be printed as it comes."""
    return all(sampling.get(name, 1) <= 1 for name in ("n", "best_of", "num_return_sequences"))


def read_prompt(prompt: str | None, bundle: Path) -> str:
    """The prompt as given, or all of stdin.

    Raises:
        UsageError: nobody gave one, or what came is not UTF-8 or more than the bundle can take.
        BundleError: the bundle does not say how much that is.
    """
    if prompt is not None:
        return prompt
    if at_terminal():
        raise UsageError("no prompt: give one with -p, or pipe one to stdin")
    return read_stdin(stdin_limit(read_bundle(bundle).limits.max_context)).removesuffix("\n")


def write(stream: Handle, as_json: bool, one: bool) -> None:
    """Print the text of one output as it comes, several at the end, or everything as JSON."""
    with closing(stream):
        if as_json:
            show.print_json(stream.result())
        elif one:
            for text in stream:
                click.echo(text, nl=False)  # flushes
            click.echo()
        else:
            write_outputs(stream.result().outputs)


def write_outputs(outputs: tuple[Output, ...]) -> None:
    """One text, or each under a line that says which it is."""
    for place, output in enumerate(outputs, 1):
        if len(outputs) > 1:
            seed = "" if output.seed is None else f", seed {output.seed}"
            score = "" if output.score is None else f", score {output.score:.4f}"
            click.echo(f"--- {place} of {len(outputs)}: ended by {output.finish_reason}{seed}{score}")
        click.echo(output.text)


def describe(result: GenerationResult) -> str:
    """Counts, speeds, and why the request ended, in one line."""
    usage, timings, metrics = result.usage, result.timings, result.metrics
    cached = f" ({usage.cached_tokens} from the prefix cache)" if usage.cached_tokens else ""
    cut = f" ({usage.truncated_tokens} left out)" if usage.truncated_tokens else ""
    drafted = f"; {metrics.accepted} of {metrics.drafted} drafts accepted" if metrics.drafted else ""
    seed = "" if result.seed is None else f"; seed {result.seed}"
    return (
        f"prompt: {usage.prompt_tokens} tokens{cached}{cut}, first token after {timings.ttft_s:.3f} s "
        f"({timings.prefill_tokens_per_s:.1f} tok/s); completion: {usage.completion_tokens} tokens, "
        f"{timings.tpot_s * 1000:.2f} ms each ({timings.decode_tokens_per_s:.1f} tok/s){drafted}; "
        f"ended by {result.finish_reason}{seed}"
    )
