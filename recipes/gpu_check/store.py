"""The JSON file: whole after every step, whatever happens next."""

import json
import os
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_check.process import Outcome

SCHEMA = 1


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
    """Write the file in one piece: a reader sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Read what :func:`write` wrote.

    Raises:
        ValueError: it is something else, or of another version of this script.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{path} was not written by this version of gpu_check.py; name another --out")
    return document
