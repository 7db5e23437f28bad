"""The command line: which steps to run, one after the other, and the file that says how they ended."""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_check.process import DONE, NOT_RUN, TIMED_OUT, run
from gpu_check.report import markdown
from gpu_check.steps import GEOMETRIES, Options, Step, allowed, chosen, work

SCHEMA = 2


class RefusedError(Exception):
    """A file or folder cannot be used as what it is named for."""


def main(arguments: Sequence[str], description: str | None) -> int:
    """Run, or print, or prepare; 1 if a step failed, crashed or ran out of time, 2 if nothing could begin."""
    asked = parse(arguments, description)
    if asked.step:
        return work(asked.step[0], Path(asked.step[1]), Options(asked.work, asked.models))
    try:
        if asked.prepare:
            return prepare(asked.prepare, asked.wheel)
        if not asked.markdown:
            return check(asked)
        print(markdown(read(asked.out)))
        return 0
    except RefusedError as error:
        print(f"gpu_check.py: {error}", file=sys.stderr)
        return 2


def parse(arguments: Sequence[str], description: str | None) -> argparse.Namespace:
    """The arguments; a mistake exits with 2."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", help="patterns of steps to run, done or not; default: all that are not")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="the JSON file (gpu_check.json)")
    parser.add_argument("--work", type=Path, help="folder for what steps make, up to 25 GB; default: OUT.work")
    parser.add_argument("--models", type=Path, help="folder that --prepare wrote; default: made here, with torch")
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="leave out; may be repeated")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many, whatever runs then")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the limits of steps (1, for a server)")
    parser.add_argument("--commit", help="revision of this tree, where it has no git")
    parser.add_argument(
        "--prepare", type=Path, help="write what can be carried along into this folder, and run nothing"
    )
    parser.add_argument(
        "--wheel", nargs=2, metavar=("WHEEL", "CC"), help="with --prepare: onnxruntime-gpu's, made small"
    )
    parser.add_argument("--markdown", action="store_true", help="run nothing; print --out as a table")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)  # what our processes are told: name, file
    asked = parser.parse_args(arguments)
    if not asked.minutes >= 0:  # which NaN is not either
        parser.error("--minutes must be 0 or more")
    if not 0 < asked.patience < math.inf:
        parser.error("--patience must be above 0")
    if not chosen(asked.steps, asked.skip):
        called = f"called {' or '.join(asked.steps)}" if asked.steps else f"left without {' and '.join(asked.skip)}"
        parser.error(f"no step is {called}; gpu_check/steps.py lists them")
    asked.work = (asked.work or Path(f"{asked.out}.work")).resolve()
    asked.models = asked.models and asked.models.resolve()
    return asked


def check(asked: argparse.Namespace) -> int:
    """Run the steps that are wanted; 1 if one of them failed, crashed or ran out of time.

    What is known of a step is not given up because it could not be run again, for want of time or of a library.

    Raises:
        RefusedError: a file or folder cannot be used as what it is named for; before any step, but for a full disk.
    """
    out = Path(os.path.realpath(asked.out))
    document = read(out) if os.path.lexists(out) else {"schema": SCHEMA, "started": now(), "steps": {}}
    write(document, out)
    make_folder(asked.work)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    steps, commit, start = document["steps"], asked.commit or revision(), time.monotonic()
    wanted = ordered(asked, steps)
    for number, step in enumerate(wanted, 1):
        left = start + 60 * asked.minutes - time.monotonic()
        found, known = attempt(step, asked, left), steps.get(step.name)
        if known is None or found["state"] != NOT_RUN or (known["state"] == NOT_RUN and left > 0):
            steps[step.name] = {**found, "ended": now(), "commit": commit}
            write(document, out)
        end = f"{found['state']}: {found['message']}" if found["message"] else found["state"]
        print(f"[{number}/{len(wanted)}] {step.name}: {end}", file=sys.stderr)
    print(markdown(document))
    return int(any(steps[step.name]["state"] not in (DONE, NOT_RUN) for step in wanted))


def ordered(asked: argparse.Namespace, known: dict[str, Any]) -> list[Step]:
    """The steps that are named, or those that are not done: what went wrong comes last, for it may hang again."""
    steps = chosen(asked.steps, asked.skip)
    if asked.steps:
        return steps
    states = {step: known.get(step.name, {}).get("state", NOT_RUN) for step in steps}
    return sorted((step for step in steps if states[step] != DONE), key=lambda step: states[step] != NOT_RUN)


def attempt(step: Step, asked: argparse.Namespace, left: float) -> dict[str, Any]:
    """Run one step for as long as it may take and as seconds are left; a step that is cut off by that was not run."""
    if left <= 0:
        return {
            "state": NOT_RUN,
            "message": "no time was left",
            "exit": None,
            "seconds": 0.0,
            "output": "",
            "result": None,
        }
    models = ["--models", str(asked.models)] if asked.models else []
    script = [sys.executable, os.path.abspath(sys.argv[0]), "--work", str(asked.work), *models]
    limit = asked.patience * allowed(step, asked.work)
    found = run([*script, "--step", step.name], min(limit, left), asked.work / "cache")
    if found["state"] == TIMED_OUT and left < limit:
        found |= {"state": NOT_RUN, "message": f"the run's time was up: {found['message']}"}
    return found


def prepare(folder: Path, wheel: Sequence[str] | None) -> int:
    """Write what can be carried along: exports, what they should compute, and the wheel with code for one GPU.

    Raises:
        RefusedError: there is no place for it, or something cannot be made.
    """
    from gpu_check.models import prepare as write_export
    from gpu_check.slim import SlimError, slim
    from llmc.errors import LlmcError

    make_folder(folder)
    try:
        if wheel is not None:
            made = slim(Path(wheel[0]), folder, round(10 * float(wheel[1])))
            print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
        for geometry in GEOMETRIES:
            print(f"exporting {geometry}", file=sys.stderr)
            write_export(geometry, folder)
    except (SlimError, LlmcError, ValueError) as error:
        raise RefusedError(str(error)) from error
    return 0


def revision() -> str | None:
    """The commit of the tree that this script lies in, with a plus sign where files of it were changed."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    folder = Path(__file__).parent
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def read(path: Path) -> dict[str, Any]:
    """Read what :func:`write` wrote; anything else is refused, with a :class:`RefusedError`."""
    if not os.path.isfile(path):  # a pipe would never end
        raise RefusedError(f"--out {path}: no file; name one that a run has written, or a new one to run steps")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError(f"--out {path}: not a file that a run has written ({error})") from error
    steps = document.get("steps") if isinstance(document, dict) and document.get("schema") == SCHEMA else None
    if not isinstance(steps, dict) or not all(isinstance(step, dict) and "state" in step for step in steps.values()):
        raise RefusedError(f"--out {path}: not written by this version of gpu_check.py; name another file")
    return dict(document)


def write(document: dict[str, Any], path: Path) -> None:
    """Write the file in one piece: a reader sees the old or the new one, which is left where writing is refused."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise RefusedError(f"--out {path}: cannot be written ({error.strerror}); name another file") from error
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(f"{path}: a folder is needed and cannot be made ({error.strerror})") from error
