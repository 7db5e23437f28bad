"""Prefixes on disk, so that a restarted service need not compute them again: a file per block, named by its chain."""

import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from llmc.errors import ResourceError, UsageError
from llmc.runtime.host import threads
from llmc.runtime.kv.cache_file import HEAD_BYTES, STAGING, UnreadableError, check_owner, read_block, write_block

log = logging.getLogger(__name__)

# Interval at which files are marked as used and bytes on disk counted: other processes write there, too.
TOUCH_S = 60.0
# No process takes longer to write one file; its writer was killed.
ABANDONED_S = 600.0
# Pause after a failed write.
PAUSE_S = 60.0

_OUR_FOLDER = re.compile(r"[0-9a-f]{32}")
_OUR_FILE = re.compile(r"[0-9a-f]{32}(-[0-9a-f]{32})?\.kv")  # those with two names are an older llmc's


@dataclass(frozen=True)
class _Job:
    """Blocks to be written."""

    root: bytes
    hashes: Sequence[bytes]  # of the whole chain
    absent: dict[bytes, NDArray[Any]]  # the blocks by their chain hashes

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.absent.values())


class PrefixStore:
    """Blocks of the cache as files below ``folder``: a folder per key, a file per block.

    Several processes of one user may share the folder, and it may be deleted at any time. Nothing here fails a request:
    what is damaged, cannot be read or may have been written by others counts as absent, what cannot be written is left
    out, and the log says so once. Only their owner may read the files. The calling thread reads; a thread of the
    store's own writes.

    Args:
        folder: made when the first prefix is written.
        max_bytes: for all files below it, of all keys; the least recently used go first.
        pending_bytes: may wait to be written; beyond it a prefix is not stored.
    """

    def __init__(self, folder: Path, max_bytes: int, *, pending_bytes: int) -> None:
        self.folder = _possible_path(folder)
        self.max_bytes = max_bytes
        self.pending_bytes = pending_bytes
        self._lock = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._paused_until = 0.0
        self._known: set[bytes] = set()  # blocks that are on disk, or on their way, as of less than a minute ago
        self._known_until = 0.0
        self._used: int | None = None  # bytes on disk, None where they must be counted
        self._said: set[str] = set()

    def load(self, root: bytes, hashes: Sequence[bytes], max_bytes: int) -> list[NDArray[Any]]:
        """The leading blocks of the chain ``hashes`` below ``root`` that are on disk and whole, in at most
        ``max_bytes``."""
        blocks: list[NDArray[Any]] = []
        try:
            _close_to_others(self._path(root))
        except FileNotFoundError:
            return blocks
        except (OSError, UnreadableError) as error:
            self._warn("folder", "%s is ignored: %s", self._path(root), error)
            return blocks
        for chain in hashes:
            block = self._read(root, chain, max_bytes)
            if block is None:
                break
            blocks.append(block)
            max_bytes -= block.nbytes
        self.touch(root, hashes[: len(blocks)])
        return blocks

    def touch(self, root: bytes, hashes: Sequence[bytes]) -> None:
        """Mark the blocks of a chain as used; at most once a minute per file."""
        with self._lock:
            self._find_absent(root, hashes)

    def put(self, root: bytes, hashes: Sequence[bytes], blocks: Sequence[NDArray[Any]]) -> None:
        """Have what is not on disk of a chain written soon, unless too much waits already.

        Args:
            root: what :func:`root_hash` gives for the key.
            hashes: chain hashes of the blocks, the first block of the chain first.
            blocks: all of one shape and type; they must not change any more.
        """
        with self._lock:
            absent = {hashes[i]: blocks[i] for i in self._find_absent(root, hashes)}
            job = _Job(root, hashes, absent)
            full = bool(self._jobs) and sum(each.nbytes for each in [*self._jobs, job]) > self.pending_bytes
            if not absent or full or self._closed or time.monotonic() < self._paused_until:
                return
            try:
                self._thread = self._thread or threads.start(self._work, "llmc-prefix-store", self._stop)
            except ResourceError as error:
                self._pause(error)
                return
            self._jobs.append(job)
            self._known.update(hashes)
            self._lock.notify_all()

    def close(self) -> None:
        """Write what waits, then take nothing more. A second call does nothing."""
        self._stop()
        if self._thread is not None:
            self._thread.join()

    def _stop(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def _path(self, root: bytes, chain: bytes | None = None) -> Path:
        folder = self.folder / root.hex()
        return folder if chain is None else folder / f"{chain.hex()}.kv"

    def _find_absent(self, root: bytes, hashes: Sequence[bytes]) -> list[int]:
        """Places of the blocks that are not on disk. The others are marked as used: the first of a chain as the last
        one, for its successors are of no use without it."""
        if time.monotonic() >= self._known_until:
            self._known_until = time.monotonic() + TOUCH_S
            self._known = {chain for job in self._jobs for chain in job.hashes}
            self._used = None
        absent, stamp = [], time.time_ns()
        for age, chain in enumerate(hashes):
            if chain in self._known:
                continue
            try:
                os.utime(self._path(root, chain), ns=(stamp - age * 1000, stamp - age * 1000), follow_symlinks=False)
                self._known.add(chain)
            except OSError:
                absent.append(age)
        return absent

    def _read(self, root: bytes, chain: bytes, max_bytes: int) -> NDArray[Any] | None:
        path = self._path(root, chain)
        try:
            return read_block(path, root, chain, max_bytes)
        except FileNotFoundError:
            pass
        except (OSError, MemoryError) as error:
            self._warn("read", "%s cannot be read (%s); it is ignored", path, error)
        except UnreadableError as error:
            if error.damaged:
                self._warn("damaged", "%s is damaged and is removed: %s", path, error)
                self._remove(path)
            else:
                self._warn("foreign", "%s is ignored: %s", path, error)
        return None

    def _remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()
        self._known.clear()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs[0]
            try:
                if time.monotonic() >= self._paused_until:
                    self._write(job)
            except Exception as error:  # noqa: BLE001  # whatever it is, memory goes on
                self._pause(error)
            finally:
                with self._lock:
                    self._jobs.popleft()
                    self._known.difference_update(job.hashes)
                    self._find_absent(job.root, job.hashes)
                    self._lock.notify_all()

    def _pause(self, error: Exception) -> None:
        self._paused_until = time.monotonic() + PAUSE_S
        self._warn("write", "prefixes cannot be written to %s (%s); memory goes on", self.folder, error)

    def _write(self, job: _Job) -> None:
        size = job.nbytes + len(job.absent) * HEAD_BYTES
        if size > self.max_bytes:
            return
        if self._used is None or self._used + size > self.max_bytes:
            self._used = self._prune(self.max_bytes - size)
        self._used += size
        folder = self._path(job.root)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _close_to_others(folder)
        for chain, block in job.absent.items():
            write_block(self._path(job.root, chain), job.root, chain, block)

    def _prune(self, kept: int) -> int:
        """Remove this user's least recently used files until ``kept`` bytes remain, and what killed writers left."""
        found = []
        for folder in _list_own_entries(self.folder):
            if _OUR_FOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                for entry in _list_own_entries(Path(folder.path)):
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode):
                        found.append((about.st_mtime_ns, about.st_size, Path(entry.path)))
        total, is_full = 0, False
        for used_ns, size, path in sorted(found, reverse=True):  # newest first
            if path.name.startswith(STAGING) and time.time_ns() - used_ns > ABANDONED_S * 1e9:
                self._remove(path)
            elif _OUR_FILE.fullmatch(path.name):
                is_full = is_full or total + size > kept  # nothing older stays either
                if is_full:
                    self._remove(path)
                else:
                    total += size
        return total

    def _warn(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.warning(message, *values)


def _possible_path(path: Path) -> Path:
    """``path``, or UsageError if no folder can have this name."""
    try:
        encoded = os.fsencode(path)
    except (TypeError, UnicodeEncodeError) as error:
        raise UsageError("prefix_cache_folder", f"is {path!r:.60}, expected a path") from error
    if b"\0" in encoded:
        raise UsageError(
            "prefix_cache_folder", f"is {str(path)!r}, which holds a NUL character", "leave the character out"
        )
    return Path(path)


def _close_to_others(folder: Path) -> None:
    """Make a folder this user's alone; UnreadableError if it is none, or others may have written in it."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise UnreadableError("it is no folder", damaged=False)
    if status.st_uid == os.geteuid() and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        os.chmod(folder, 0o700)
        status = os.lstat(folder)
    check_owner(status)


def _list_own_entries(folder: Path) -> list[os.DirEntry[str]]:
    own: list[os.DirEntry[str]] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # another process removed it
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    own.append(entry)
    return own
