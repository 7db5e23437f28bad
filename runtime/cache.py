"""Work that is kept between runs: graphs compiled for this machine, self-tests passed, calibrations.

``$LLMC_CACHE``, else ``$XDG_CACHE_HOME/llmc``, else ``~/.cache/llmc``; below it a folder per kind, in it one entry (a
folder) per key. Everything in it can be made again, so it may be deleted at any time, also while llmc runs.
"""

import atexit
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from llmc.publish import sync, sync_all

log = logging.getLogger(__name__)

# Another process may be about to open, or still be filling, what it asked for a moment ago.
RECENT_S = 600.0
# What a killed process was writing; a living one does not take that long.
ABANDONED_S = 24 * 3600.0
STAGING = ".staging-"

_used: set[Path] = set()  # entries of this process, which it never prunes


def cache_root() -> Path:
    """The cache's folder, whether or not it exists or can be written."""
    if named := os.environ.get("LLMC_CACHE"):
        return Path(named)
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "llmc"
    return Path(os.path.expanduser("~")) / ".cache" / "llmc"


def writable() -> bool:
    """Whether what is written into :func:`cache_root` stays there; warns once where it cannot be written."""
    return _writable(cache_root())


def entry(kind: str, key: str) -> Path:
    """The folder for ``key`` among entries of ``kind``, marked as used now; it need not exist.

    Where the cache cannot be written the folder lies in a temporary one, which goes when this process ends.
    """
    path = (cache_root() if writable() else _temporary()) / kind / key
    _used.add(path)
    with suppress(OSError):
        os.utime(path)
    return path


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """Give an empty folder to write into, and make it the entry ``path`` when the block ends without an error.

    Whoever looks at ``path`` sees nothing or all of it. Of two that publish the same entry the first one wins.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=path.parent))
    try:
        yield staging
        sync_all(staging)
        with suppress(FileExistsError):
            _move(staging, path)
        sync(path.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove an entry: at once for whoever looks at it, whatever becomes of its files."""
    with suppress(OSError):
        aside = Path(tempfile.mkdtemp(prefix=STAGING, dir=path.parent))
        with suppress(OSError):
            path.rename(aside / path.name)
        shutil.rmtree(aside, ignore_errors=True)


def prune(kind: str, max_bytes: int) -> None:
    """Remove the least recently used entries of ``kind`` until ``max_bytes`` are kept.

    What this process asked for stays, and so does what any process used in the last :data:`RECENT_S`.
    """
    folder, now = cache_root() / kind, time.time()
    entries = [(_last_use(path), path) for path in _children(folder) if not path.name.startswith(STAGING)]
    for used, path in [(_last_use(path), path) for path in _children(folder) if path.name.startswith(STAGING)]:
        if now - used > ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)
    sizes = {path: _bytes(path) for _, path in entries}
    kept = sum(sizes.values())
    for used, path in sorted(entries):
        if kept <= max_bytes:
            return
        if path not in _used and now - used > RECENT_S:
            log.info("removing %s from the cache", path)
            remove(path)
            kept -= sizes[path]


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


def _move(staging: Path, path: Path) -> None:
    try:
        staging.rename(path)
    except OSError:
        if not path.is_dir():
            raise
        raise FileExistsError(path) from None


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
