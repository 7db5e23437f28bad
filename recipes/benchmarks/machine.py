"""The machine that figures were measured on, how busy everything else on it was, and the tables that show them."""

import datetime
import os
import platform
import resource
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmc.runtime.bench.doctor import this_machine

STAT = Path("/proc/stat")
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal
QUIET_CPUS = 0.1  # more than this busy with something else, and the figures are in doubt


def provenance() -> dict[str, Any]:
    """Origin of figures: the date in UTC, the command, the machine."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    machine = {**asdict(this_machine()), "system": platform.platform()}
    return {"date": date, "command": shlex.join(sys.argv), "machine": machine}


def table(head: Sequence[str], *rows: Sequence[str]) -> str:
    """A Markdown table, all but the first column to the right."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows))


class Disturbance:
    """Mean number of CPUs that were busy with something else while this process, or its children, ran.

    A run is disturbed when this is not close to zero; what the hypervisor took away counts too. Linux only, elsewhere
    :meth:`cpus` is None.

    Args:
        whose: ``resource.RUSAGE_CHILDREN``, of which only those that have ended count, or ``resource.RUSAGE_SELF``.
        processes: ids of more that belong to the measurement and run all the time.
    """

    def __init__(self, whose: int, processes: Sequence[int] = ()) -> None:
        self._whose, self._processes = whose, processes
        self._wall, self._busy, self._own = time.perf_counter(), _busy_seconds(), self._own_seconds()

    def cpus(self) -> float | None:
        """Busy CPUs other than its own, on average since this object was made."""
        busy = _busy_seconds()
        if self._busy is None or busy is None:
            return None
        others = busy - self._busy - (self._own_seconds() - self._own)
        return round(max(others, 0.0) / (time.perf_counter() - self._wall), 2)

    def _own_seconds(self) -> float:
        return _cpu_seconds(self._whose) + sum(map(_process_seconds, self._processes))


def _busy_seconds() -> float | None:
    """Seconds that all CPUs together have been busy since boot."""
    if not STAT.exists():
        return None
    ticks = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    return sum(int(ticks[field]) for field in BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")


def _cpu_seconds(whose: int) -> float:
    """CPU seconds that the kernel counted for ``whose``."""
    usage = resource.getrusage(whose)
    return usage.ru_utime + usage.ru_stime


def _process_seconds(number: int) -> float:
    """CPU seconds of a process, with its threads."""
    after_name = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
