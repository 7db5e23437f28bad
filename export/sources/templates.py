"""Copy chat templates from the files where transformers keeps them to the two files that the runtime reads."""

import json
from pathlib import Path

from llmc.errors import CheckpointError
from llmc.export.keys import require_object
from llmc.origin import find_own_file
from llmc.strict import read_bytes

PLAIN, OF_PROCESSOR, NAMED = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
CONFIG_FILE = "tokenizer_config.json"
MOST_TEMPLATE = 1 << 22  # bytes; today's templates have 20,000
MOST_NAMED = 64


def place_templates(source: Path, staging: Path, by_processor: bool) -> None:
    """Move a processor's ``chat_template.json``, and the named templates of ``additional_chat_templates``, into the
    tokenizer's files that were copied to ``staging`` from the checkpoint ``source``. ``by_processor`` lets the
    processor's template replace the tokenizer's. Raises CheckpointError: a template cannot be read."""
    config = require_object(staging, CONFIG_FILE) if (staging / CONFIG_FILE).exists() else {}
    stated, plain = config.get("chat_template"), _read_text(source, PLAIN)
    if plain is None and (by_processor or not stated) and find_own_file(source, OF_PROCESSOR):
        plain = require_object(source, OF_PROCESSOR).get("chat_template")
        if not isinstance(plain, str) or any("\ud800" <= character <= "\udfff" for character in plain):
            raise CheckpointError(f"{source / OF_PROCESSOR}: chat_template is missing, or not text; remove the file")
        (staging / PLAIN).write_text(plain, encoding="utf-8")
    named = _read_named(source)
    if not named:
        return
    listed = stated if isinstance(stated, list) else [{"name": "default", "template": stated}] if stated else []
    templates = named if plain is None else {"default": plain, **named}
    kept = [each for each in listed if not isinstance(each, dict) or each.get("name") not in templates]
    listed = [*kept, *({"name": name, "template": text} for name, text in templates.items())]
    (staging / CONFIG_FILE).write_text(json.dumps({**config, "chat_template": listed}), encoding="utf-8")
    (staging / PLAIN).unlink(missing_ok=True)


def _read_named(source: Path) -> dict[str, str]:
    folder = source / NAMED
    names = sorted(path.name for path in folder.glob("*.jinja")) if folder.is_dir() else []
    if len(names) > MOST_NAMED:
        raise CheckpointError(f"{folder} holds {len(names)} templates, expected at most {MOST_NAMED}; remove some")
    return {name.removesuffix(".jinja"): _read_text(source, f"{NAMED}/{name}") or "" for name in names}


def _read_text(folder: Path, name: str) -> str | None:
    if not (path := find_own_file(folder, name)):
        return None
    try:
        return read_bytes(path, MOST_TEMPLATE).decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / name} cannot be read ({error}); download it again") from error
