"""What this process may use: processors, memory and how integers are multiplied, as Linux tells it."""

import os
from pathlib import Path

import pytest

from llmc.runtime.host import machine
from llmc.runtime.host.machine import available_memory, saturates, usable_threads

MB = 1_000_000


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the cgroup file system."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    return tmp_path


@pytest.fixture
def four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4, 6})


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of /proc/cpuinfo."""
    path, lines = tmp_path / "cpuinfo", machine._lines
    monkeypatch.setattr(machine, "_lines", lambda at: lines(path if at == Path("/proc/cpuinfo") else at))
    return path


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("max 100000", 4),
        ("100000 100000", 1),
        ("150000 100000", 2),
        ("200000 100000", 2),
        ("1600000 100000", 4),
        ("", 4),
    ],
)
def test_threads_are_the_affinity_mask_cut_by_the_quota(cgroup, quota, threads):
    (cgroup / "cpu.max").write_text(quota + "\n")
    assert usable_threads() == threads


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine itself has 1,000 MB left."""
    monkeypatch.setattr(machine, "kilobytes", lambda *_: 1000 * MB)


def write_memory(cgroup: Path, limit: str, current: int, statistics: str = "") -> None:
    (cgroup / "memory.max").write_text(f"{limit}\n")
    (cgroup / "memory.current").write_text(f"{current}\n")
    (cgroup / "memory.stat").write_text(statistics)


@pytest.mark.usefixtures("free")
def test_the_cgroup_limits_memory_and_pages_of_files_count_as_free(cgroup):
    write_memory(cgroup, str(500 * MB), 300 * MB, f"anon 5\nfile {100 * MB}\ninactive_file {40 * MB}\nslab 7\n")
    assert available_memory() == 240 * MB


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("limit", ["max", "", str(9000 * MB)])
def test_without_a_tighter_limit_the_machine_decides(cgroup, limit):
    write_memory(cgroup, limit, 300 * MB)
    assert available_memory() == 1000 * MB


@pytest.mark.parametrize(
    ("architecture", "flags", "expected"),
    [
        ("x86_64", "fpu sse avx2 avx512_vnni", False),
        ("x86_64", "fpu sse avx2 avx_vnni", False),
        ("x86_64", "fpu sse avx2 avx512f avx512_vnnix", True),
        ("x86_64", "", True),
        ("aarch64", "fp asimd", False),
    ],
)
def test_x86_without_vnni_saturates(cpuinfo, monkeypatch, architecture, flags, expected):
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: A processor\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    monkeypatch.setattr("platform.machine", lambda: architecture)
    assert saturates() == expected
