"""A Jetson by its own files: model, release, power mode, clocks."""

import re
from dataclasses import dataclass
from pathlib import Path

from llmc.runtime.host.machine import kilobytes

ROOT = Path("/")


@dataclass(frozen=True)
class JetPack:
    """The contents of a JetPack: CUDA, TensorRT, and the Python that TensorRT's module is for."""

    name: str
    cuda: str
    tensorrt: str
    python: str


# By the first release of Jetson Linux (L4T) with it; a later release of the same major number has at least as much.
JETPACKS = {
    (35, 1): JetPack("5.x", "11.4", "8.5", "3.8"),
    (36, 2): JetPack("6.0", "12.2", "8.6", "3.10"),
    (36, 4): JetPack("6.1 or 6.2", "12.6", "10.3", "3.10"),
    (38, 2): JetPack("7.0", "13.0", "10.13", "3.12"),
    (38, 4): JetPack("7.1", "13.0", "10.13", "3.12"),
    (39, 2): JetPack("7.2", "13.2", "10.16", "3.12"),
}


@dataclass(frozen=True)
class PowerMode:
    """A power mode by the number that ``nvpmodel -m`` takes."""

    number: int
    name: str


@dataclass(frozen=True)
class Jetson:
    """A Jetson, as far as its files can be read; None or nothing where they cannot.

    Attributes:
        model: as the device tree has it.
        l4t: release of Jetson Linux, as 36.4.3.
        jetpack: that belongs to it.
        power_mode, power_modes: the present one, and all that this model has.
        memory, swap: total bytes; the GPU uses the same memory.
        gpu_clock, gpu_clock_max, cpu_clock, cpu_clock_max: in Hz, now and at most; clocks fall when nothing runs.
    """

    model: str
    l4t: str
    jetpack: JetPack | None
    power_mode: PowerMode | None
    power_modes: tuple[PowerMode, ...]
    memory: int | None
    swap: int | None
    gpu_clock: int | None
    gpu_clock_max: int | None
    cpu_clock: int | None
    cpu_clock_max: int | None


def read_jetson(root: Path = ROOT) -> Jetson | None:
    """The Jetson that this is, or None on any other machine."""
    model, l4t = _text(root / "proc/device-tree/model").strip("\0 \n"), _release(root)
    if not l4t and "Jetson" not in model:
        return None
    modes = _power_modes(root)
    gpu, cpu = _gpu_folder(root), root / "sys/devices/system/cpu/cpu0/cpufreq"
    return Jetson(
        model=model,
        l4t=l4t,
        jetpack=jetpack_of(l4t),
        power_mode=_power_mode(root, modes),
        power_modes=modes,
        memory=kilobytes(root / "proc/meminfo", "MemTotal"),
        swap=kilobytes(root / "proc/meminfo", "SwapTotal"),
        gpu_clock=_number(gpu / "cur_freq"),
        gpu_clock_max=_number(gpu / "max_freq"),
        cpu_clock=_number(cpu / "scaling_cur_freq", 1000),
        cpu_clock_max=_number(cpu / "scaling_max_freq", 1000),
    )


def jetpack_of(l4t: str) -> JetPack | None:
    """The JetPack of a release of Jetson Linux, None if unknown; source: NVIDIA's release notes."""
    found = tuple(map(int, l4t.split(".")[:2])) if l4t else ()
    older = [release for release in JETPACKS if found and release[0] == found[0] and release <= found]
    return JETPACKS[max(older)] if older else None


def _release(root: Path) -> str:
    """``# R36 (release), REVISION: 4.3, ...`` -> 36.4.3."""
    match = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", _text(root / "etc/nv_tegra_release"))
    return f"{match[1]}.{match[2]}" if match else ""


def _power_modes(root: Path) -> tuple[PowerMode, ...]:
    """``< POWER_MODEL ID=2 NAME=MAXN_SUPER >``, one line for each."""
    found = re.findall(r"^<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", _text(root / "etc/nvpmodel.conf"), re.M)
    return tuple(PowerMode(int(number), name) for number, name in found)


def _power_mode(root: Path, modes: tuple[PowerMode, ...]) -> PowerMode | None:
    """``pmode:0002 fmode:fanNull``, or the default of the configuration until a mode was ever chosen."""
    chosen = re.search(r"pmode:(\d+)", _text(root / "var/lib/nvpmodel/status"))
    default = re.search(r"^<\s*PM_CONFIG\s+DEFAULT=(\d+)\s*>", _text(root / "etc/nvpmodel.conf"), re.M)
    match = chosen or default
    if match is None:
        return None
    names = {mode.number: mode.name for mode in modes}
    return PowerMode(int(match[1]), names.get(int(match[1]), ""))


def _gpu_folder(root: Path) -> Path:
    """The folder of the GPU's clock: named after its address and its architecture (17000000.gpu, gpu-gpc-0)."""
    folder = root / "sys/class/devfreq"
    names = ("*gpu*", "*ga10b*", "*gv11b*")
    return next((path for name in names for path in sorted(folder.glob(name))), folder / "none")


def _number(path: Path, unit: int = 1) -> int | None:
    text = _text(path).strip()
    return int(text) * unit if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
