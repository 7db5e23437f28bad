"""Publish folders atomically: write beside the target, sync, then rename, so that the target is complete or absent.

An unfinished folder is in a hidden work folder beside the target, ``.NAME.NUMBER.work``. Its lock ends with its
process, so the next process can tell leftovers of a killed one from work in progress.
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

# Suffixes of the files in llmc's folders; other files belong to the user.
OUR_SUFFIXES = (".json", ".onnx", ".bin", ".plan", ".safetensors", ".gguf", ".jinja", ".html")
FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of a step if its folder appeared or vanished since the step before.
OVERTAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
# Contents of a work folder: its lock, the new folder, and the folder that it replaces.
LOCK, NEW, OLD = "lock", "new", "old"


def file_entries(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    return {name: FileEntry((folder / name).stat().st_size, sha256_file(folder / name)) for name in names}


def link(path: Path, target: Path, copy: bool = False) -> int:
    """Hard-link a file, or copy it if ``copy`` is True or a link is impossible; return the number of bytes copied."""
    if not copy:
        with suppress(OSError):
            os.link(path.resolve(), target)  # resolved: files in Hugging Face's cache are symbolic links
            return 0
    shutil.copyfile(path, target)
    return path.stat().st_size


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """Yield an empty hidden folder beside ``target``; remove it when the block ends, whatever happens.

    First remove leftovers of killed processes; a folder that one of them had set aside is put back. Locks show the work
    of living processes; on network file systems without locks nothing is removed. Missing parents of ``target`` are
    created, and removed if they are empty in the end.

    Raises:
        UsageError: the folder cannot be written.
        ResourceError: the disk is full.
    """
    target_path = Path(os.path.realpath(target))  # for a link: beside its target
    recover(target_path)
    created = [parent for parent in target_path.parents if not parent.exists()]
    folder, lock = target_path.parent / f".{target_path.name}.{secrets.token_hex(8)}.work", None
    try:
        with _translate_errors(target):
            folder.mkdir(parents=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            lock_file(lock)
            (folder / NEW).mkdir()  # last: other processes remove no work folder without it
        yield folder / NEW
    finally:
        _leave(folder, target_path, lock)
        with suppress(OSError):
            for parent in created:  # stops at the first one that is not empty
                parent.rmdir()


@contextmanager
def staging_folder(target: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write into; publish it as ``target`` when the block ends without an error.

    The folder is in a :func:`work_folder`. On any error, Ctrl-C included, it is removed and the target is untouched.
    With ``force`` an existing target is replaced, at the very end.

    Raises:
        UsageError: the target exists and ``force`` is false, or is not a folder of llmc's, or cannot be written.
        ResourceError: the disk is full.
    """
    target_path = Path(os.path.realpath(target))
    recover(target_path)
    refuse_to_overwrite(target, force)
    with work_folder(target) as staging:
        try:
            yield staging
        except OSError as error:  # raised in the caller's block; only a full disk is translated
            if error.errno in FULL:
                raise _full(target) from error
            raise
        with _translate_errors(target):
            sync_all(staging)
            refuse_to_overwrite(target, force)  # it may have appeared meanwhile
            _swap(staging, target_path, target)


@contextmanager
def replace_file(path: Path, prefix: str, *, synced: bool = True) -> Iterator[BinaryIO]:
    """Yield a file to write; it replaces ``path`` when the block ends without an error.

    Until then it is in the same folder, with a name that begins with ``prefix``. Only its owner may read it. It is
    removed after an OSError.
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
    """Check before any work that :func:`staging_folder` may publish to ``target``. Raises UsageError: the target exists
    and ``force`` is false, or is not a folder of llmc's, or its name is not valid for a folder."""
    refuse_bytes(target)
    if os.path.islink(os.path.realpath(target)):
        raise UsageError(
            "output", f"{target} is a link to itself, directly or through others", "choose another output folder"
        )
    with _translate_errors(target):
        if not target.exists():
            return
        if not force:
            raise UsageError(
                "output", f"{target} exists", "choose another output folder, or pass --force to replace it"
            )
        ours = target.is_dir() and any((target / name).exists() for name in (BUNDLE_MANIFEST, EXPORT_MANIFEST))
        if not ours and not (target.is_dir() and not any(target.iterdir())):
            raise UsageError(
                "output", f"{target} is not llmc's, so --force does not replace it", "choose another output folder"
            )
        # A user's checkpoint or notes in the old folder would be deleted with it.
        stages = {path.parent.name for path in target.glob(f"{STAGE_FOLDER.format('*')}/{BUNDLE_MANIFEST}")}
        others = {path.name for path in target.iterdir() if path.is_dir() or path.suffix not in OUR_SUFFIXES} - stages
        if others:
            raise UsageError(
                "output",
                f"{target} also holds {min(others)!r}, which would be lost, so --force does not replace it",
                "move that away or choose another output folder",
            )


def refuse_bytes(path: Path) -> None:
    """Raise UsageError for a path, after links, that is not UTF-8: engines open files only by UTF-8 names."""
    try:
        os.path.realpath(path).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError("output", f"{path} is not UTF-8, which engines expect", "choose another folder") from error


@contextmanager
def _translate_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise _full(target) from error
        raise UsageError(
            "output", f"{target} cannot be written ({error.strerror})", "choose another output folder"
        ) from error


def _full(target: Path) -> ResourceError:
    return ResourceError("the disk is full", "free some space and run again", path=target)


def lock_file(descriptor: int, *, shared: bool = False) -> bool | None:
    """Lock the file until it is closed; True if that worked, None if the file system or platform has no locks.

    A shared lock waits: an exclusive one is only held briefly, to test for a lock.
    """
    try:
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None


def recover(target_path: Path) -> None:
    """Remove leftovers of killed processes beside ``target_path``; put back a folder that one of them had set aside."""
    names = re.compile(re.escape(f".{target_path.name}.") + r"[0-9a-f]{16}\.work")
    with suppress(OSError):  # the parent is missing or cannot be read
        for folder in target_path.parent.iterdir():
            if names.fullmatch(folder.name):
                _clear(folder, target_path)


def _clear(folder: Path, target_path: Path) -> None:
    """Remove a work folder, unless it is locked, or about to be, or holds other files."""
    with suppress(OSError):
        if folder.is_symlink() or not {LOCK} < set(os.listdir(folder)) <= {LOCK, NEW, OLD}:
            return
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            if lock_file(lock):
                _remove(folder, target_path)
        finally:
            os.close(lock)


def _leave(folder: Path, target_path: Path, lock: int | None) -> None:
    """Remove our own work folder and release its lock, even if interrupted once."""
    try:
        with suppress(OSError):
            try:
                _remove(folder, target_path)
            except KeyboardInterrupt:
                _remove(folder, target_path)
                raise
    finally:
        if lock is not None:
            os.close(lock)


def _remove(folder: Path, target_path: Path) -> None:
    """Remove a work folder; first put back the folder it set aside, if the new one was never published."""
    new, old = folder / NEW, folder / OLD
    if new.exists() and old.exists() and not target_path.exists():
        old.rename(target_path)
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
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def _swap(staging: Path, target_path: Path, target: Path) -> None:
    """Set an existing target aside, and rename ``staging`` to the target."""
    try:
        if target_path.exists():
            target_path.rename(staging.with_name(OLD))
        staging.rename(target_path)
    except OSError as error:
        if error.errno not in OVERTAKEN:
            raise
        raise UsageError("output", f"{target} was written by another process at the same time", "run again") from error
    sync(target_path.parent)
