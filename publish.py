"""Atomic publishing of folders: written beside their place, synced, and renamed into it, whole or not at all.

An unfinished folder lies in a hidden work folder beside the target, ``.NAME.NUMBER.work``. Its lock ends with the
process that holds it, so the next process can tell leftovers of a killed one from work in progress.
"""

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from llmc.bundle import BUNDLE_MANIFEST, EXPORT_MANIFEST, STAGE_FOLDER, FileEntry, sha256_file
from llmc.errors import ResourceError, UsageError

# What a folder of llmc's may hold; anything else in it is somebody's own.
OUR_SUFFIXES = (".json", ".onnx", ".bin", ".plan", ".safetensors", ".gguf", ".jinja")
FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of a step whose folder appeared or vanished since the step before.
OVERTAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
# In a work folder: its lock, the folder that is being written, and the one that it replaces.
LOCK, NEW, OLD = "lock", "new", "old"


def file_entries(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Size and SHA-256 of each named file of ``folder``."""
    return {name: FileEntry((folder / name).stat().st_size, sha256_file(folder / name)) for name in names}


def link(path: Path, target: Path, copy: bool = False) -> int:
    """Hard-link a file, or copy it where ``copy`` asks for it or a link is impossible (another file system); return the
    bytes copied."""
    if not copy:
        with suppress(OSError):
            os.link(path.resolve(), target)  # resolved: in Hugging Face's cache, files are symbolic links
            return 0
    shutil.copyfile(path, target)
    return path.stat().st_size


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder, hidden beside ``target``, and remove it when the block ends, however it ends.

    First it removes leftovers of killed processes; a folder that one of them had set aside comes back where it was.
    Work of living processes is known by its lock. Some network file systems have no locks: there nothing is removed.
    Missing parents of ``target`` are made, and removed again if they are empty in the end.

    Raises:
        UsageError: nothing can be written there.
        ResourceError: the disk is full.
    """
    place = Path(os.path.realpath(target))  # through a link: beside what it points to
    _recover(place)
    made = [parent for parent in place.parents if not parent.exists()]
    folder, lock = place.parent / f".{place.name}.{secrets.token_hex(8)}.work", None
    try:
        with _translate_errors(target):
            folder.mkdir(parents=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            lock_file(lock)
            (folder / NEW).mkdir()  # made last: others remove no folder without it
        yield folder / NEW
    finally:
        _leave(folder, place, lock)
        with suppress(OSError):
            for parent in made:  # goes as far up as they are empty
                parent.rmdir()


@contextmanager
def stage_folder(target: Path, *, force: bool = False) -> Iterator[Path]:
    """Give an empty folder to write into, and publish it as ``target`` when the block ends without an error.

    The folder lies in a :func:`work_folder`. On any error, Ctrl-C included, it is removed and the target
    is untouched. With ``force`` an existing target is replaced, and only at the end.

    Raises:
        UsageError: the target exists and ``force`` is false, or is no folder of llmc's, or cannot be written.
        ResourceError: the disk is full.
    """
    place = Path(os.path.realpath(target))
    _recover(place)
    refuse_to_overwrite(target, force)
    with work_folder(target) as staging:
        try:
            yield staging
        except OSError as error:  # an error of the caller's block; only a full disk is translated
            if error.errno in FULL:
                raise _full(target) from error
            raise
        with _translate_errors(target):
            sync_all(staging)
            refuse_to_overwrite(target, force)  # it may have appeared meanwhile
            _swap(staging, place, target)


@contextmanager
def replace_file(path: Path, prefix: str, *, synced: bool = True) -> Iterator[BinaryIO]:
    """Give a file to write, which takes the place of ``path`` when the block ends without an error.

    Until then it lies beside it under a name that begins with ``prefix``. Only its owner may read it. An OSError leaves
    nothing behind.
    """
    descriptor, staging = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(staging, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(staging)
        raise
    if synced:
        sync(path.parent)


def refuse_to_overwrite(target: Path, force: bool) -> None:
    """Check before any work that :func:`stage_folder` may publish to ``target``. Raises UsageError: the target exists
    and ``force`` is false, or is no folder of llmc's, or has a name for no folder."""
    refuse_bytes(target)
    if os.path.islink(os.path.realpath(target)):
        raise UsageError(f"{target} is a link to itself, by way of others perhaps; choose another output folder")
    with _translate_errors(target):
        if not target.exists():
            return
        if not force:
            raise UsageError(f"{target} exists; choose another output folder, or pass --force to replace it")
        ours = target.is_dir() and any((target / name).exists() for name in (BUNDLE_MANIFEST, EXPORT_MANIFEST))
        if not ours and not (target.is_dir() and not any(target.iterdir())):
            raise UsageError(f"{target} is not llmc's, so --force does not replace it; choose another output folder")
        # A checkpoint or notes that somebody keeps in there would go with the old folder.
        stages = {path.parent.name for path in target.glob(f"{STAGE_FOLDER.format('*')}/{BUNDLE_MANIFEST}")}
        others = {path.name for path in target.iterdir() if path.is_dir() or path.suffix not in OUR_SUFFIXES} - stages
        if others:
            raise UsageError(
                f"{target} also holds {min(others)!r}, which would be lost, so --force does not replace it; "
                "move that away or choose another output folder"
            )


def refuse_bytes(path: Path) -> None:
    """Refuse a path, as it is after links, that is not UTF-8: engines open files by names in UTF-8 only.
    Raises UsageError: with its bytes as escapes."""
    try:
        os.path.realpath(path).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{path}: the name is not UTF-8, which engines expect; choose another folder") from error


@contextmanager
def _translate_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise _full(target) from error
        raise UsageError(f"{target}: cannot write here ({error.strerror}); choose another output folder") from error


def _full(target: Path) -> ResourceError:
    return ResourceError(f"{target}: the disk is full; free some space and run again")


def lock_file(descriptor: int, *, shared: bool = False) -> bool | None:
    """Lock the file until it is closed; tells if that worked, None where file system or platform has no locks.

    A shared lock waits: the exclusive one is held only for a moment, to see whether this one exists.
    """
    try:
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None


def _recover(place: Path) -> None:
    """Clear away what killed processes left beside ``place``; a folder they had set aside comes back where it was."""
    names = re.compile(re.escape(f".{place.name}.") + r"[0-9a-f]{16}\.work")
    with suppress(OSError):  # there is no parent, or nobody may look into it
        for folder in place.parent.iterdir():
            if names.fullmatch(folder.name):
                _clear(folder, place)


def _clear(folder: Path, place: Path) -> None:
    """Remove a work folder, unless it is locked or will be at once, or holds other files."""
    with suppress(OSError):
        if folder.is_symlink() or not {LOCK} < set(os.listdir(folder)) <= {LOCK, NEW, OLD}:
            return
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            if lock_file(lock):
                _remove(folder, place)
        finally:
            os.close(lock)


def _leave(folder: Path, place: Path, lock: int | None) -> None:
    """Remove our own work folder and release its lock, even if interrupted once."""
    try:
        with suppress(OSError):
            try:
                _remove(folder, place)
            except KeyboardInterrupt:
                _remove(folder, place)
                raise
    finally:
        if lock is not None:
            os.close(lock)


def _remove(folder: Path, place: Path) -> None:
    """Remove a work folder, but first bring back the folder it set aside if the new one was never published."""
    new, old = folder / NEW, folder / OLD
    if new.exists() and old.exists() and not place.exists():
        old.rename(place)
    for left in (new, old):
        if left.exists():
            shutil.rmtree(left)
    (folder / LOCK).unlink(missing_ok=True)
    folder.rmdir()


def sync(path: Path) -> None:
    """Return when a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """:func:`sync` a folder and all that is in it."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def _swap(staging: Path, place: Path, target: Path) -> None:
    """Rename ``staging`` to the target, after setting aside what is there."""
    try:
        if place.exists():
            place.rename(staging.with_name(OLD))
        staging.rename(place)
    except OSError as error:
        if error.errno not in OVERTAKEN:
            raise
        raise UsageError(f"{target}: another process wrote there at the same time; run again") from error
    sync(place.parent)
