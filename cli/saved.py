"""Conversations on disk: what ``/save`` writes and ``/load`` reads."""

import json
import os
from pathlib import Path

from llmc.cli.reading import read_text
from llmc.errors import UsageError
from llmc.publish import replaced

Message = dict[str, str]

FORMAT, VERSION = "llmc-chat", 1  # what a saved conversation says that it is
ROLES = ("system", "user", "assistant", "tool")


def named_path(file: str, command: str) -> Path:
    """The file that a person named after a command, ``~`` being a home."""
    if not file:
        raise UsageError(f"{command} needs a file: {command} FILE")
    if "\0" in file:
        raise UsageError(f"{command}: a name with the character NUL is none of a file; name another")
    try:
        path = Path(file).expanduser()
    except RuntimeError as error:  # no such user
        raise UsageError(f"{command}: the home folder in {file} is not known; write the path in full") from error
    if not path.name:
        raise UsageError(f"{command}: {file} is a folder; name a file in it")
    return path


def target(path: Path) -> Path:
    """The file that a link leads to, so that it stays a link; any other path as it is."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def state_of(path: Path) -> Path:
    """The file with the keys and values of a conversation."""
    return path.with_name(f"{path.name}.kv")


def check_replaceable(path: Path, state: Path) -> None:
    """Refuse to overwrite what no ``/save`` wrote."""
    if os.path.lexists(path):
        try:
            read_messages(path)
        except UsageError as error:
            raise UsageError(f"{path} exists and is no saved conversation; choose another file") from error
    if os.path.lexists(state) and not _is_state(state):
        raise UsageError(f"{state} exists and was not saved by llmc; choose another file")


def _is_state(path: Path) -> bool:
    from llmc.runtime.kv.cache_file import MAGIC

    if os.path.islink(path) or not os.path.isfile(path):
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def remove_state(path: Path) -> None:
    """Delete the keys and values of another conversation, if there are some."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be replaced ({error.strerror}); choose another file") from error


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
    return item["role"] in ROLES and isinstance(item["content"], str) and _is_text(item["content"])


def _is_text(content: str) -> bool:
    """True for text without half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True


def write_messages(path: Path, model: str, messages: list[Message]) -> None:
    """Save a conversation: whole or not at all, readable by its owner only."""
    content = {"format": FORMAT, "version": VERSION, "model": model, "messages": messages}
    try:
        with replaced(path, f".{path.name}-") as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another file") from error
    except UnicodeEncodeError as error:
        raise UsageError(
            "the conversation has half of a surrogate pair, which UTF-8 cannot spell; leave it out"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} cannot be written ({error}); choose another file") from error
