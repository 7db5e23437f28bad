"""Conversations on disk: what ``/save`` writes and ``/load`` reads."""

import json
import os
from pathlib import Path

from llmc.cli.reading import read_text
from llmc.errors import UsageError
from llmc.publish import replace_file

Message = dict[str, str]

FORMAT, VERSION = "llmc-chat", 1  # what a saved conversation says that it is
ROLES = ("system", "user", "assistant", "tool")


def parse_path(file: str, command: str) -> Path:
    """The file that a person named after a command, ``~`` being a home."""
    if not file:
        raise UsageError(f"{command} needs a file: {command} FILE")
    path = Path(os.path.expanduser(file))
    if "\0" in file or not path.name:
        raise UsageError(f"{command}: {file!r:.80} is the name of no file; name another")
    return path


def target(path: Path) -> Path:
    """The file that a link leads to, so that it stays a link; any other path as it is."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def check_replaceable(path: Path) -> None:
    if os.path.lexists(path):
        try:
            read_messages(path)
        except UsageError as error:
            raise UsageError(f"{path} exists and is no saved conversation; choose another file") from error


def read_messages(path: Path) -> list[Message]:
    """The messages of a file that :func:`write_messages` wrote."""
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); name a saved conversation") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON; name a saved conversation") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f'{path} is no saved conversation (no "format": "{FORMAT}"); name one that /save wrote')
    version = content.get("version")
    if type(version) is not int or version != VERSION:  # True and 1.0 are equal to 1
        raise UsageError(f"{path} has version {version!r:.80}, expected {VERSION}; save it with this llmc")
    messages = content.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise UsageError(f"{path}: messages are not a list of a role ({', '.join(ROLES)}) and a content; mend the file")
    return messages


def _is_message(item: object) -> bool:
    if not isinstance(item, dict) or item.keys() != {"role", "content"}:
        return False
    if item["role"] not in ROLES or not isinstance(item["content"], str):
        return False
    return not any("\ud800" <= character <= "\udfff" for character in item["content"])  # which UTF-8 cannot spell


def write_messages(path: Path, model: str, messages: list[Message]) -> None:
    """Save a conversation: whole or not at all, readable by its owner only.

    Args:
        model: name of the model that it was with, for people.
    """
    content = {"format": FORMAT, "version": VERSION, "model": model, "messages": messages}
    try:
        with replace_file(path, f".{path.name}-") as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be written ({error}); choose another file") from error
