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
        raise UsageError(command, "needs the name of a file", f"{command} FILE")
    return Path(os.path.expanduser(file))


def read_messages(path: Path) -> list[Message]:
    """The messages of a file that :func:`write_messages` wrote."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError("file", f"{path} cannot be read as JSON ({error})", "name a saved conversation") from error
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        expected = f'"format": "{FORMAT}", "version": {VERSION}'
        raise UsageError("file", f"{path} is no saved conversation ({expected})", "name one that /save wrote")
    messages = content.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise UsageError(
            "messages", f"is not a list of a role ({', '.join(ROLES)}) and a content", "mend the file", path=path
        )
    return messages


def _is_message(item: Any) -> bool:
    """True for a message of a text, or of parts, which are texts and paths of images."""
    if not isinstance(item, dict) or item.keys() != {"role", "content"} or item["role"] not in ROLES:
        return False
    content = item["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(
        isinstance(part, dict)
        and (kind := part.get("type")) in ("text", "image")
        and part.keys() == {"type", kind}
        and isinstance(part[kind], str)
        and not re.search("[\ud800-\udfff]", part[kind])  # which UTF-8 cannot spell
        for part in parts
    )


def write_messages(path: Path, model: str, messages: list[Message]) -> None:
    """Save a conversation with ``model``, whole or not at all, readable by its owner only; a link stays a link.
    Raises UsageError: it cannot be written, or something else than a saved conversation is there."""
    path = path.resolve() if path.is_symlink() else path
    if os.path.lexists(path):
        try:
            read_messages(path)
        except UsageError as error:
            raise UsageError("file", f"{path} exists and is no saved conversation", "choose another one") from error
    content = {"format": FORMAT, "version": VERSION, "model": model, "messages": messages}
    try:
        with replace_file(path, f".{path.name}-") as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    except (OSError, ValueError) as error:
        raise UsageError("file", f"{path} cannot be written ({error})", "choose another one") from error
