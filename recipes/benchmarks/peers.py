"""Run llmc and its peers on the same checkpoint in one run, interleaved, and print how they compare.

Every round runs each system once, in a process and an interpreter of its own; the best round counts. What to run is
said by a TOML file (see systems.example.toml); paths in it are relative to it. A system without interpreter or model is
not run, and the table says so. All use as many threads as this process may use CPUs (``taskset`` limits them).
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import Disturbance, this_machine, usable_cpus
from report import Results, Round, Row, table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
RUNNERS = {
    "llmc": "llmc_runner.py",
    "llamacpp": "llamacpp_runner.py",
    "openvino": "openvino_runner.py",
    "genai": "genai_runner.py",
}
ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Entry:
    """One system of the TOML file; ``group`` names the table it appears in (compare like with like)."""

    name: str
    group: str
    runner: str
    model: Path
    python: Path | None

    def missing(self) -> str:
        """The reason why the system cannot run, or nothing."""
        if self.python is None:
            return f"not run: no interpreter for {self.runner}"
        absent = [str(path) for path in (self.python, self.model) if not path.exists()]
        return f"not run: {', '.join(absent)} not found" if absent else ""


@dataclass(frozen=True)
class Work:
    """The work of every system in every round, in tokens; ``timeout_s`` limits one process, in seconds."""

    prompts: tuple[int, ...]
    new_tokens: int
    timeout_s: float


def read_entries(path: Path) -> list[Entry]:
    """Read the TOML file: a table ``python`` (runner -> interpreter) and an array of tables ``system``.

    Raises:
        ValueError: it is no TOML, or says something that is not understood.
    """
    with path.open("rb") as file:
        document = tomllib.load(file)
    pythons = {runner: path.parent / python for runner, python in document.get("python", {}).items()}
    # No interpreter is asked for if llmc is installed where this script runs.
    pythons.setdefault("llmc", Path(sys.executable))
    entries = [_read_entry(path, system, pythons) for system in document.get("system", [])]
    unknown = pythons.keys() - RUNNERS.keys()
    if unknown or not entries:
        found = f"unknown runners {sorted(unknown)} in [python]" if unknown else "no [[system]]"
        raise ValueError(f"{path}: {found}; see systems.example.toml")
    return entries


def _read_entry(path: Path, system: dict[str, Any], pythons: dict[str, Path]) -> Entry:
    if system.keys() != {"name", "group", "runner", "model"} or system["runner"] not in RUNNERS:
        raise ValueError(
            f"{path}: [[system]] {system} is not understood; expected name, group, model and runner "
            f"(one of {', '.join(RUNNERS)})"
        )
    runner = system["runner"]
    return Entry(system["name"], system["group"], runner, path.parent / system["model"], pythons.get(runner))


def run_once(entry: Entry, work: Work) -> Round:
    """Run one system in a process of its own.

    Raises:
        RuntimeError: it failed, or took longer than the limit.
    """
    script = HERE / RUNNERS[entry.runner]
    command = [str(entry.python), str(script), str(entry.model), "--prompts", *map(str, work.prompts)]
    command += ["--new-tokens", str(work.new_tokens), "--threads", str(usable_cpus())]
    disturbance = Disturbance()
    try:
        done = subprocess.run(
            command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=work.timeout_s, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"failed: no result after {work.timeout_s:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"failed with exit code {error.returncode}: {last}") from error
    # A library may print, too; the report is the last line.
    return Round(json.loads(done.stdout.splitlines()[-1]), disturbance.cpus())


def run_all(entries: Sequence[Entry], work: Work, rounds: int) -> list[Row]:
    """Run all systems in turn, ``rounds`` times. One that fails is not tried again."""
    trouble = {entry: entry.missing() for entry in entries}
    done: dict[Entry, list[Round]] = {entry: [] for entry in entries}
    for number in range(1, rounds + 1):
        for entry in entries:
            if trouble[entry]:
                continue
            try:
                done[entry].append(run_once(entry, work))
            except RuntimeError as error:
                trouble[entry] = str(error)
            print(
                f"round {number}/{rounds}: {entry.name}: {trouble[entry] or _brief(done[entry][-1])}", file=sys.stderr
            )
    return [
        Row(entry.name, entry.group, entry.runner, entry.model.name, tuple(done[entry]), trouble[entry])
        for entry in entries
    ]


def _brief(latest: Round) -> str:
    figures = [
        f"{result['prompt']}: {result['prefill_tok_s']:.0f} / {result['decode_tok_s']:.0f}"
        for result in latest.report["results"]
    ]
    noise = f" (disturbed: {latest.other_cpus} CPUs busy with something else)" if latest.disturbed else ""
    return ", ".join(figures) + noise


def _parse() -> tuple[argparse.Namespace, list[Entry]]:
    """The arguments, and the systems they select; a mistake in either exits with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", type=Path, help="TOML file that lists the systems")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048], help="prompt lengths in tokens")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate after each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="times that each system runs")
    parser.add_argument("--group", action="append", help="run only this group; may be repeated")
    parser.add_argument("--timeout", type=float, default=1800, help="limit of one process, in seconds")
    parser.add_argument("--output", type=Path, default=Path("peers.json"), help="where the JSON goes")
    args = parser.parse_args()
    if min(args.prompts) < 1 or args.new_tokens < 2 or args.rounds < 1:
        parser.error("prompts and rounds must be at least 1, new tokens at least 2")
    try:
        entries = read_entries(args.systems)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    groups = sorted({entry.group for entry in entries})
    if args.group and not set(args.group) <= set(groups):
        parser.error(f"--group {' '.join(args.group)}: {args.systems} has {', '.join(groups)}")
    return args, [entry for entry in entries if not args.group or entry.group in args.group]


def main() -> int:
    """Measure, write the JSON file and print the table; 1 if a system failed, or none could run."""
    args, entries = _parse()
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    work = Work(tuple(args.prompts), args.new_tokens, args.timeout)
    rows = run_all(entries, work, args.rounds)
    results = Results(date, shlex.join(sys.argv), this_machine(), work.prompts, work.new_tokens, tuple(rows))
    args.output.write_text(json.dumps(asdict(results), indent=1) + "\n", encoding="utf-8")
    print(table(results))
    return int(any(row.failed for row in rows) or not any(row.rounds for row in rows))


if __name__ == "__main__":
    sys.exit(main())
