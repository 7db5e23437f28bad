"""Shared parts of the benchmarks: alternate the systems, compute ratios, print tables, describe the machine."""

import argparse
import datetime
import json
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from llmc.runtime.diagnose.doctor import this_machine

STAT = Path("/proc/stat")
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal
QUIET_CPUS = 0.1  # more CPUs busy with other work make the figures doubtful
T = TypeVar("T")


def positive(text: str) -> int:
    """A number of at least 1, for argparse."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few, expected at least 1")
    return number


def in_turns(ways: Mapping[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """Call each function with the number of the round, in alternating order; round 0 warms up and is dropped."""
    results: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            result = ways[name](number)
            if number:
                results[name].append(result)
    return results


def ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """The median over rounds of the quotient within a round, with the smallest and the largest."""
    ratios = [a / b for a, b in zip(above, below, strict=False)]
    return f"{statistics.median(ratios):.2f}x; {min(ratios):.2f} to {max(ratios):.2f}"


def publish(path: Path | None, other_cpus: float | None, tables: Sequence[str], **found: Any) -> None:
    """Print the tables and the machine, and write the JSON file if ``path`` is given.

    Args:
        other_cpus: CPUs busy with other work; None if unknown.
        found: content of the file besides machine, date and command.
    """
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    machine = {**asdict(this_machine()), "system": platform.platform()}
    origin = {"date": date, "command": shlex.join(sys.argv), "machine": machine}
    print("\n\n".join(tables))
    print(f"\n{origin['machine']['threads']} CPUs usable, {origin['machine']['cpu']}, {origin['date']}")
    if other_cpus is not None and other_cpus > QUIET_CPUS:
        print(f"DISTURBED: {other_cpus} CPUs were busy with something else; do not quote.")
    if path is not None:
        content = {**origin, **found, "other_cpus": other_cpus}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def table(head: Sequence[str], *rows: Sequence[str]) -> str:
    """A Markdown table; all columns except the first are right-aligned."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows))


class Disturbance:
    """Mean number of CPUs busy with other work while this process and its children ran.

    A run is disturbed if this is not close to zero; time taken by the hypervisor counts, too. Linux only: elsewhere
    :meth:`cpus` returns None. ``processes``: ids of children that keep running; others count when they have ended.
    """

    def __init__(self, processes: Sequence[int] = ()) -> None:
        self._processes = processes
        self._wall, self._busy, self._own = time.perf_counter(), _busy_seconds(), self._sum_own_seconds()

    def cpus(self) -> float | None:
        """Average number of CPUs busy with other work since this object was made."""
        busy = _busy_seconds()
        if self._busy is None or busy is None:
            return None
        other_cpus = busy - self._busy - (self._sum_own_seconds() - self._own)
        return round(max(other_cpus, 0.0) / (time.perf_counter() - self._wall), 2)

    def _sum_own_seconds(self) -> float:
        ended = map(_cpu_seconds, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(ended) + sum(map(_process_seconds, self._processes))


def _busy_seconds() -> float | None:
    """Seconds of work of all CPUs together since boot."""
    if not STAT.exists():
        return None
    ticks = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    return sum(int(ticks[field]) for field in BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")


def _cpu_seconds(whose: int) -> float:
    usage = resource.getrusage(whose)
    return usage.ru_utime + usage.ru_stime


def _process_seconds(number: int) -> float:
    after_name = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
