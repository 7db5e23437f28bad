"""Work that is kept between runs: self-tests passed, calibrations.

``$LLMC_CACHE``, else ``$XDG_CACHE_HOME/llmc``, else ``~/.cache/llmc``; below it a folder per kind, in it one entry (a
folder) per key. Everything in it can be made again, so it may be deleted at any time, also while llmc runs.

Each kind has a bound of its own; ``$LLMC_CACHE_BYTES``, where it is set, is the bound of all kinds together.
"""

import atexit
import logging
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from llmc.errors import UsageError
from llmc.publish import locked, sync, sync_all

log = logging.getLogger(__name__)

# Another process may be about to open, or still be filling, what it asked for a moment ago.
RECENT_S = 600.0
# What a killed process was writing, where no lock can tell; a living one does not take that long.
ABANDONED_S = 24 * 3600.0
STAGING = ".staging-"
BOUND = "LLMC_CACHE_BYTES"
# What counts against that bound. Not whatever lies in the folder: somebody may have named one that holds more.
KINDS = (
    "auto",
    "calibration",
    "imported",
    "integrity",
    "kernels",
    "reference",
    "selftest",
    "timing",
    "tokenizer",
)

_used: set[Path] = set()  # entries of this process, which it never prunes


def cache_root() -> Path:
    """The cache's folder, whether or not it exists or can be written."""
    if named := os.environ.get("LLMC_CACHE"):
        return Path(named)
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "llmc"
    return Path(os.path.expanduser("~")) / ".cache" / "llmc"


def writable() -> bool:
    """True if what is written into :func:`cache_root` stays there; warns once where it cannot be written."""
    return _writable(cache_root())


def bound(default: int) -> int:
    """The bytes that may be kept: ``$LLMC_CACHE_BYTES``, or ``default`` where it is not set.

    Raises:
        UsageError: it is no number of bytes.
    """
    text = os.environ.get(BOUND, str(default))
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{BOUND} is {text!r}, expected a number of bytes")
    return int(text)


def entry(kind: str, key: str) -> Path:
    """The folder for ``key`` among entries of ``kind``, marked as used now; it need not exist.

    Where the cache cannot be written the folder lies in a temporary one, which goes when this process ends.

    Raises:
        UsageError: ``$LLMC_CACHE_BYTES`` is no number of bytes.
    """
    bound(0)  # refused before the work whose results would be kept
    path = (cache_root() if writable() else _temporary()) / kind / key
    _used.add(path)
    with suppress(OSError):
        os.utime(path)
    return path


class Hold:
    """Keeps an entry that exists from :func:`prune` of any process, until it is released, or goes with its owner.

    It is a lock on the folder, which ends with the process. Some network file systems have none: there an entry is
    only safe for :data:`RECENT_S` after it was asked for.
    """

    def __init__(self, path: Path) -> None:
        self._release: Callable[[], object] = lambda: None
        with suppress(OSError):  # it does not exist, or folders cannot be opened here
            descriptor = os.open(path, os.O_RDONLY)
            self._release = weakref.finalize(self, _release, descriptor)
            locked(descriptor, shared=True)

    def release(self) -> None:
        """Let it go, marked as used now. A second call does nothing."""
        self._release()


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Give the name of an empty file to write, which takes the place of ``path`` when the block ends without an error.

    It lies in the same folder, which must exist. What killed processes leave there :func:`prune` clears away.

    Raises:
        OSError: it cannot be written; nothing is left behind.
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


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """Give an empty folder to write into, and make it the entry ``path`` when the block ends without an error.

    Whoever looks at ``path`` sees nothing or all of it. Of two that publish the same entry the first one wins.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=path.parent))
    hold = Hold(staging)
    try:
        yield staging
        sync_all(staging)
        try:
            staging.rename(path)
        except OSError:
            if not path.is_dir():
                raise
        sync(path.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        hold.release()


def remove(path: Path) -> None:
    """Remove an entry: at once for whoever looks at it, whatever becomes of its files."""
    with suppress(OSError):
        aside = Path(tempfile.mkdtemp(prefix=STAGING, dir=path.parent))
        with suppress(OSError):
            path.rename(aside / path.name)
        shutil.rmtree(aside, ignore_errors=True)


def prune(kind: str, max_bytes: int) -> None:
    """Remove the least recently used entries of ``kind`` until ``max_bytes`` are kept, and what killed processes left.

    Where ``$LLMC_CACHE_BYTES`` is set, then also those of all :data:`KINDS` until they keep to it. What this process
    asked for stays, and so does what another one holds, or used in the last :data:`RECENT_S`.

    Raises:
        UsageError: ``$LLMC_CACHE_BYTES`` is no number of bytes.
    """
    root = cache_root()
    folders = [root / each for each in sorted({kind, *KINDS})]
    for folder in folders:
        _sweep(folder)
    _shrink([root / kind], max_bytes)
    if BOUND in os.environ:
        _shrink(folders, bound(0))


def _shrink(folders: Iterable[Path], max_bytes: int) -> None:
    """Remove the least recently used entries of ``folders`` that nobody uses until ``max_bytes`` are kept."""
    entries = [path for folder in folders for path in _children(folder) if not path.name.startswith(STAGING)]
    sizes = {path: _bytes(path) for path in entries}
    kept = sum(sizes.values())
    for _, path in sorted((_last_use(path), path) for path in entries):
        if kept <= max_bytes:
            return
        if path not in _used and _removed(path):
            kept -= sizes[path]


def _removed(path: Path) -> bool:
    """Remove an entry unless another process uses it; whether it did."""
    with _claimed(path) as free:
        if free is False or time.time() - _last_use(path) <= RECENT_S:
            return False
        log.info("removing %s from the cache", path)
        remove(path)
        return True


def _sweep(folder: Path) -> None:
    """Clear away what killed processes left among the entries of ``folder``, and in them."""
    for path in _children(folder):
        if path.name.startswith(STAGING):
            _clear(path)
        elif left := [each for each in _children(path) if each.name.startswith(STAGING)]:
            with suppress(OSError):
                used = path.stat()
                for each in left:
                    _clear(each)
                os.utime(path, ns=(used.st_atime_ns, used.st_mtime_ns))  # clearing is no use of the entry


def _clear(path: Path) -> None:
    with _claimed(path) as free:
        patience = ABANDONED_S if free is None else RECENT_S  # it may not be locked yet
        if free is False or time.time() - _last_use(path) <= patience:
            return
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


@contextmanager
def _claimed(path: Path) -> Iterator[bool | None]:
    """Yield true if nobody holds ``path``, nor can begin to in this block; None where no lock tells."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        yield locked(descriptor)
    finally:
        os.close(descriptor)


def _release(descriptor: int) -> None:
    with suppress(OSError):
        os.utime(descriptor)
    os.close(descriptor)


@cache
def _writable(root: Path) -> bool:
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


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _bytes(path: Path) -> int:
    total = 0
    for file in [path, *path.rglob("*")]:
        with suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total
