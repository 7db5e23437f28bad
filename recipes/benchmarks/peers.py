"""Run llmc and its peers on the same checkpoint in one run, interleaved, and print how they compare.

    python peers.py systems.toml                      # one request: prefill and decode, sizes, memory
    python peers.py systems.toml --together 1 4 8 16  # requests at once: new tokens of all per second
    python peers.py systems.toml --first              # seconds to the first token, files out of the page cache

Every round runs each system once, in a process and an interpreter of its own. What to run is said by a TOML file (see
systems.example.toml); paths in it are relative to it. A system without interpreter or model is not run, and the table
says so. All use as many threads as this process may use CPUs (``taskset`` limits them).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

from machine import QUIET_CPUS, Disturbance, positive, publish, ratio, table
from runners import RUNNERS, lengths

from llmc.errors import BundleError
from llmc.runtime.host.machine import usable_threads
from llmc.strict import decode

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}
NOT_RUN = "not run"
Figures = dict[str, float]  # by column of the table


@dataclass(frozen=True)
class Entry:
    """One system of the TOML file; ``group`` names the table it appears in (compare like with like)."""

    name: str
    group: str
    runner: str
    model: str


@dataclass
class Row:
    """A system with all its rounds; ``trouble`` says why there are none, or fewer than asked for."""

    entry: Entry
    trouble: str
    rounds: list[Figures] = field(default_factory=list)

    def cells(self, reference: "Row", columns: Sequence[str]) -> Iterator[str]:
        """Medians over rounds, and in brackets the reference's figure over that of the same round."""
        for column in columns:
            own = [figures[column] for figures in self.rounds]
            if not own:
                yield self.trouble or NOT_RUN
                continue
            median = f"{statistics.median(own):.4g}"
            theirs = [figures[column] for figures in reference.rounds]
            yield median if reference is self or not theirs else f"{median} ({ratio(theirs, own)})"


def read_systems(path: Path) -> tuple[dict[str, Path], tuple[Entry, ...]]:
    """Read the TOML file: the interpreter of each runner, llmc's by default the present one; the systems."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        pythons = decode(dict[str, str], document.pop("python", {}), "python")
        entries = decode(dict[str, tuple[Entry, ...]], document).get("system", ())
    except BundleError as error:
        raise ValueError(f"{path}: {error}; see systems.example.toml") from error
    unknown = (pythons.keys() | {entry.runner for entry in entries}) - RUNNERS.keys()
    if unknown or not entries:
        problem = f"unknown runners {sorted(unknown)}, expected {', '.join(RUNNERS)}" if unknown else "no [[system]]"
        raise ValueError(f"{path}: {problem}; see systems.example.toml")
    return {"llmc": Path(sys.executable), **{name: path.parent / python for name, python in pythons.items()}}, entries


def find_missing(python: Path | None, model: Path) -> str:
    if python is None:
        return f"{NOT_RUN}: its runner has no interpreter"
    absent = [str(path) for path in (python, model) if not path.exists()]
    return f"{NOT_RUN}: {', '.join(absent)} not found" if absent else ""


def run_script(
    python: str | Path,
    script: str,
    *arguments: object,
    timeout_s: float | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run one of these scripts in another interpreter, and return the last line it prints; a library may print, too."""
    command = [str(python), str(HERE / script), *map(str, arguments)]
    environment = os.environ | ENVIRONMENT | dict(environment)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=True)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{script} failed: no result after {timeout_s:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"{script} failed with exit code {error.returncode}: {last}") from error
    return (done.stdout.splitlines() or [""])[-1]


def run_round(args: argparse.Namespace, python: Path, entry: Entry) -> Figures:
    model = args.systems.parent / entry.model
    work = ["--threads", usable_threads(), "--prompts", *args.prompts, "--new-tokens", args.new_tokens]
    for name in ("warm_up", "together"):
        if value := getattr(args, name):
            work += [f"--{name.replace('_', '-')}", *(value if isinstance(value, list) else [value])]
    if not args.first:
        return dict(json.loads(run_script(python, "runners.py", entry.runner, model, *work, timeout_s=args.timeout)))
    drop(model)
    found: Figures = {}
    with tempfile.TemporaryDirectory() as cache:  # llmc's own, which is empty at the first load on a machine
        for state in ("cold", "again"):
            command = (python, "runners.py", entry.runner, model, *work, "--first")
            line = run_script(*command, timeout_s=args.timeout, environment={"LLMC_CACHE": cache})
            found |= {f"{state}, {name}": figure for name, figure in json.loads(line).items()}
    return found


def drop(model: Path) -> None:
    """Take a model's files out of the page cache, as far as no process has them mapped."""
    for path in [model] if model.is_file() else [path for path in model.rglob("*") if path.is_file()]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # what is not written yet would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run_all(args: argparse.Namespace, pythons: dict[str, Path], entries: Sequence[Entry]) -> list[Row]:
    """Run all systems in turn, several times; one that fails is not tried again."""
    folder = args.systems.parent
    rows = [Row(entry, find_missing(pythons.get(entry.runner), folder / entry.model)) for entry in entries]
    for number in range(1, args.rounds + 1):
        for row in (row for row in rows if not row.trouble):
            disturbance = Disturbance()
            try:
                row.rounds.append(run_round(args, pythons[row.entry.runner], row.entry))
            except RuntimeError as error:
                row.trouble = str(error)
            busy = disturbance.cpus()
            noise = f" (disturbed: {busy} CPUs busy with something else)" if busy > QUIET_CPUS else ""
            said = row.trouble or ", ".join(f"{name} {figure:g}" for name, figure in row.rounds[-1].items())
            print(f"round {number}/{args.rounds}: {row.entry.name}: {said}{noise}", file=sys.stderr)
    return rows


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """One Markdown table per group; ratios are those of the group's first llmc system."""
    for group in dict.fromkeys(row.entry.group for row in rows):
        own = [row for row in rows if row.entry.group == group]
        reference = next((row for row in own if row.entry.runner == "llmc" and row.rounds), own[0])
        columns = list(next((row.rounds[0] for row in own if row.rounds), {"figures": 0.0}))
        yield table((group, *columns), *((row.entry.name, *row.cells(reference, columns)) for row in own))


def main() -> int:
    """Measure, write the JSON file and print the tables; 1 if a system failed, or none could run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", type=Path, help="TOML file that lists the systems")
    lengths(parser)
    parser.add_argument("--first", action="store_true", help="the time until the first token, opening included")
    parser.add_argument("--rounds", type=positive, default=3, help="times that each system runs")
    parser.add_argument("--group", action="append", help="run only this group; may be repeated")
    parser.add_argument("--timeout", type=float, default=1800, help="limit of one process, in seconds")
    parser.add_argument("--json", type=Path, default=Path("peers.json"), help="where every round goes")
    args = parser.parse_args()
    try:
        pythons, entries = read_systems(args.systems)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    chosen = [entry for entry in entries if not args.group or entry.group in args.group]
    disturbance = Disturbance()
    rows = run_all(args, pythons, chosen)
    publish(args.json, disturbance.cpus(), list(tables(rows)), rows=[asdict(row) for row in rows])
    for row in rows:
        if row.trouble:
            print(f"{row.entry.name}: {row.trouble}")
    failed = any(row.trouble and not row.trouble.startswith(NOT_RUN) for row in rows)
    return int(failed or not any(row.rounds for row in rows))


if __name__ == "__main__":
    sys.exit(main())
