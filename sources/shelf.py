"""The cache's bundles: where a source's bundle is, locking it while it is built, listing and removing bundles."""

import glob
import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llmc import __version__
from llmc.bundle import GRAPH_CONTRACT_VERSION, SCHEMA_VERSION, read_bundle
from llmc.errors import BundleError, UsageError, format_name
from llmc.publish import OUR_SUFFIXES, lock_file, recover
from llmc.runtime.host import disk_cache
from llmc.runtime.host.machine import saturates
from llmc.sources import Located

DIGITS = 8  # of each of the two hashes that end a bundle's name
MOST_READABLE = 80  # characters before them


@dataclass(frozen=True)
class Shelved:
    """A bundle in the cache."""

    name: str
    path: Path
    model: str | None  # None, as precision is, if this llmc cannot read the bundle
    precision: str | None
    size: int  # bytes on disk
    mean_kl: float | None  # from the unquantized model, the larger one of both phases; None if it was not measured
    used: float  # seconds since the epoch when it was last asked for


def shelf() -> Path:
    """The folder of the cache's bundles; it need not exist."""
    return disk_cache.cache_root() / "bundles"


def place_of(source: Located) -> Path:
    """The folder for a source's bundle.

    Its name ends with two hashes: of the source's name and the CPU's kind; and of the state of its files (names, sizes,
    times of change) and of llmc's version. Bundles that differ in the second one alone are of older states.
    """
    is_path = Path(source.name).exists()
    named = str(source.path.resolve()) if is_path else source.name
    readable = re.sub(r"[^\w.-]+", "-", Path(named).name.removesuffix(".gguf") if is_path else named, flags=re.ASCII)
    root = source.path if source.path.is_dir() else source.path.parent
    files = sorted(file for file in _files_of(source.path) if file.suffix in OUR_SUFFIXES and file.is_file())
    stats = [(file, file.stat()) for file in files]
    state = [(str(file.relative_to(root)), info.st_size, info.st_mtime_ns) for file, info in stats]
    what = _hash(named, platform.machine(), saturates())
    return shelf() / (
        f"{readable.strip('-.')[:MOST_READABLE]}-{what}"
        f"{_hash(str(source.path.resolve()), state, SCHEMA_VERSION, GRAPH_CONTRACT_VERSION, __version__)}"
    )


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return [*path.glob("*"), *path.glob("*/*")]  # those of sentence-transformers have folders
    stem, _, count = path.stem.partition("-00001-of-")
    return list(path.parent.glob(f"{glob.escape(stem)}-*-of-{glob.escape(count)}.gguf")) if count else [path]


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:DIGITS]


def _lock_of(bundle: Path) -> Path:
    """The file that is locked while a bundle is built; its time of change is the bundle's last use."""
    return bundle.with_name(f".{bundle.name}.lock")


@contextmanager
def lock(bundle: Path, wait: Callable[[], object]) -> Iterator[bool]:
    """Lock a place of the cache for a build. If another process holds the lock, call ``wait``, wait until it is
    released, and yield False; yield False, too, if the file was removed meanwhile, and others may lock a new one.
    Raises UsageError: the cache cannot be written."""
    try:
        bundle.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(_lock_of(bundle), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        problem = f"folder {bundle.parent} cannot be written ({error.strerror})"
        raise UsageError("cache", problem, "set LLMC_CACHE to a folder that can") from error
    try:
        is_ours = lock_file(descriptor) is not False
        if not is_ours:
            wait()
            lock_file(descriptor, shared=True)
        yield is_ours and _is_at(descriptor, _lock_of(bundle))
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """True if ``path`` is still the name of an open file."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def note_use(bundle: Path) -> None:
    with suppress(OSError):  # others' caches can be read, too
        _lock_of(bundle).touch()


def remove_older(bundle: Path) -> None:
    """Remove bundles of older states of the same source, and what removals left that were killed."""
    for older in bundle.parent.glob(f"{glob.escape(bundle.name[:-DIGITS])}{'[0-9a-f]' * DIGITS}"):
        if older != bundle:
            _remove(older)
    disk_cache.prune(bundle.parent.name, 1 << 62)


def remove_leftovers() -> None:
    """Remove the unfinished bundles of builds that were killed."""
    for name in {work.name[1:].rsplit(".", 2)[0] for work in shelf().glob(".*.work")}:
        recover(shelf() / name)


def list_bundles() -> list[Shelved]:
    """The cache's bundles, sorted by name."""
    found = []
    for path in sorted(shelf().glob("[!.]*")):
        with suppress(FileNotFoundError):  # another process removes it
            found += [_describe(path)] if path.is_dir() else []
    return found


def _describe(path: Path) -> Shelved:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    used = (_lock_of(path) if _lock_of(path).exists() else path).stat().st_mtime
    try:
        manifest = read_bundle(path)
    except BundleError:
        return Shelved(path.name, path, None, None, size, None, used)
    phases = manifest.quality.phases.values() if manifest.quality else ()
    distances = [phase.mean_kl for phase in phases if phase.mean_kl is not None]
    model, precision = manifest.source.name, manifest.recipe.precision
    return Shelved(path.name, path, model, precision, size, max(distances, default=None), used)


def remove_bundle(name: str) -> Path:
    """Remove the bundle that :func:`list_bundles` lists as ``name``, and what killed builds left; return its path.
    Processes that have it loaded go on. Raises UsageError: none has that name, or it cannot be removed."""
    found = next((bundle for bundle in list_bundles() if bundle.name == name), None)
    if found is None:
        raise UsageError("names", f"has {format_name(name)}, which the cache has not", "llmc list shows its bundles")
    _remove(found.path)
    remove_leftovers()
    if found.path.exists():
        raise UsageError("names", f"has {name}, which cannot be removed", f"see who owns {found.path}")
    return found.path


def _remove(bundle: Path) -> None:
    disk_cache.remove(bundle)
    with suppress(OSError):  # there is no lock, or it is another user's
        descriptor = os.open(_lock_of(bundle), os.O_RDWR | os.O_CLOEXEC)
        try:
            if not bundle.exists() and lock_file(descriptor) is not False:  # else a process builds it again
                _lock_of(bundle).unlink()
        finally:
            os.close(descriptor)
