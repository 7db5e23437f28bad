"""Sources: find what a user names, whatever its kind: a bundle, an export, a checkpoint, a GGUF file, or a name at the
Hugging Face hub.

Every verb and ``load()`` take all of them. ``KINDS`` says how each is recognised; ``built`` makes a bundle of what is
none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from llmc.bundle import ADAPTER_FILE, BUNDLE_MANIFEST, CONFIG_FILE, EXPORT_MANIFEST
from llmc.errors import UsageError

__all__ = ["KINDS", "Kind", "Located", "Progress", "locate", "silent"]

Progress = Callable[..., None]


def silent(step: str, fraction: float | None = None, /) -> None:
    """Report nothing."""


class Kind(Enum):
    """What a path is."""

    BUNDLE = "bundle"
    EXPORT = "export"
    CHECKPOINT = "checkpoint"  # a folder of safetensors
    GGUF = "gguf"  # a file, the first where a model has several
    ADAPTER = "adapter"  # a folder of PEFT: no source of a bundle, but of an adapter


# The file that makes a folder one of a kind; the first that is there counts, since an export has a config.json, too.
KINDS = {
    BUNDLE_MANIFEST: Kind.BUNDLE,
    EXPORT_MANIFEST: Kind.EXPORT,
    CONFIG_FILE: Kind.CHECKPOINT,
    ADAPTER_FILE: Kind.ADAPTER,
}


@dataclass(frozen=True)
class Located:
    """A source that is on this disk."""

    name: str  # what the user typed
    path: Path
    kind: Kind


def locate(name: str | Path, *, offline: bool | None = None, progress: Progress = silent) -> Located:
    """Find what ``name`` is: a path that exists wins over a name at the hub.

    Raises:
        UsageError: there is nothing of that name, or it is of no kind.
    """
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return Located(str(name), path, Kind.GGUF)
    for file, kind in KINDS.items():
        if (path / file).exists():
            return Located(str(name), path, kind)
    if not path.exists():
        raise UsageError("source", f"{path} does not exist")
    listed = ", ".join(f"{file} (a {kind.value})" for file, kind in KINDS.items())
    raise UsageError("source", f"{path} has none of {listed}", "give a folder with one of them, or a .gguf file")
