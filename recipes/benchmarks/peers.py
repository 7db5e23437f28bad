"""Run llmc and its peers on the same checkpoint in one run, interleaved, and print how they compare.

Every round runs each system once, in a process and an interpreter of its own; the best round counts. What to run is
said by a TOML file (see systems.example.toml); paths in it are relative to it. A system without interpreter or model is
not run, and the table says so. All use as many threads as this process may use CPUs (``taskset`` limits them).
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from machine import QUIET_CPUS, Disturbance, provenance, table
from runners import RUNNERS, lengths, positive

from llmc.errors import BundleError
from llmc.runtime.host.machine import usable_threads
from llmc.strict import decode

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}
PHASES = (("prefill_tok_s", "prefill {}"), ("decode_tok_s", "decode after {}"))
NOT_RUN = "not run"


@dataclass(frozen=True)
class Entry:
    """One system of the TOML file; ``group`` names the table it appears in (compare like with like)."""

    name: str
    group: str
    runner: str
    model: str


@dataclass
class Row:
    """A system with all its rounds. ``trouble`` says why there are none, or why there are fewer than asked for.

    A round is the JSON line of its runner, and ``other_cpus``, those busy with something else meanwhile (None: not
    known): systems suffer from it very unequally.
    """

    entry: Entry
    trouble: str
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """It ran and broke, as opposed to never being set up."""
        return bool(self.trouble) and not self.trouble.startswith(NOT_RUN)

    def best(self, phase: str, prompt: int) -> float | None:
        """Highest rate of all rounds, in tokens per second."""
        results = [result for r in self.rounds for result in r["results"] if result["prompt"] == prompt]
        return max((float(result[phase]) for result in results), default=None)


def read_systems(path: Path) -> tuple[dict[str, Path], tuple[Entry, ...]]:
    """Read the TOML file: the interpreter of each runner, llmc's by default the one that runs this script; the systems.

    Raises:
        ValueError: it is no TOML, or says something that is not understood.
    """
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


def run_script(
    python: str | Path,
    script: str,
    *arguments: object,
    timeout_s: float | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run one of these scripts in another interpreter, and return the last line it prints; a library may print, too.

    Raises:
        RuntimeError: it failed, or took longer than the limit.
    """
    command = [str(python), str(HERE / script), *map(str, arguments)]
    try:
        done = subprocess.run(
            command,
            env=os.environ | ENVIRONMENT | dict(environment),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{script} failed: no result after {timeout_s:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"{script} failed with exit code {error.returncode}: {last}") from error
    return (done.stdout.splitlines() or [""])[-1]


def run_all(
    pythons: dict[str, Path],
    entries: Sequence[Entry],
    folder: Path,
    work: Sequence[object],
    rounds: int,
    timeout_s: float = 1800.0,
) -> list[Row]:
    """Run all systems in turn, several times. One that fails is not tried again.

    Args:
        pythons: interpreters by runner.
        entries: the systems.
        folder: that their models are in.
        work: arguments of ``runners.py`` that say what is measured.
        rounds: times that each of them runs.
        timeout_s: limit of one process.
    """
    rows = [Row(entry, missing(pythons.get(entry.runner), folder / entry.model)) for entry in entries]
    for number in range(1, rounds + 1):
        for row in (row for row in rows if not row.trouble):
            entry, disturbance = row.entry, Disturbance(resource.RUSAGE_CHILDREN)
            command = (pythons[entry.runner], "runners.py", entry.runner, folder / entry.model, *work)
            try:
                found = json.loads(run_script(*command, "--threads", usable_threads(), timeout_s=timeout_s))
                row.rounds.append({**found, "other_cpus": disturbance.cpus()})
            except RuntimeError as error:
                row.trouble = str(error)
            print(f"round {number}/{rounds}: {entry.name}: {row.trouble or brief(row.rounds[-1])}", file=sys.stderr)
    return rows


def missing(python: Path | None, model: Path) -> str:
    """The reason why a system cannot run, or nothing."""
    if python is None:
        return f"{NOT_RUN}: its runner has no interpreter"
    absent = [str(path) for path in (python, model) if not path.exists()]
    return f"{NOT_RUN}: {', '.join(absent)} not found" if absent else ""


def disturbed(found: dict[str, Any]) -> bool:
    """True if something else took CPU time in a round."""
    return found["other_cpus"] is not None and found["other_cpus"] > QUIET_CPUS


def brief(found: dict[str, Any]) -> str:
    """A round in a few words."""
    figures = [
        f"{r['requests']}: {r['tok_s']:.0f}"
        if "requests" in r
        else f"{r['prompt']}: {r['prefill_tok_s']:.0f} / {r['decode_tok_s']:.0f}"
        for r in found["results"]
    ]
    noise = f" (disturbed: {found['other_cpus']} CPUs busy with something else)" if disturbed(found) else ""
    return ", ".join(figures) + noise


def tables(rows: Sequence[Row], prompts: Sequence[int]) -> Iterator[str]:
    """One Markdown table per group: best tokens per second, and in brackets llmc's rate over the peer's."""
    columns = [(phase, title, prompt) for phase, title in PHASES for prompt in prompts]
    for group in dict.fromkeys(row.entry.group for row in rows):
        own = [row for row in rows if row.entry.group == group]
        reference = next((row for row in own if row.entry.runner == "llmc" and row.rounds), None)
        lines = [
            (row.entry.name, *(cell(row, reference, phase, prompt) for phase, _, prompt in columns)) for row in own
        ]
        yield table((group, *(title.format(prompt) for _, title, prompt in columns)), *lines)


def sizes(rows: Sequence[Row]) -> str:
    """A Markdown table of what each system's files take on disk, and its process in memory at its peak."""
    ran = [row for row in rows if row.rounds]
    head = ("10^6 bytes", "on disk", "resident at the peak")
    peaks = [max(found["peak_rss_mb"] for found in row.rounds) for row in ran]
    files = [row.rounds[0]["details"]["files_mb"] for row in ran]
    return table(head, *((row.entry.name, size, f"{peak}") for row, size, peak in zip(ran, files, peaks, strict=True)))


def cell(row: Row, reference: Row | None, phase: str, prompt: int) -> str:
    """A system's best rate, beside the reference's."""
    rate = row.best(phase, prompt)
    if rate is None:
        return "failed" if row.failed else NOT_RUN
    ours = reference.best(phase, prompt) if reference and row is not reference else None
    return f"{rate:.0f}" if ours is None else f"{rate:.0f} ({ours / rate:.2f}x)"


def footer(rows: Sequence[Row], new_tokens: int, machine: dict[str, Any]) -> str:
    """The lines below the tables: the measure, the machine, a doubt, and what did not run."""
    rounds = [found for row in rows for found in row.rounds]
    noisy = sum(map(disturbed, rounds))
    lines = [
        f"Tokens per second, best round; in brackets llmc / peer. {new_tokens} new tokens, greedy, "
        f"{machine['threads']} threads, {machine['cpu']}.",
        *([f"DISTURBED: {noisy} of {len(rounds)} runs shared the CPUs; do not quote."] if noisy else []),
        *(f"{row.entry.name}: {row.trouble}" for row in rows if row.trouble),
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure, write the JSON file and print the tables; 1 if a system failed, or none could run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", type=Path, help="TOML file that lists the systems")
    lengths(parser)
    parser.add_argument("--rounds", type=positive, default=3, help="times that each system runs")
    parser.add_argument("--group", action="append", help="run only this group; may be repeated")
    parser.add_argument("--timeout", type=float, default=1800, help="limit of one process, in seconds")
    parser.add_argument("--output", type=Path, default=Path("peers.json"), help="where the JSON goes")
    args = parser.parse_args()
    try:
        pythons, entries = read_systems(args.systems)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    groups = sorted({entry.group for entry in entries})
    if args.group and not set(args.group) <= set(groups):
        parser.error(f"--group {' '.join(args.group)}: {args.systems} has {', '.join(groups)}")
    origin = provenance()
    chosen = [entry for entry in entries if not args.group or entry.group in args.group]
    work = ["--prompts", *args.prompts, "--new-tokens", args.new_tokens]
    if args.warm_up:
        work += ["--warm-up", args.warm_up]
    rows = run_all(pythons, chosen, args.systems.parent, work, args.rounds, args.timeout)
    measured = {"prompts": args.prompts, "new_tokens": args.new_tokens}
    results = {**origin, **measured, "rows": [asdict(row) for row in rows]}
    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join([*tables(rows, args.prompts), sizes(rows), footer(rows, args.new_tokens, origin["machine"])]))
    return int(any(row.failed for row in rows) or not any(row.rounds for row in rows))


if __name__ == "__main__":
    sys.exit(main())
