"""How folders of llmc's appear: written beside their place, synced, and renamed into it, whole or not at all."""

import errno
import glob
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmc.bundle import BUNDLE_MANIFEST, EXPORT_MANIFEST, FileEntry, sha256_file
from llmc.errors import ResourceError, UsageError

# What a folder of llmc's may hold; anything else in it is somebody's own.
OUR_SUFFIXES = (".json", ".onnx", ".bin", ".plan", ".safetensors", ".jinja")


def file_entries(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Size and SHA-256 of each named file of ``folder``."""
    return {name: FileEntry((folder / name).stat().st_size, sha256_file(folder / name)) for name in names}


@contextmanager
def staged(target: Path, *, force: bool = False) -> Iterator[Path]:
    """Give an empty folder to write into, and publish it as ``target`` when the block ends without an error.

    The folder lies beside the target. On any error, Ctrl-C included, it is removed and the target is untouched.
    With ``force`` an existing target is replaced, and only at the end.

    Raises:
        UsageError: the target exists and ``force`` is false, or is no folder of llmc's, or cannot be written.
        ResourceError: the disk is full.
    """
    place = Path(os.path.realpath(target))  # through a link: what it points to is replaced, not the link
    _recover(place)
    refuse_to_overwrite(target, force)
    made = [parent for parent in place.parents if not parent.exists()]
    staging = place.parent / f".{place.name}.{os.getpid()}.staging"
    writing = True  # whether an error is of our own writing; those of the caller's block keep their own names
    try:
        staging.mkdir(parents=True)
        writing = False
        yield staging
        writing = True
        sync_all(staging)
        refuse_to_overwrite(target, force)  # it may have appeared meanwhile
        _swap(staging, place)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"{target}: the disk is full; free some space and run again") from error
        if writing:
            raise UsageError(f"{target}: cannot write here ({error.strerror}); choose another output folder") from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        with suppress(OSError):
            for parent in made:  # goes as far up as they are empty
                parent.rmdir()


def refuse_to_overwrite(target: Path, force: bool) -> None:
    """Check before any work that :func:`staged` may publish to ``target``.

    Raises:
        UsageError: the target exists and ``force`` is false, or is no folder of llmc's.
    """
    if not target.exists():
        return
    if not force:
        raise UsageError(f"{target} exists; choose another output folder, or pass --force to replace it")
    ours = target.is_dir() and any((target / name).exists() for name in (BUNDLE_MANIFEST, EXPORT_MANIFEST))
    if not ours and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target} is not llmc's, so --force does not replace it; choose another output folder")
    # A checkpoint or notes that somebody keeps in there would go with the old folder.
    others = sorted(path.name for path in target.iterdir() if path.is_dir() or path.suffix not in OUR_SUFFIXES)
    if others:
        raise UsageError(
            f"{target} also holds {others[0]!r}, which llmc did not write, so --force does not replace it; "
            "move that away or choose another output folder"
        )


def _recover(place: Path) -> None:
    """Clear away what a killed process left beside ``place``; a folder it had set aside comes back where it was."""
    for folder in place.parent.glob(f".{glob.escape(place.name)}.*"):
        pid, _, kind = folder.name.removeprefix(f".{place.name}.").partition(".")
        if kind not in ("staging", "old") or not pid.isdigit() or _alive(int(pid)):
            continue
        with suppress(OSError):
            if kind == "old" and not place.exists():
                folder.rename(place)
            else:
                shutil.rmtree(folder)


def _alive(pid: int) -> bool:
    """Whether another process runs under ``pid``; our own number is one that a container gave to each run in turn."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def sync(path: Path) -> None:
    """Return when a file, or a folder's list of names, is on the disk.

    Raises:
        OSError: the disk is full, or fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """:func:`sync` of all that is in a folder, and of itself.

    Raises:
        OSError: the disk is full, or fails.
    """
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def _swap(staging: Path, place: Path) -> None:
    """Put ``staging`` in its place; the folder that was there comes back if that fails."""
    old = staging.with_suffix(".old")
    try:
        if place.exists():
            place.rename(old)
        staging.rename(place)
        sync(place.parent)
    finally:
        if not place.exists() and old.exists():
            old.rename(place)
        shutil.rmtree(old, ignore_errors=True)
