"""The JSON file: whole after every step, whatever happens next."""

import json
import os
import tempfile
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_check.process import Outcome

SCHEMA = 1
# Of an older result, which a new run moves out of its way.
OLD = ".bak"


class RefusedError(Exception):
    """A file or folder cannot be used as what it is named for."""


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def fresh(command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A document without steps.

    Its ``steps`` are in the order in which they ended; ``rows``, ``goals`` and ``facts`` follow from them; ``complete``
    tells that no step is left.
    """
    return {
        "schema": SCHEMA,
        "command": command,
        "arguments": arguments,
        "started": now(),
        "ended": None,
        "complete": False,
        "steps": [],
        "rows": [],
        "goals": [],
        "facts": {},
    }


def record(name: str, outcome: Outcome) -> dict[str, Any]:
    """A step as it is written: its name, its outcome, and when it ended."""
    return {"name": name, "ended": now(), **asdict(outcome)}


def put(document: dict[str, Any], entry: dict[str, Any]) -> None:
    """Add a step, in the place of an older one of the same name."""
    document["steps"] = [*(step for step in document["steps"] if step["name"] != entry["name"]), entry]


def find(document: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The step called ``name``."""
    return next((step for step in document["steps"] if step["name"] == name), None)


def result(document: dict[str, Any], name: str, state: str | None = "done") -> dict[str, Any] | None:
    """The result of the step called ``name``, if it ended in ``state`` (None: in any) and has one."""
    step = find(document, name)
    found: dict[str, Any] | None = step["result"] if step and state in (None, step["state"]) else None
    return found


def write(document: dict[str, Any], path: Path) -> None:
    """Write the file in one piece: a reader sees the old or the new one.

    Raises:
        RefusedError: it cannot be written any more, as on a full disk; the old one is left.
    """
    temporary = _beside(path)
    try:
        temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise RefusedError(f"--out {path}: could not be written ({error.strerror})") from error
    finally:
        temporary.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def read(path: Path) -> dict[str, Any]:
    """Read what :func:`write` wrote.

    Raises:
        RefusedError: it is not there, is something else, or of another version of this script.
    """
    if not os.path.isfile(path):  # a pipe would never end
        raise RefusedError(f"--out {path}: there is no such file; name the one that a run has written")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError(f"--out {path}: not a file that a run has written ({error})") from error
    if not _is_document(document):
        raise RefusedError(f"--out {path}: not written by this version of gpu_check.py; name another file")
    found: dict[str, Any] = document
    return found


def _is_document(document: Any) -> bool:
    """Whether it has the parts that :func:`fresh` makes, and steps as :func:`record` makes them."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return False
    kinds = {name: type(value) for name, value in fresh("", {}).items() if value is not None}
    return all(type(document.get(name)) is kind for name, kind in kinds.items()) and all(
        isinstance(step, dict) and step.keys() == {"name", "ended", *asdict(Outcome(""))} for step in document["steps"]
    )


def writable(path: Path) -> Path:
    """The file that ``path`` leads to, which is one or can become one.

    Raises:
        RefusedError: it is a folder or a device, or its folder is missing or cannot be written to.
    """
    path = Path(os.path.realpath(path))
    if os.path.lexists(path) and not os.path.isfile(path):
        raise RefusedError(f"--out {path}: a folder or a device, expected a file or a new name")
    temporary = _beside(path)
    try:
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise RefusedError(f"--out {path}: cannot be written ({error.strerror}); name another file") from error
    return path


def keep_old(path: Path) -> None:
    """Move a file that is there to the same name with :data:`OLD`, in the place of one that was moved before.

    Raises:
        RefusedError: that name is taken by a folder.
    """
    try:
        if path.exists():
            path.replace(f"{path}{OLD}")
    except OSError as error:
        raise RefusedError(f"--out {path}: cannot be kept as {path.name}{OLD} ({error.strerror})") from error


def folder(path: Path, option: str) -> Path:
    """The folder ``path``, made if it is not there.

    Raises:
        RefusedError: it cannot be made, or nothing can be written into it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path.resolve()
    except OSError as error:
        raise RefusedError(
            f"{option} {path}: not a folder that can be written to ({error.strerror}); name another one"
        ) from error
