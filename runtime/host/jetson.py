"""A Jetson by its own files: model and release."""

import re
from dataclasses import dataclass
from pathlib import Path

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
class Jetson:
    """A Jetson by its files; ``l4t`` is the release of Jetson Linux, as 36.4.3, nothing where it cannot be read."""

    model: str
    l4t: str
    jetpack: JetPack | None


def read_jetson(root: Path = ROOT) -> Jetson | None:
    """The Jetson that this is, or None on any other machine."""
    model, l4t = _text(root / "proc/device-tree/model").strip("\0 \n"), _release(root)
    return Jetson(model, l4t, jetpack_of(l4t)) if l4t or "Jetson" in model else None


def jetpack_of(l4t: str) -> JetPack | None:
    """The JetPack of a release of Jetson Linux, None if unknown; source: NVIDIA's release notes."""
    found = tuple(map(int, l4t.split(".")[:2])) if l4t else ()
    older = [release for release in JETPACKS if found and release[0] == found[0] and release <= found]
    return JETPACKS[max(older)] if older else None


def _release(root: Path) -> str:
    """``# R36 (release), REVISION: 4.3, ...`` -> 36.4.3."""
    match = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", _text(root / "etc/nv_tegra_release"))
    return f"{match[1]}.{match[2]}" if match else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
