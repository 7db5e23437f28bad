"""Results kept between runs: passed self-tests, calibrations, compiled kernels and kernel timings.

The folder is ``$LLMC_CACHE``, else ``$XDG_CACHE_HOME/llmc``, else ``~/.cache/llmc``; it has one folder per kind, with
one entry (a folder) per key. Every entry can be made again, so the cache may be deleted at any time, also while llmc
runs.
"""

import atexit
import logging
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from llmc.publish import lock_file
from llmc.strict import open_regular

log = logging.getLogger(__name__)

# Another process may just have asked for an entry, and be about to open or fill it.
RECENT_S = 600.0
STAGING = ".staging-"
ENTRY_BYTES = 1000  # added to an entry's size: some are empty
PASSED_BYTES = 1_000_000  # for each kind of :func:`once`

_used: set[Path] = set()  # entries of this process, which it never removes


def cache_root() -> Path:
    """The cache's folder, whether or not it exists or can be written."""
    if named := os.environ.get("LLMC_CACHE"):
        return Path(named).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "llmc"
    except RuntimeError:  # an account without a home
        return Path(os.devnull, "llmc")  # which cannot be written


def entry(kind: str, key: str) -> Path:
    """The folder for ``key`` among entries of ``kind``, marked as used now; it need not exist.

    If the cache cannot be written, the folder is a temporary one, deleted when this process ends.
    """
    root = cache_root()
    path = (root if _writable(root) else _temporary()) / kind / key
    _used.add(path)
    with suppress(OSError):
        os.utime(path)
    return path


class Hold:
    """Protects an existing entry from :func:`prune` of any process, until it is released or garbage collected.

    It is a lock on the folder, which ends with the process. Some network file systems have no locks: there an entry is
    only protected for :data:`RECENT_S` after it was asked for.
    """

    def __init__(self, path: Path) -> None:
        self._release: Callable[[], object] = lambda: None
        with suppress(OSError):  # it does not exist
            descriptor = os.open(path, os.O_RDONLY)
            self._release = weakref.finalize(self, _release, descriptor)
            lock_file(descriptor, shared=True)

    def release(self) -> None:
        """Release the entry, marked as used now. A second call does nothing."""
        self._release()


@contextmanager
def write_entry(path: Path) -> Iterator[Path]:
    """Yield the name of a file to write; it replaces ``path`` if the block ends without an error.

    It is in the same folder, which must exist. :func:`prune` removes the files of killed processes.
    """
    staging = path.with_name(f"{STAGING}{secrets.token_hex(8)}{path.suffix}")
    staging.touch(exist_ok=False)
    hold = Hold(staging)
    try:
        yield staging
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
        hold.release()


def read_file(path: Path) -> bytes:
    """Content of an entry's file; empty if it cannot be read."""
    with suppress(OSError, ValueError), open_regular(path) as file:
        return file.read()
    return b""


def keep_file(path: Path, content: bytes, max_bytes: int) -> None:
    """Write an entry's file and :func:`prune` its kind; a failure is only logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_entry(path) as staging:
            staging.write_bytes(content)
        prune(path.parent.parent.name, max_bytes)
    except OSError as error:
        log.info("%s cannot be kept (%s)", path, error)


def once(kind: str, key: str, check: Callable[[], object], *, always: bool = False) -> None:
    """Call ``check`` unless it is known to have passed, or ``always``; a failure is not remembered."""
    path = entry(kind, key)
    if path.exists() and not always:
        return
    check()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("the result of a check is not kept (%s)", error)
    prune(kind, PASSED_BYTES)


def remove(path: Path) -> None:
    """Remove an entry: for others it vanishes at once, even if deleting its files fails."""
    with suppress(OSError):
        aside = Path(tempfile.mkdtemp(prefix=STAGING, dir=path.parent))
        with suppress(OSError):
            path.rename(aside / path.name)
        shutil.rmtree(aside, ignore_errors=True)


def prune(kind: str, max_bytes: int) -> None:
    """Remove the leftovers of killed processes, and the least recently used entries beyond ``max_bytes``, of ``kind``.

    Entries that this process asked for stay, and those that another one holds or used in the last :data:`RECENT_S`.
    """
    with suppress(FileNotFoundError):  # other processes remove and publish, too: the next call prunes the rest
        folder = cache_root() / kind
        for path in [*folder.glob(f"{STAGING}*"), *folder.glob(f"[!.]*/{STAGING}*")]:
            _remove_unused(path)
        sizes = {path: _bytes(path) for path in folder.glob("[!.]*")}
        kept = sum(sizes.values())
        for path in sorted(sizes, key=_last_use):
            if kept > max_bytes and path not in _used and _remove_unused(path):
                kept -= sizes[path]


def _remove_unused(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        if lock_file(descriptor) is False or time.time() - _last_use(path) <= RECENT_S:
            return False
        log.info("removing %s from the cache", path)
        remove(path)
        return True
    finally:
        os.close(descriptor)


def _release(descriptor: int) -> None:
    with suppress(OSError):
        os.utime(descriptor)
    os.close(descriptor)


@cache
def _writable(root: Path) -> bool:
    """True if files written there persist; otherwise warn once."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return True
    except OSError as error:
        log.warning("the cache %s cannot be written (%s): nothing is kept; set LLMC_CACHE", root, error.strerror)
        return False


@cache
def _temporary() -> Path:
    folder = tempfile.mkdtemp(prefix="llmc-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _bytes(path: Path) -> int:
    total = ENTRY_BYTES
    for file in path.rglob("*"):
        with suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total
