"""``llmc run``: bundle -> text."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.cli.options import bundle_argument, debug_option, memory_option, threads_option
from llmc.errors import UsageError

if TYPE_CHECKING:
    from llmc.runtime import GenerationResult, Handle, Model


@click.command("run")
@bundle_argument
@click.option("-p", "--prompt", help="Text to continue. Without it, stdin is read to its end.")
@click.option("--chat", is_flag=True, help="Answer the prompt through the model's chat template; on a terminal, talk.")
@click.option("--max-tokens", type=int, help="New tokens at most.  [default: 256]")
@click.option("--temperature", type=float, help="0 always takes the most probable token.  [default: the checkpoint's]")
@click.option("--top-k", type=int, help="Sample from the k most probable tokens; 0 from all.")
@click.option("--top-p", type=float, help="Sample from the most probable tokens that hold this mass.")
@click.option("--min-p", type=float, help="Sample from tokens this probable, relative to the most probable one.")
@click.option("--seed", type=int, help="The same seed gives the same text.")
@click.option("--stop", multiple=True, help="End before this text; may be repeated.")
@click.option("--max-context", type=int, help="Longest sequence in tokens.  [default: the bundle's]")
@threads_option
@memory_option
@click.option(
    "--self-test/--no-self-test",
    default=None,
    help="Replay the bundle's golden prompts first.  [default: the first time on this machine]",
)
@click.option("--stats", is_flag=True, help="Print counts, times and the seed on stderr at the end.")
@debug_option
def run_command(
    bundle: Path,
    prompt: str | None,
    chat: bool,
    max_context: int | None,
    threads: int | None,
    memory: int | None,
    self_test: bool | None,
    stats: bool,
    **sampling: Any,
) -> None:
    """Stream the completion of a prompt from BUNDLE.

    From stdin, one newline at the end is not part of the prompt.
    """
    from llmc.runtime import load

    talk = chat and prompt is None and sys.stdin.isatty()
    text = "" if talk else read_prompt(prompt)
    sampling["stop"] = sampling["stop"] or None
    with load(bundle, threads=threads, max_context=max_context, self_test=self_test, memory=memory) as model:
        if talk:
            converse(model, sampling, stats)
        else:
            messages = [{"role": "user", "content": text}]
            stream = model.stream_chat(messages, **sampling) if chat else model.stream(text, **sampling)
            write(stream, stats)


def read_prompt(prompt: str | None) -> str:
    """The prompt as given, or all of stdin.

    Raises:
        UsageError: nobody gave one, or what came is not UTF-8.
    """
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        raise UsageError("no prompt: give one with -p, or pipe one to stdin")
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at position {error.start}"
        raise UsageError(
            f"the prompt on stdin is not valid UTF-8 ({found}); convert it, for example with iconv"
        ) from error


def write(stream: Handle, stats: bool) -> GenerationResult:
    """Print each piece of text as it comes, and the statistics after it."""
    with closing(stream):
        for text in stream:
            click.echo(text, nl=False)  # flushes
    click.echo()
    result = stream.result()
    if stats:
        click.echo(describe(result), err=True)
    return result


def describe(result: GenerationResult) -> str:
    """Counts, speeds, and why the request ended, in one line."""
    usage, timings = result.usage, result.timings
    seed = "" if result.seed is None else f"; seed {result.seed}"
    return (
        f"prompt: {usage.prompt_tokens} tokens, first token after {timings.ttft_s:.3f} s "
        f"({timings.prefill_tokens_per_s:.1f} tok/s); completion: {usage.completion_tokens} tokens, "
        f"{timings.tpot_s * 1000:.2f} ms each ({timings.decode_tokens_per_s:.1f} tok/s); "
        f"ended by {result.finish_reason}{seed}"
    )


def converse(model: Model, sampling: dict[str, Any], stats: bool) -> None:
    """Talk in turns until the end of input."""
    messages: list[dict[str, str]] = []
    while (line := ask()) is not None:
        messages.append({"role": "user", "content": line})
        answer = write(model.stream_chat(messages, **sampling), stats)
        messages.append({"role": "assistant", "content": answer.text})


def ask() -> str | None:
    """One line from the terminal; None at the end of input."""
    try:
        return input("> ")
    except EOFError:
        click.echo()
        return None
