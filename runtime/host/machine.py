"""The part of the machine that this process may use: processors, memory, CPU features."""

import ctypes
import math
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
# Linux's names for the instructions that multiply uint8 by int8 and add in 32 bits.
VNNI_FLAGS = {"avx512_vnni", "avx_vnni"}


def usable_threads() -> int:
    """Number of threads worth starting: the affinity mask, limited by the cgroup's CPU quota; at least 1."""
    affinity, fields = len(os.sched_getaffinity(0)), " ".join(_lines(CGROUP / "cpu.max")).split()
    if len(fields) != 2 or fields[0] == "max":
        return affinity
    return max(1, min(affinity, math.ceil(int(fields[0]) / int(fields[1]))))


@dataclass(frozen=True)
class Available:
    """Available bytes, and what limits them: machine, cgroup or --memory."""

    bytes: int
    source: str


def memory_here() -> Available:
    """Memory that can be taken now without swapping: the machine's free memory, limited by the cgroup."""
    free, granted = kilobytes(Path("/proc/meminfo"), "MemAvailable") or 1 << 62, _cgroup_available()
    return Available(free, "machine") if granted is None or free <= granted else Available(granted, "cgroup")


def available_memory() -> int:
    return memory_here().bytes


def cpu_flags() -> list[str]:
    return sorted((_value(CPUINFO, "flags") or _value(CPUINFO, "Features")).split())


def saturates() -> bool:
    """True if the CPU adds products of uint8 and int8 in 16 bits: x86 without VNNI. Arm adds in 32 bits."""
    return platform.machine() == "x86_64" and VNNI_FLAGS.isdisjoint(cpu_flags())


def return_freed_memory() -> None:
    """Return unused pages to the system: glibc keeps 60 MB after 150,000 tokens were parsed, and more than the weights
    after a graph's were converted to uint8."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def cpu_model() -> str:
    return _value(CPUINFO, "model name") or platform.processor() or platform.machine()


def resident_bytes() -> tuple[int, int]:
    """Resident set size of this process now and at its peak, in bytes."""
    status = Path("/proc/self/status")
    return kilobytes(status, "VmRSS") or 0, kilobytes(status, "VmHWM") or 0


def kilobytes(path: Path, name: str) -> int | None:
    """The bytes in the line ``name: 123 kB`` of a kernel file; None if it is missing."""
    value = _value(path, name)
    return int(value.split()[0]) * 1024 if value else None


def _value(path: Path, name: str) -> str:
    """The text after ``name:`` in the first such line of a file."""
    lines = (line.partition(":") for line in _lines(path))
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _cgroup_available() -> int | None:
    """Bytes below the cgroup's limit; file pages count as free, since the kernel drops them first."""
    most = "".join(_lines(CGROUP / "memory.max")).strip()
    if not most or most == "max":
        return None
    used = int("".join(_lines(CGROUP / "memory.current")) or 0)
    statistics = dict(line.split() for line in _lines(CGROUP / "memory.stat"))
    return max(0, int(most) - used + int(statistics.get("inactive_file", 0)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
