"""``llmc run``: bundle -> text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.bundle import read_bundle
from llmc.cli import output as show
from llmc.cli.chat import converse, load_chat_model, with_images
from llmc.cli.options import EXISTING_FILE, SectionCommand, bundle_argument, emulate_option, take
from llmc.cli.reading import at_terminal, read_stdin, stdin_limit
from llmc.cli.sampling import SAMPLING_NAMES, answering_options, collect_load_options, describe, is_one, refuse_unseen
from llmc.errors import UsageError

if TYPE_CHECKING:
    from llmc.runtime import Handle


@click.command("run", cls=SectionCommand)
@bundle_argument
@click.option("-p", "--prompt", help="Text to continue. Without it, stdin is read to its end.")
@click.option("--chat", is_flag=True, help="Answer the prompt through the model's chat template; on a terminal, talk.")
@click.option(
    "--image",
    "images",
    multiple=True,
    type=EXISTING_FILE,
    help="A PNG, JPEG or WebP before the prompt, which is answered through the chat template.",
)
@click.option("--audio", type=EXISTING_FILE, help="Write down what is said in a WAV, FLAC, Ogg or MP3.")
@click.option("--language", help="Of --audio: name or ISO 639 code. [default: the model recognizes it]")
@click.option("--adapter", help="Name of an adapter of BUNDLE that answers.")
@click.option("--json", "as_json", is_flag=True, help="Print texts, tokens, counts, times and parameters as JSON.")
@emulate_option
@answering_options
def run_command(
    bundle: Path,
    prompt: str | None,
    chat: bool,
    images: tuple[Path, ...],
    audio: Path | None,
    language: str | None,
    adapter: str | None,
    as_json: bool,
    stats: bool,
    **options: Any,
) -> None:
    """Stream the completion of a prompt from BUNDLE.

    From stdin, one newline at the end is not part of the prompt. Several outputs are printed one after another, each
    under a line that begins with "---". With --audio the prompt is names and words that may occur.
    """
    from llmc.runtime import Generator, load

    sampling = take(options, SAMPLING_NAMES)
    _check_audio(audio, language, chat=chat, images=images)
    chat = chat or bool(images)
    talk = chat and not images and prompt is None and at_terminal()
    if not as_json:
        refuse_unseen(sampling)
    if talk and (as_json or adapter):
        raise UsageError(
            "as_json" if as_json else "adapter",
            "is for one answer, and --chat without a prompt is a conversation",
            "give a prompt with -p",
        )
    loading = {"draft": "auto", **collect_load_options(options)}
    if talk:
        converse(bundle, loading, sampling, stats=stats)
        return
    text = read_prompt(prompt, bundle) if audio is None else ""
    with load_chat_model(loading, bundle) if chat or audio else load(bundle, kind=Generator, **loading) as model:
        messages = [{"role": "user", "content": with_images(text, images)}]
        ask: Callable[..., Handle] = partial(model.stream_chat, messages) if chat else partial(model.stream, text)
        if audio is not None:
            ask = partial(model.stream_transcript, audio, language=language, prompt=prompt)
        stream = ask(adapter=adapter, **sampling)
        write(stream, as_json, is_one(sampling))
        if stats:
            click.echo(describe(stream.result(), model.engine.max_context), err=True)


def _check_audio(audio: Path | None, language: str | None, **others: Any) -> None:
    if audio is None and language is not None:
        raise UsageError("language", "says how audio is spoken, but there is no audio", "give --audio, or leave it out")
    for name, given in others.items():
        if audio is not None and given:
            raise UsageError(name, "does not go with audio, which is written down", "leave one of them out")


def read_prompt(prompt: str | None, bundle: Path) -> str:
    if prompt is not None:
        return prompt
    if at_terminal():
        raise UsageError("prompt", "is missing", "give one with -p, or pipe one to stdin")
    return read_stdin(stdin_limit(read_bundle(bundle).limits.max_context)).removesuffix("\n")


def write(stream: Handle, as_json: bool, one: bool) -> None:
    """Print one output's text as it comes, several outputs at the end, or everything as JSON."""
    with closing(stream):
        if as_json:
            show.print_json(stream.result())
        elif one:
            for text in stream:
                click.echo(text, nl=False)  # flushes
            click.echo()
        else:
            outputs = stream.result().outputs
            for number, output in enumerate(outputs, 1):
                if len(outputs) > 1:
                    seed = "" if output.seed is None else f", seed {output.seed}"
                    score = "" if output.score is None else f", score {output.score:.4f}"
                    click.echo(f"--- {number} of {len(outputs)}: ended by {output.finish_reason}{seed}{score}")
                click.echo(output.text)
