"""Save conversations to disk with ``/save``, and load them with ``/load``."""

import json
import os
import re
from pathlib import Path
from typing import Any

from llmc.errors import UsageError
from llmc.publish import replace_file
from llmc.strict import read_json

Message = dict[str, Any]

FORMAT, VERSION = "llmc-chat", 1  # written into a saved conversation
ROLES = ("system", "user", "assistant", "tool")


def parse_path(file: str, command: str) -> Path:
    """The file named after a command; ``~`` is expanded."""
    if not file:
        raise UsageError(command, "needs the name of a file", f"{command} FILE")
    return Path(os.path.expanduser(file))


def read_messages(path: Path) -> list[Message]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError("file", f"{path} cannot be read as JSON ({error})", "name a saved conversation") from error
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        expected = f'"format": "{FORMAT}", "version": {VERSION}'
        raise UsageError("file", f"{path} is not a saved conversation ({expected})", "name one that /save wrote")
    messages = content.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise UsageError(
            "messages", f"is not a list of a role ({', '.join(ROLES)}) and a content", "mend the file", path=path
        )
    return messages


def _is_message(item: Any) -> bool:
    """True for a message with a text, or with parts that are texts and paths of images."""
    if not isinstance(item, dict) or item.keys() != {"role", "content"} or item["role"] not in ROLES:
        return False
    content = item["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(
        isinstance(part, dict)
        and (kind := part.get("type")) in ("text", "image")
        and part.keys() == {"type", kind}
        and isinstance(part[kind], str)
        and not re.search("[\ud800-\udfff]", part[kind])  # surrogates have no UTF-8 encoding
        for part in parts
    )


def write_messages(path: Path, model: str, messages: list[Message]) -> None:
    """Save a conversation with ``model`` atomically, readable only by its owner; a link stays a link.
    Raises UsageError: it cannot be written, or would replace another kind of file."""
    path = path.resolve() if path.is_symlink() else path
    if os.path.lexists(path):
        try:
            read_messages(path)
        except UsageError as error:
            raise UsageError("file", f"{path} exists and is not a saved conversation", "choose another one") from error
    content = {"format": FORMAT, "version": VERSION, "model": model, "messages": messages}
    try:
        with replace_file(path, f".{path.name}-") as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    except (OSError, ValueError) as error:
        raise UsageError("file", f"{path} cannot be written ({error})", "choose another one") from error
