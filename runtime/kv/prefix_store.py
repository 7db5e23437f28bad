"""Prefixes on disk, so that a restarted service need not compute them again."""

import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ResourceError
from llmc.runtime.host import threads
from llmc.runtime.kv.cache_file import (
    STAGING,
    CacheFile,
    Description,
    UnreadableError,
    check_owner,
    opened,
    possible_path,
    publish,
)

log = logging.getLogger(__name__)

# How often a file is marked as used while memory serves its blocks.
TOUCH_S = 60.0
# Nobody takes longer to write one file; its writer was killed.
ABANDONED_S = 600.0
# After a failed write the disk is left alone for so long.
PAUSE_S = 60.0
# A folder that changed so recently may change again without a new time stamp.
SETTLED_NS = 2_000_000_000

_T = TypeVar("_T")
_OUR_FOLDER = re.compile(r"[0-9a-f]{32}")
_OUR_FILE = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.kv")


@dataclass
class _Shelf:
    """The files of one key, as this process last saw them."""

    folder: Path
    listed_ns: int = -1
    files: dict[str, Description | None] = field(default_factory=dict)  # None: cannot be used
    places: dict[bytes, str] = field(default_factory=dict)  # chain hash -> file that has the block
    queued: set[bytes] = field(default_factory=set)  # chain hashes on their way to the disk
    touched: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, file: Description) -> None:
        self.files[name] = file
        self.places.update(dict.fromkeys(file.hashes, name))

    def drop(self, names: set[str]) -> None:
        self.files = {name: file for name, file in self.files.items() if name not in names}
        self.touched = {name: when for name, when in self.touched.items() if name not in names}
        self.places = {}
        for name, file in self.files.items():
            if file is not None:
                self.add(name, file)


@dataclass(frozen=True)
class _Job:
    """One file to write."""

    root: bytes
    parent: bytes
    ancestors: Sequence[bytes]
    hashes: Sequence[bytes]
    tokens: NDArray[np.int64]
    blocks: Sequence[NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


class PrefixStore:
    """Chains of cache blocks as files below ``folder``: a folder per key, a file per piece of a chain.

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
        self.folder = possible_path(folder)
        self.max_bytes = max_bytes
        self.pending_bytes = pending_bytes
        self._lock = threading.Condition()
        self._shelves: dict[bytes, _Shelf] = {}
        self._jobs: deque[_Job] = deque()
        self._waiting = 0  # bytes of the jobs
        self._thread: threading.Thread | None = None
        self._closed = False
        self._paused_until = 0.0
        self._said: set[str] = set()

    def load(self, root: bytes, hashes: Sequence[bytes], max_bytes: int) -> list[NDArray[Any]]:
        """The leading blocks of the chain ``hashes`` below ``root`` that are on disk and whole, in at most
        ``max_bytes``."""
        blocks: list[NDArray[Any]] = []
        with self._lock:
            shelf = self._listed(root)
            while len(blocks) < len(hashes) and (name := shelf.places.get(hashes[len(blocks)])):
                more = self._read(shelf, name, hashes[len(blocks) :], max_bytes - sum(b.nbytes for b in blocks))
                if more is None:
                    continue  # that file is gone from the shelf; another one may have the block too
                if not more:
                    break
                blocks += more
            self._touch(shelf, hashes[: len(blocks)])
        return blocks

    def touch(self, root: bytes, hashes: Sequence[bytes]) -> None:
        """Mark the files of a chain as used, as :meth:`load` does; at most once a minute per file."""
        with self._lock:
            self._touch(self._shelf(root), hashes)

    def put(
        self, root: bytes, hashes: Sequence[bytes], tokens: NDArray[np.int64], blocks: Sequence[NDArray[Any]]
    ) -> None:
        """Have what is not on disk of a chain written soon, unless too much waits already.

        Args:
            root: what :func:`root_hash` gives for the key.
            hashes: chain hashes of the blocks, the first block of the chain first.
            tokens: int64, as many per block.
            blocks: all of one shape and type; they must not change any more.
        """
        with self._lock:
            shelf = self._listed(root)
            absent = [chain not in shelf.places and chain not in shelf.queued for chain in hashes]
            if True not in absent:
                self._touch(shelf, hashes)
                return
            start = absent.index(True)
            end = absent.index(False, start) if False in absent[start:] else len(hashes)
            parent, size = hashes[start - 1] if start else root, len(tokens) // len(hashes)
            span = tokens[start * size : end * size]
            job = _Job(root, parent, hashes[:start], hashes[start:end], span, blocks[start:end])
            full = bool(self._jobs) and self._waiting + job.nbytes > self.pending_bytes
            if full or self._closed or job.nbytes > self.max_bytes or time.monotonic() < self._paused_until:
                return
            if self._thread is None:
                try:
                    self._thread = threads.start(self._work, "llmc-prefix-store", self._stop)
                except ResourceError as error:
                    self._pause(error)
                    return
            shelf.queued.update(job.hashes)
            self._jobs.append(job)
            self._waiting += job.nbytes
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

    def _shelf(self, root: bytes) -> _Shelf:
        if root not in self._shelves:
            self._shelves[root] = _Shelf(self.folder / root.hex())
        return self._shelves[root]

    def _listed(self, root: bytes) -> _Shelf:
        """The shelf, with what any process added or removed since."""
        shelf = self._shelf(root)
        try:
            changed_ns = _private(shelf.folder).st_mtime_ns
            if changed_ns == shelf.listed_ns:
                return shelf
            names = {name for name in os.listdir(shelf.folder) if self._is_ours(name)}
        except FileNotFoundError:
            changed_ns, names = -1, set()
        except (OSError, UnreadableError) as error:
            self._warn("others", "%s is ignored: %s", shelf.folder, error)
            changed_ns, names = -1, set()
        if gone := set(shelf.files) - names:
            shelf.drop(gone)
        for name in names - set(shelf.files):
            self._learn(shelf, name)
        shelf.listed_ns = changed_ns if time.time_ns() - changed_ns > SETTLED_NS else -1
        return shelf

    def _is_ours(self, name: str) -> bool:
        ours = _OUR_FILE.fullmatch(name) is not None
        if not ours and not name.startswith(STAGING):
            self._warn("foreign", "%s in %s is no file of llmc's and is ignored", name, self.folder)
        return ours

    def _learn(self, shelf: _Shelf, name: str) -> None:
        def checked(file: CacheFile) -> Description:
            about = file.description
            if (about.kind, about.key.hex(), _name(about)) != ("prefix", shelf.folder.name, name):
                raise UnreadableError("it lies under another name than its own")
            return about

        if (about := self._examined(shelf, name, checked)) is not None:
            shelf.add(name, about)

    def _refuse(self, path: Path, error: UnreadableError) -> None:
        if error.fault != "damaged":
            self._warn(error.fault, "%s is ignored: %s", path, error)
            return
        self._warn("damaged", "%s is damaged and is removed: %s", path, error)
        with suppress(OSError):
            path.unlink()

    def _read(self, shelf: _Shelf, name: str, wanted: Sequence[bytes], max_bytes: int) -> list[NDArray[Any]] | None:
        """The leading wanted blocks, as far as the file has them in a row; None if it cannot be used."""

        def blocks(file: CacheFile) -> list[NDArray[Any]]:
            if wanted[0] not in file.description.hashes:  # another process may have written it anew
                raise UnreadableError("it lies under another name than its own")
            position = file.description.hashes.index(wanted[0])
            return file.read(position, file.count(wanted, position, max_bytes))

        return self._examined(shelf, name, blocks)

    def _examined(self, shelf: _Shelf, name: str, look: Callable[[CacheFile], _T]) -> _T | None:
        """The answer of ``look`` about a file; None if it cannot be used, which the shelf remembers."""
        path = shelf.folder / name
        try:
            with opened(path, follow_symlinks=False) as file:
                return look(file)
        except FileNotFoundError:
            shelf.drop({name})  # another process removed it
            return None
        except (OSError, MemoryError) as error:
            self._warn("read", "%s cannot be read (%s); it is ignored", path, error)
        except UnreadableError as error:
            self._refuse(path, error)
        shelf.drop({name})
        shelf.files[name] = None  # it may still be there
        return None

    def _touch(self, shelf: _Shelf, hashes: Sequence[bytes], *, now: bool = False) -> None:
        """The first file of a chain gets the newest time: what only continues it is of no use without it."""
        names = list(dict.fromkeys(shelf.places[chain] for chain in hashes if chain in shelf.places))
        clock = time.monotonic()
        if not now and all(clock - shelf.touched.get(name, -TOUCH_S) < TOUCH_S for name in names):
            return
        stamp = time.time_ns()
        for age, name in enumerate(names):
            shelf.touched[name] = clock
            with suppress(OSError):
                os.utime(shelf.folder / name, ns=(stamp - age * 1000, stamp - age * 1000))

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
                    self._shelf(job.root).queued.difference_update(job.hashes)
                    self._jobs.popleft()
                    self._waiting -= job.nbytes
                    self._lock.notify_all()

    def _pause(self, error: Exception) -> None:
        self._paused_until = time.monotonic() + PAUSE_S
        self._warn("write", "prefixes cannot be written to %s (%s); memory goes on", self.folder, error)

    def _write(self, job: _Job) -> None:
        about = Description.of(
            "prefix", job.root, job.parent, job.tokens, job.blocks, len(job.tokens) // len(job.blocks)
        )
        shelf, offset = self._shelf(job.root), len(about.encoded())
        name = _name(about)
        if offset + job.nbytes > self.max_bytes:
            return
        self._prune(self.max_bytes - offset - job.nbytes)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        shelf.folder.mkdir(mode=0o700, exist_ok=True)
        _private(shelf.folder)
        publish(shelf.folder / name, about, job.blocks)
        with self._lock:
            shelf.add(name, about)
            self._touch(shelf, [*job.ancestors, *job.hashes], now=True)
        self._prune(self.max_bytes)  # another process may have written at the same time

    def _prune(self, kept: int) -> None:
        """Remove this user's least recently used files until ``kept`` bytes remain, and what killed writers left."""
        found = []
        for folder in _own_entries(self.folder):
            if _OUR_FOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                for entry in _own_entries(Path(folder.path)):
                    with suppress(OSError):
                        if entry.is_file(follow_symlinks=False):
                            about = entry.stat(follow_symlinks=False)
                            found.append((about.st_mtime_ns, about.st_size, Path(entry.path)))
        total = 0
        for used_ns, size, path in sorted(found, reverse=True):  # newest first
            if path.name.startswith(STAGING):
                unwanted = time.time_ns() - used_ns > ABANDONED_S * 1e9
            elif _OUR_FILE.fullmatch(path.name):
                unwanted = total + size > kept
                total = kept if unwanted else total + size  # nothing older stays either
            else:
                continue
            if unwanted:
                with suppress(OSError):
                    path.unlink()

    def _warn(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.warning(message, *values)


def _name(about: Description) -> str:
    """First and last block: files of one name have blocks of the same tokens."""
    return f"{about.hashes[0].hex()}-{about.hashes[-1].hex()}.kv"


def _is_own(status: os.stat_result) -> bool:
    """Tell whether this user owns it; nobody can tell on Windows."""
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()


def _private(folder: Path) -> os.stat_result:
    """Status of a folder, closed to others first; UnreadableError if it is none, or others may have written in it."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise UnreadableError("it is no folder", "foreign")
    if _is_own(status) and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        os.chmod(folder, 0o700)
        status = os.lstat(folder)
    check_owner(status)
    return status


def _own_entries(folder: Path) -> list[os.DirEntry[str]]:
    """Entries of a folder that this user owns; none if nobody may look."""
    own: list[os.DirEntry[str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):  # another process removed it
                    if _is_own(entry.stat(follow_symlinks=False)):
                        own.append(entry)
    except OSError:
        pass
    return own
