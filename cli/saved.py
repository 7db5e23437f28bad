"""Conversations on disk: what ``/save`` writes and ``/load`` reads."""

import json
import os
import re
from pathlib import Path
from typing import Any

from llmc.errors import UsageError
from llmc.publish import replace_file
from llmc.strict import read_json

Message = dict[str, Any]

FORMAT, VERSION = "llmc-chat", 1  # what a saved conversation says that it is
ROLES = ("system", "user", "assistant", "tool")


def parse_path(file: str, command: str) -> Path:
    """The file that a person named after a command, ``~`` being a home."""
    if not file:
        raise UsageError(f"{command} needs a file: {command} FILE")
    return Path(os.path.expanduser(file))


def read_messages(path: Path) -> list[Message]:
    """The messages of a file that :func:`write_messages` wrote."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({error}); name a saved conversation") from error
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        expected = f'"format": "{FORMAT}", "version": {VERSION}'
        raise UsageError(f"{path} is no saved conversation ({expected}); name one that /save wrote")
    messages = content.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise UsageError(f"{path}: messages are not a list of a role ({', '.join(ROLES)}) and a content; mend the file")
    return messages


def _is_message(item: object) -> bool:
    return (
        isinstance(item, dict)
        and item.keys() == {"role", "content"}
        and item["role"] in ROLES
        and (_is_text(item["content"]) or (isinstance(item["content"], list) and all(map(_is_part, item["content"]))))
    )


def _is_part(item: object) -> bool:
    """True for a text, and for the path of an image."""
    kind = item.get("type") if isinstance(item, dict) else None
    return (
        isinstance(item, dict) and kind in ("text", "image") and item.keys() == {"type", kind} and _is_text(item[kind])
    )


def _is_text(item: object) -> bool:
    return isinstance(item, str) and not re.search("[\ud800-\udfff]", item)  # which UTF-8 cannot spell


def write_messages(path: Path, model: str, messages: list[Message]) -> None:
    """Save a conversation with ``model``, whole or not at all, readable by its owner only; a link stays a link.

    Raises:
        UsageError: it cannot be written, or something else than a saved conversation is there.
    """
    path = path.resolve() if path.is_symlink() else path
    if os.path.lexists(path):
        try:
            read_messages(path)
        except UsageError as error:
            raise UsageError(f"{path} exists and is no saved conversation; choose another file") from error
    content = {"format": FORMAT, "version": VERSION, "model": model, "messages": messages}
    try:
        with replace_file(path, f".{path.name}-") as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be written ({error}); choose another file") from error
