"""The command line: which steps to run, one after the other, and the file that says how they ended."""

import argparse
import math
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpu_check import goals, store
from gpu_check.plan import GEOMETRIES, LIMIT_S, PRECISIONS, TARGETS, Options, Step, steps
from gpu_check.process import DONE, FAILED, NOT_RUN, Outcome, run
from gpu_check.work import work

ROUNDS, QUICK_ROUNDS = 5, 2
OUT = f"the JSON file (gpu_check.json); an older one becomes NAME{store.OLD}, but with --resume"
EMULATE = "run graphs of GPU bundles on the CPU, to check this script: slow, and its table has no figures"


def main(arguments: Sequence[str], description: str | None) -> int:
    """Run, or print, or prepare; 1 if a step failed, crashed or ran out of time, 2 if nothing could begin."""
    if arguments[:1] == ["--worker"]:
        return work(*arguments[1:])
    asked = parse(arguments, description)
    try:
        if asked.prepare is not None:
            return prepare(store.folder(asked.prepare, "--prepare"), asked.geometries)
        if asked.markdown:
            print(goals.markdown(store.read(asked.out)))
            return 0
        return check(asked, shlex.join(["gpu_check.py", *arguments]))
    except store.RefusedError as error:
        print(f"gpu_check.py: {error}", file=sys.stderr)
        return 2


def check(asked: argparse.Namespace, command: str) -> int:
    """Run the steps; 1 if one of them failed, crashed or ran out of time.

    Raises:
        RefusedError: a file or folder cannot be used as what it is named for; before any step, but for a full disk.
    """
    out = store.writable(asked.out)
    resumed = store.read(out) if asked.resume else None
    if resumed is not None and resumed["arguments"].get("emulate") != asked.emulate:
        raise store.RefusedError(f"--out {out}: steps on a GPU and steps with --emulate do not go into one file")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with ExitStack() as stack:
        work_folder = asked.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu_check-")))
        options = chosen(asked, store.folder(work_folder, "--work"))
        if resumed is None:
            store.keep_old(out)
        document = resumed or store.fresh(command, shown(options))
        document["complete"] = False
        run_all(steps(options), document, Run(out, asked.minutes, asked.commit, asked.keep))
    print("\n".join(goals.report(document)))
    return int(any(step["state"] not in (DONE, NOT_RUN) for step in document["steps"]))


def parse(arguments: Sequence[str], description: str | None) -> argparse.Namespace:
    """The arguments; a mistake exits with 2."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help=OUT)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS[:3]))
    parser.add_argument("--geometries", nargs="+", choices=GEOMETRIES, help="default: all; --quick: without 1b")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--quick", action="store_true", help="fewer models and rounds, no buckets and forms")
    parser.add_argument("--rounds", type=int, help=f"timed runs of each kind ({ROUNDS}, --quick: {QUICK_ROUNDS})")
    parser.add_argument("--minutes", type=float, help="begin no step after so many; what is left is not run")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds for one step ({LIMIT_S:.0f})")
    parser.add_argument("--resume", action="store_true", help="keep the steps of --out that are done, run the others")
    parser.add_argument("--exports", type=Path, help="folder that --prepare wrote; default: made here, with torch")
    parser.add_argument("--prepare", type=Path, help="write exports that can be carried along here, and nothing else")
    parser.add_argument("--work", type=Path, help="folder for exports and bundles; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="remove no bundle of --work when it is measured")
    parser.add_argument("--emulate", action="store_true", help=EMULATE)
    parser.add_argument("--commit", help="revision of this tree, where it has no git")
    parser.add_argument("--markdown", action="store_true", help="run nothing; print --out as the README's table")
    asked = parser.parse_args(arguments)
    if asked.keep and asked.work is None:
        parser.error("--keep needs --work: a temporary folder is removed in any case")
    if asked.rounds is None:
        asked.rounds = QUICK_ROUNDS if asked.quick else ROUNDS
    if asked.rounds < 1 or not 0 < asked.limit < math.inf:
        parser.error("--rounds must be at least 1, --limit seconds above 0")
    if asked.minutes is not None and not 0 <= asked.minutes < math.inf:  # which NaN is not either
        parser.error("--minutes must be 0 or more; leave it out for no limit")
    if asked.geometries is None:
        asked.geometries = list(GEOMETRIES[:2] if asked.quick else GEOMETRIES)
    return asked


def chosen(asked: argparse.Namespace, folder: Path) -> Options:
    """The options of a run."""
    return Options(
        targets=tuple(dict.fromkeys(asked.targets)),
        geometries=tuple(dict.fromkeys(asked.geometries)),
        precisions=tuple(dict.fromkeys(asked.precisions)),
        exports=asked.exports and asked.exports.resolve(),
        work=folder,
        rounds=asked.rounds,
        emulate=asked.emulate,
        probes=not asked.quick,
        limit_s=asked.limit,
    )


def shown(options: Options) -> dict[str, Any]:
    """The options for the document, without folders of this machine."""
    return {name: value for name, value in asdict(options).items() if name not in ("exports", "work")}


def prepare(folder: Path, geometries: Sequence[str]) -> int:
    """Write the exports into ``folder``."""
    from gpu_check.models import prepare as write_export

    for geometry in geometries:
        print(f"exporting {geometry}", file=sys.stderr)
        write_export(geometry, folder)
    return 0


@dataclass(frozen=True)
class Run:
    """Where results go, and when to stop; ``commit`` replaces what git would say."""

    out: Path
    minutes: float | None
    commit: str | None
    keep: bool


def run_all(planned: Sequence[Step], document: dict[str, Any], how: Run) -> None:
    """Run the steps in turn and write the document after each of them."""
    until = float("inf") if how.minutes is None else time.monotonic() + 60 * how.minutes
    left = [step for step in planned if not reusable(step, planned, document)]
    for number, step in enumerate(left, 1):
        outcome = attempt(step, document, until - time.monotonic())
        if step.kind == "machine" and how.commit and outcome.result:
            outcome.result["commit"] = how.commit
        store.put(document, store.record(step.name, outcome))
        if number == len(left):
            document |= {"complete": True, "ended": store.now()}
        goals.summarize(document)
        store.write(document, how.out)
        end = f"{outcome.state}: {outcome.message}" if outcome.message else outcome.state
        print(f"[{number}/{len(left)}] {step.name}: {end}", file=sys.stderr)
        if not how.keep:
            discard(planned, left[number:])


def reusable(step: Step, planned: Sequence[Step], document: dict[str, Any]) -> bool:
    """Whether an earlier run did the step, and what it made is still there if a step that is not done needs it."""
    if not _is_done(step, document):
        return False
    wanted = any(
        step.name in (*other.needs, *other.uses) and not reusable(other, planned, document) for other in planned
    )
    return step.makes is None or step.makes.exists() or not wanted


def _is_done(step: Step, document: dict[str, Any]) -> bool:
    found = store.find(document, step.name)
    return found is not None and found["state"] == DONE


def attempt(step: Step, document: dict[str, Any], seconds: float) -> Outcome:
    """Run one step, if what it needs is there and ``seconds`` are left."""
    missing = [name for name in step.needs if (store.find(document, name) or {}).get("state") != DONE]
    if missing:
        return Outcome(NOT_RUN, f"{missing[0]} is not done")
    if seconds <= 0:
        return Outcome(NOT_RUN, "no time was left")
    outcome = run(step.command, min(step.limit_s, seconds))
    try:
        return replace(outcome, result=outcome.result and step.digest(outcome.result))
    except (KeyError, TypeError) as error:
        return replace(outcome, state=FAILED, message=f"its result lacks {error}")


def discard(planned: Sequence[Step], left: Sequence[Step]) -> None:
    """Remove folders that steps made and that no step which is left needs: bundles take gigabytes."""
    needed = {name for step in left for name in (step.name, *step.needs, *step.uses)}
    for step in planned:
        if step.makes is None or step.name in needed:
            continue
        if step.makes.is_dir():
            shutil.rmtree(step.makes)
        else:
            step.makes.unlink(missing_ok=True)
