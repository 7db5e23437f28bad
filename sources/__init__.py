"""Sources: find what a user names, whatever its kind: a bundle, an export, a checkpoint, a GGUF file, or a name at the
Hugging Face hub.

Every verb and ``load()`` take all of them. ``KINDS`` says how each is recognised; ``built`` makes a bundle of what is
none.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from llmc.bundle import ADAPTER_FILE, BUNDLE_MANIFEST, CONFIG_FILE, EXPORT_MANIFEST, Origin
from llmc.errors import UsageError
from llmc.origin import read_origin
from llmc.sources.hub import download, parse_name

__all__ = ["KINDS", "Kind", "Located", "Progress", "is_hub_name", "locate", "silent"]

# Called with a step in a few words, and with the fraction of it that is done (0 ... 1) where that is known.
Progress = Callable[..., None]


def silent(step: str, fraction: float | None = None, /) -> None:
    """Report nothing."""


class Kind(Enum):
    """What a path is."""

    BUNDLE = "a bundle"
    EXPORT = "an export"
    CHECKPOINT = "a checkpoint"  # a folder of safetensors
    GGUF = "a GGUF file"  # the first where a model has several
    ADAPTER = "an adapter"  # a folder of PEFT: no source of a bundle, but of an adapter


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
    origin: Origin | None = None  # the hub's commit, for a path in the hub's cache


def is_hub_name(text: str) -> bool:
    """True if ``text`` can be the name of a model at the hub; the hub is not asked."""
    return parse_name(text) is not None


def locate(name: str | Path, *, offline: bool | None = None, progress: Progress = silent) -> Located:
    """Find what ``name`` is: a path that exists, or a model of the hub, which is downloaded first.

    Args:
        name: a path, or a name of the hub, see :func:`llmc.sources.hub.parse_name`; a path that exists wins,
            and so does a broken link.
        offline: True uses no network, only what the hub's cache has; default: ``HF_HUB_OFFLINE``.
        progress: called with each step and the fraction of it that is done.

    Raises:
        UsageError: there is nothing of that name, or it is of no kind.
        HubError, CheckpointError, ResourceError: the hub does not give the model, see ``download``.
    """
    path = Path(name)
    wanted = None if os.path.lexists(path) else parse_name(str(name))
    if wanted is not None:
        path = download(wanted, offline=offline, progress=progress)
    elif not os.path.exists(path):
        raise UsageError("source", f"{path} does not exist", "name a path, or a model of the hub as org/name")
    origin = read_origin(path)
    if path.suffix == ".gguf" and os.path.isfile(path):
        return Located(str(name), path, Kind.GGUF, origin)
    for file, kind in KINDS.items():
        if os.path.exists(path / file):  # pathlib raises for what cannot be looked at
            return Located(str(name), path, kind, origin)
    listed = ", ".join(f"{file} ({kind.value})" for file, kind in KINDS.items())
    raise UsageError("source", f"{path} has none of {listed}", "give a folder with one of them, or a .gguf file")
