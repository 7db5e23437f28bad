"""The machine that figures were measured on, and how busy everything else on it was."""

import os
import platform
import resource
import time
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
STAT = Path("/proc/stat")
# Those that decide which integer kernels run; x86 and Arm names.
FEATURES = ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve")
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal


@dataclass(frozen=True)
class Machine:
    """CPU model, its features that matter here, CPUs this process may use, bytes of memory, operating system."""

    cpu: str
    features: tuple[str, ...]
    threads: int
    memory_gb: float
    system: str


def this_machine() -> Machine:
    """Describe this machine; what cannot be found out is empty."""
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    lines = [line.partition(":") for line in text.splitlines()]
    flags = next((value.split() for key, _, value in lines if key.strip() in ("flags", "Features")), [])
    model = next((value.strip() for key, _, value in lines if key.strip() == "model name"), platform.processor())
    return Machine(
        cpu=model,
        features=tuple(feature for feature in FEATURES if feature in flags),
        threads=usable_cpus(),
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        system=platform.platform(),
    )


def usable_cpus() -> int:
    """Number of CPUs in this process's affinity mask, where the system has one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Disturbance:
    """Mean number of CPUs that were busy with something else while this process, or its children, ran.

    A run is disturbed when this is not close to zero; what the hypervisor took away counts too. Linux only, elsewhere
    :meth:`cpus` is None.

    Args:
        whose: ``resource.RUSAGE_CHILDREN``, of which only those that have ended count, or ``resource.RUSAGE_SELF``.
    """

    def __init__(self, whose: int = resource.RUSAGE_CHILDREN) -> None:
        self._whose = whose
        self._wall, self._busy, self._own = time.perf_counter(), _busy_seconds(), _cpu_seconds(whose)

    def cpus(self) -> float | None:
        """Busy CPUs other than its own, on average since this object was made."""
        busy = _busy_seconds()
        if self._busy is None or busy is None:
            return None
        others = busy - self._busy - (_cpu_seconds(self._whose) - self._own)
        return round(max(others, 0.0) / (time.perf_counter() - self._wall), 2)


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
