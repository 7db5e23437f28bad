"""Measure how soon a model is there that no process has opened since the machine started: its files come from the disk.

Every round drops a system's files from the page cache, opens it in a new process and asks for one token; then it does
so again, with the files in memory. llmc begins with an empty cache of its own: the first of the two checks files,
tokenizer and graphs, as a first load on a machine does. Beside them the same files are read with nothing else to do,
from start to end: no system that needs all of them can be faster. The systems are those of peers.py's TOML file.

A host may keep what its guests read, so drops here need not be drops there: read the rate of the disk beside the rest.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from machine import QUIET_CPUS, Disturbance, provenance, table
from peers import NOT_RUN, Entry, Row, missing, read_systems, run_script
from runners import positive

from llmc.runtime.host.machine import usable_threads

BLOCK = 8 << 20  # bytes of one read; larger ones are no faster
STATES = ("cold", "again")


def files_of(model: Path) -> list[Path]:
    """The files of a model, which is a file or a folder."""
    return [model] if model.is_file() else sorted(path for path in model.rglob("*") if path.is_file())


def drop(paths: Sequence[Path]) -> None:
    """Take files out of the page cache, as far as no process has them mapped."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # what is not written yet would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_rate(paths: Sequence[Path]) -> float:
    """10^6 bytes per second that the files' bytes come in, one after the other."""
    total, buffer, started = 0, bytearray(BLOCK), time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total / (time.perf_counter() - started) / 1e6


def rounds_of(args: argparse.Namespace, pythons: dict[str, Path], rows: Sequence[Row], folder: Path) -> Iterator[Row]:
    """Run every system cold and again, in turns, and give its row after each; one that fails is not tried again."""
    work = ("--prompts", args.prompt, "--new-tokens", 2, "--threads", usable_threads(), "--first")
    for number in range(args.rounds):
        for row in (row for row in (rows if number % 2 == 0 else rows[::-1]) if not row.trouble):
            model, disturbance = folder / row.entry.model, Disturbance(resource.RUSAGE_CHILDREN)
            files, found = files_of(model), {}
            with tempfile.TemporaryDirectory() as cache:
                command = (pythons[row.entry.runner], "runners.py", row.entry.runner, model, *work)
                environment = {"LLMC_CACHE": cache}
                try:
                    drop(files)
                    for state in STATES:
                        line = run_script(*command, timeout_s=args.timeout, environment=environment)
                        found[state] = json.loads(line)
                    found["other_cpus"] = disturbance.cpus()
                    drop(files)
                    row.rounds.append({**found, "disk_mb_s": round(read_rate(files))})
                except RuntimeError as error:
                    row.trouble = str(error)
            yield row


def seconds(row: Row, state: str) -> list[float]:
    """Seconds to the first token in each round."""
    return [found[state]["seconds"] for found in row.rounds]


def lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Cells of the table: medians, and in brackets the median over rounds of ours over theirs, with its range."""
    ours = rows[0]
    for row in rows:
        if not row.rounds:
            yield (row.entry.name, *[row.trouble or NOT_RUN] * 5)
            continue
        cells = []
        for state in STATES:
            found = seconds(row, state)
            ratios = [a / b for a, b in zip(seconds(ours, state), found, strict=False)] if row is not ours else []
            spread = f" ({statistics.median(ratios):.2f}x; {min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
            cells.append(f"{statistics.median(found):.2f}{spread}")
        busy = statistics.median(found["cold"]["cpu_s"] for found in row.rounds)
        read = statistics.median(found["cold"].get("read_mb", 0) for found in row.rounds)
        rate = statistics.median(found["disk_mb_s"] for found in row.rounds)
        yield (row.entry.name, *cells, f"{busy:.1f}", f"{read:.0f}", f"{rate:.0f}")


def brief(row: Row) -> str:
    """The row's last round in a few words."""
    if row.trouble:
        return row.trouble
    found: dict[str, Any] = row.rounds[-1]
    times = ", ".join(f"{state} {found[state]['seconds']:.2f} s" for state in STATES)
    return f"{times}; {found['cold'].get('read_mb')} MB read, the disk gives {found['disk_mb_s']} MB/s"


def main() -> int:
    """Measure, write the JSON file and print the table; 1 if a system failed, or none could run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", type=Path, help="TOML file that lists the systems, as for peers.py")
    parser.add_argument("--group", help="run only this group; ratios are taken to its first system")
    parser.add_argument("--prompt", type=positive, default=32, help="tokens before the first one that is generated")
    parser.add_argument("--rounds", type=positive, default=4, help="times that each system runs")
    parser.add_argument("--timeout", type=float, default=600, help="limit of one process, in seconds")
    parser.add_argument("--output", type=Path, default=Path("first_load.json"), help="where the JSON goes")
    args = parser.parse_args()
    try:
        pythons, entries = read_systems(args.systems)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    folder, origin = args.systems.parent, provenance()
    chosen: list[Entry] = [entry for entry in entries if args.group in (None, entry.group)]
    if not chosen:
        parser.error(f"--group {args.group}: {args.systems} has {', '.join(sorted({e.group for e in entries}))}")
    rows = [Row(entry, missing(pythons.get(entry.runner), folder / entry.model)) for entry in chosen]
    for row in rounds_of(args, pythons, rows, folder):
        print(f"{row.entry.name}: {brief(row)}", file=sys.stderr)
    args.output.write_text(json.dumps({**origin, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    head = ("seconds to the first token", *STATES, "processor's seconds, cold", "MB read, cold", "disk, MB/s")
    print(table(head, *lines(rows)))
    measured = [found for row in rows for found in row.rounds]
    if any((found["other_cpus"] or 0.0) > QUIET_CPUS for found in measured):
        print("\nDISTURBED: something else kept CPUs busy; do not quote.")
    return int(any(row.failed for row in rows) or not measured)


if __name__ == "__main__":
    sys.exit(main())
