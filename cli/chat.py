"""``llmc chat``: a conversation with a bundle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.cli.keys import Interrupts, interrupts
from llmc.cli.options import EXISTING_FILE, SectionCommand, bundle_argument, take
from llmc.cli.reading import at_terminal, stdin_limit, stdin_lines
from llmc.cli.sampling import (
    SAMPLING_NAMES,
    answering_options,
    change_parameter,
    collect_load_options,
    describe,
    is_one,
    refuse_several,
    refuse_unseen,
    status,
)
from llmc.cli.saved import Message, parse_path, read_messages, write_messages
from llmc.errors import CancelledError, LlmcError, RequestError, UsageError, format_name

if TYPE_CHECKING:
    from llmc.runtime import GenerationResult, Generator
    from llmc.runtime.api.chat import ChatHandle

COMMANDS = {  # name: (arguments, meaning)
    "/system": ("TEXT", "tell the model this before everything else; without TEXT, nothing"),
    "/image": ("FILE", "put a PNG, JPEG or WebP before the next question"),
    "/model": ("NAME", "go on with another model; without NAME, say which one answers"),
    "/save": ("FILE", "write the conversation"),
    "/load": ("FILE", "go on with a saved conversation"),
    "/clear": ("", "forget what was said, keep the system text"),
    "/set": ("NAME VALUE", "set a parameter, as /set temperature 0.5 or /temperature 0.5; without VALUE, its default"),
    "/stats": ("", "show counts and times of the last answer, and of all"),
    "/help": ("", "show this list"),
    "/exit": ("", "leave, as /quit and Ctrl-D do; the conversation is kept"),
}
LAST = "last-chat.json"  # the latest conversation
LEAVING = ("/exit", "/quit")


@click.command("chat", cls=SectionCommand)
@bundle_argument
@click.option("--system", help="What the model is told before everything else.")
@click.option("--load", "saved", type=EXISTING_FILE, help="Go on with a conversation that /save wrote.")
@answering_options
def chat_command(bundle: Path, system: str | None, saved: Path | None, stats: bool, **options: Any) -> None:
    """Talk with BUNDLE: a question, an answer, and so on. /help lists the commands.

    Enter sends, a paste stays whole, and a line that ends with a backslash goes on. What you type during an answer
    waits in the next prompt. Ctrl-C stops an answer; at the prompt, twice, it leaves. Lines on stdin are answered one
    by one. The last questions and the last conversation are kept in ~/.local/state/llmc.
    """
    sampling = take(options, SAMPLING_NAMES)
    refuse_unseen(sampling)
    loading = {"draft": "auto", **collect_load_options(options)}
    converse(bundle, loading, sampling, stats=stats, system=system, saved=saved)


def converse(
    bundle: Path,
    loading: dict[str, Any],
    sampling: dict[str, Any],
    *,
    stats: bool = False,
    system: str | None = None,
    saved: Path | None = None,
) -> None:
    """Load ``bundle`` with the options ``loading``, and talk until the end of input."""
    refuse_several(sampling)
    interactive, load_model = at_terminal(), partial(load_chat_model, loading)
    model = load_model(bundle)
    with (
        interrupts(interactive) as keys,
        closing(Conversation(model, load_model, sampling, stats, interactive, keys)) as talk,
    ):
        if saved is not None:
            talk.load(saved)
        if system is not None:
            talk.system(system)
        if interactive:
            from llmc.cli.prompt import questions

            click.echo("/help lists the commands; Ctrl-C stops an answer, /exit or Ctrl-D leaves", err=True)
        try:
            for line in questions(keys) if interactive else stdin_lines(stdin_limit(model.engine.max_context)):
                if not talk.take(line):
                    break
        finally:
            talk.keep()


def load_chat_model(loading: dict[str, Any], source: str | Path) -> Generator:
    """Load a model that can chat, with the options ``loading``."""
    from llmc.runtime import Generator, load

    model = load(source, kind=Generator, **loading)
    try:
        refuse_without_template(model)
    except BaseException:
        model.close()
        raise
    return model


def refuse_without_template(model: Generator) -> None:
    """Refuse a model without a chat template, which can only complete text."""
    try:
        _ = model.chat_template
    except RequestError as error:
        raise RequestError(error.problem, f"llmc run {model.folder} -p TEXT completes a prompt") from error


def with_images(text: str, images: Sequence[Path]) -> Any:
    """The content of a message: text, or a list of parts if there are images before it."""
    if not images:
        return text
    return [*({"type": "image", "image": str(image)} for image in images), {"type": "text", "text": text}]


# ----------------------------------------------------------------------------------------------------- conversation


class Conversation:
    """The messages so far; each line of input answers a question or changes them."""

    def __init__(
        self,
        model: Generator,
        load_model: Callable[[str | Path], Generator],
        sampling: dict[str, Any],
        stats: bool,
        interactive: bool,
        keys: Interrupts,
    ) -> None:
        """``load_model`` loads another model that can chat; the conversation closes each of its models."""
        self.messages: list[Message] = []
        self._images: list[Path] = []  # images for the next question
        self._model = model
        self._load_model = load_model
        self._sampling = sampling
        self._stats = stats
        self._interactive = interactive
        self._keys = keys
        self._last: GenerationResult | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self.system,
            "/image": self.image,
            "/model": self.model,
            "/save": lambda file: self.save(parse_path(file, "/save")),
            "/load": lambda file: self.load(parse_path(file, "/load")),
            "/clear": self.clear,
            "/set": self.set,
            "/stats": self.stats,
            "/help": self.help,
        }

    def take(self, line: str) -> bool:
        """Answer a line or obey its command; False to leave."""
        if line.strip() in LEAVING:
            return False
        is_command = line.startswith("/") and not line.startswith("//") and "\n" not in line
        try:
            if is_command:
                self.obey(line)
            elif line.strip():
                self.answer(line[1:] if line.startswith("//") else line)
        except LlmcError as error:
            # Wrong parameters would fail again on the next line of a pipe.
            if not self._interactive or (isinstance(error, UsageError) and not is_command):
                raise
            click.echo(f"error: {error}", err=True)
        return True

    def obey(self, line: str) -> None:
        """Run the command in a line that begins with a slash."""
        name, _, argument = line.strip().partition(" ")
        if name[1:].replace("-", "_") in SAMPLING_NAMES:
            name, argument = "/set", f"{name[1:]} {argument}"
        if name not in self._commands:
            raise UsageError(
                format_name(name), f"is no command, expected one of {', '.join(COMMANDS)}", "//... sends a slash"
            )
        self._commands[name](argument.strip())

    def answer(self, text: str) -> None:
        """Ask ``text`` and print the answer; if it is stopped, keep the part that came."""
        self.messages.append({"role": "user", "content": with_images(text, self._images)})
        self._images = []
        parts: list[str] = []
        try:
            handle = self._model.stream_chat(self.messages, **self._sampling)
            with closing(handle):
                self._print(handle, parts)
        except CancelledError:
            click.echo("(stopped)", err=True)
            if not parts:
                self.messages.pop()
                return
        except RequestError as error:
            full = self._full()
            self.messages.pop()
            if full is None:
                raise
            raise RequestError(full) from error
        except BaseException:
            self.messages.pop()
            raise
        else:
            self._last = handle.result()
            if self._stats:
                click.secho(status(self._last, self._model.engine.max_context), err=True, dim=self._interactive)
        self.messages.append({"role": "assistant", "content": "".join(parts)})

    def _full(self) -> str | None:
        """Advice if the conversation does not fit into the context; None if it fits."""
        with suppress(LlmcError):
            count = len(self._model.chat_tokens(self.messages, on_overflow="truncate_left"))
            new, room = self._sampling.get("max_tokens", 1), self._model.engine.max_context
            if count + new > room:
                requested = f" and --max-tokens asks for {new} more" if new > 1 else ""
                before = any(message["role"] == "assistant" for message in self.messages)
                keep = "/clear forgets what was said; to keep it, /save FILE and start again with --load FILE and"
                return (
                    f"the conversation has {count} tokens{requested}, the context holds {room}: "
                    f"{keep if before else 'say less at once, or start again with'} --on-overflow sink or "
                    "truncate_left, which leave old text out, or with a bundle that was built with a larger "
                    "--max-context if the model allows it"
                )
        return None

    def _print(self, handle: ChatHandle, parts: list[str]) -> None:
        with self._keys.cancel_on_interrupt(handle):
            try:
                for piece in self._pieces(handle) if is_one(self._sampling) else [handle.result().text]:
                    parts.append(piece)
                    click.echo(piece, nl=False)
            finally:
                click.echo()

    def _pieces(self, handle: ChatHandle) -> Iterator[str]:
        """The answer as it comes; on a terminal the reasoning comes first, dim."""
        thought = False
        for delta in handle.deltas():
            if delta.reasoning and self._interactive:
                thought = True
                click.secho(delta.reasoning, nl=False, err=True, dim=True)
            if delta.content:
                if thought:
                    click.echo("\n", err=True)
                    thought = False
                yield delta.content

    def system(self, text: str) -> None:
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def image(self, file: str) -> None:
        from llmc.runtime.vision.decode import open_image

        path = parse_path(file, "/image").resolve()
        _ = self._model.tower  # one that is not there is told of now, and so is a file that cannot be read
        size = open_image(path, str(path)).size
        self._images.append(path)
        click.echo(f"{size[0]} x {size[1]} pixels go with the next question", err=True)

    def model(self, name: str) -> None:
        """Go on with another model and the same conversation.

        The old model is closed first, since both together may exceed the memory; it is loaded again if the other one
        cannot be loaded, or cannot chat.
        """
        from llmc.sources import locate

        if name:
            source, before = os.path.expanduser(name), self._model.folder
            locate(source)  # a wrong name closes nothing
            self._model.close()
            try:
                with self._keys.raise_on_interrupt():
                    self._model = self._load_model(source)
            except BaseException as error:
                self._model = self._load_model(before)
                if self._interactive and isinstance(error, KeyboardInterrupt):
                    raise CancelledError("loading was stopped") from error
                raise
            self._last = None
        click.echo(f"{self._model.manifest.source.name} answers, from {self._model.folder}", err=True)

    def close(self) -> None:
        self._model.close()

    def save(self, path: Path) -> None:
        write_messages(path, self._model.manifest.source.name, self.messages)
        click.echo(f"{len(self.messages)} messages saved in {path}", err=True)

    def keep(self) -> None:
        """Keep a conversation that a person leaves, so that a key pressed too often loses nothing."""
        if self._interactive and any(message["role"] == "assistant" for message in self.messages):
            from llmc.cli.prompt import state_folder

            path = state_folder() / LAST
            with suppress(LlmcError):  # as where no home can be written
                write_messages(path, self._model.manifest.source.name, self.messages)
                click.echo(f"kept: llmc chat {self._model.folder} --load {path} goes on", err=True)

    def load(self, path: Path) -> None:
        """Go on with a saved conversation in place of this one."""
        self.messages = read_messages(path)
        click.echo(f"{len(self.messages)} messages loaded from {path}", err=True)

    def set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            self._sampling = change_parameter(self._sampling, name.replace("-", "_"), value.strip())
        shown = (f"{key} is {value}" for key, value in self._sampling.items())
        click.echo(", ".join(shown) or "all parameters have their defaults", err=True)

    def clear(self, _: str) -> None:
        """Forget what was said, but not the system text."""
        self._images = []
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self._last = None

    def stats(self, _: str) -> None:
        if self._last is None:
            click.echo("no answer yet", err=True)
            return
        click.echo(f"{describe(self._last, self._model.engine.max_context)}; {len(self.messages)} messages", err=True)
        counted = self._model.engine.metrics.snapshot()
        cached = f"{counted.prefix_hit_tokens} of {counted.prompt_tokens} tokens of prompts were cached"
        click.echo(f"all answers: {counted.output_tokens} tokens; {cached}", err=True)

    def help(self, _: str) -> None:
        rows = [(f"{name} {argument}", what) for name, (argument, what) in COMMANDS.items()]
        rows.append(("//...", "say a line that begins with a slash"))
        width = max(len(name) for name, _ in rows)
        click.echo("\n".join(f"{name:{width}}  {what}" for name, what in rows), err=True)
        click.echo("a line that ends with \\ goes on in the next one; Alt-Enter begins one, too", err=True)
