"""Adapters beside a loaded model: their factors, checked, by the names that requests give."""

import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from llmc.bundle import FACTORS_FILE, AdapterManifest, Manifest, check_name, read_adapter_manifest
from llmc.errors import BundleError, RequestError, ResourceError, UsageError
from llmc.strict import open_regular

Array = NDArray[np.float32]


@dataclass(frozen=True)
class AdapterInfo:
    """A loaded adapter, as its model shows it."""

    name: str
    sha256: str  # of all that it changes: what prefixes that were computed with it are named by
    rank: int  # of its factors


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter as calls take it: each linear that it names gives ``x @ a.T @ b`` more, with float32 a [rank,
    inputs] and b [rank, outputs]."""

    info: AdapterInfo
    factors: Mapping[str, tuple[Array, Array]]


class Adapters:
    """The adapters of a model, by name. Any thread may call it.

    One that is unloaded takes no more requests; those that have it go on, and its place is free after the last.

    Args:
        manifest: of the bundle, which says for how many adapters of which rank there is room.
        prepare: makes the session ready for adapters; called before the first.
    """

    def __init__(self, manifest: Manifest, prepare: Callable[[], None]) -> None:
        self._geometry, self._limits, self._base = manifest.geometry, manifest.limits, manifest.source.fingerprint
        self._prepare = prepare
        self._loaded: dict[str, Adapter] = {}
        self._alive: weakref.WeakSet[Adapter] = weakref.WeakSet()
        self._lock = threading.Lock()

    @property
    def loaded(self) -> dict[str, AdapterInfo]:
        return {name: it.info for name, it in list(self._loaded.items())}

    def find(self, name: str | None) -> Adapter | None:
        """The adapter that a request names; RequestError if none of that name is loaded."""
        found = None if name is None else self._loaded.get(name)
        if name is not None and found is None:
            known = ", ".join(self._loaded) or "none"
            raise RequestError(f"there is no adapter {name!r:.80}; loaded are {known}: load it first, or leave it out")
        return found

    def load(self, name: str, folder: Path) -> AdapterInfo:
        """Load what ``llmc adapter add`` wrote into ``folder``, under a name that is free.

        Raises:
            UsageError: the name is taken, or none.
            ResourceError: as many are loaded, or still used by requests, as there is room for.
            BundleError: it is damaged, of another base or of a larger rank than there is room for.
        """
        check_name(name)
        with self._lock:
            if not self._limits.adapters:
                raise BundleError(
                    "the bundle has no room for adapters; build it with --adapters, for the cpu, or merge the adapter "
                    "at export"
                )
            if name in self._loaded:
                raise UsageError(
                    "name",
                    f"is {name!r}, and an adapter of this name is loaded",
                    "unload it first, or choose another name",
                )
            if len(self._alive) >= self._limits.adapters:
                raise ResourceError(
                    f"{len(self._alive)} adapters are loaded or still used by requests, and the bundle was built for "
                    f"{self._limits.adapters}; unload one and let its requests end, or build with more --adapters"
                )
            found = self._read(name, Path(folder))
            self._prepare()
            self._alive.add(found)
            self._loaded[name] = found
        return found.info

    def unload(self, name: str) -> None:
        """Take no more requests for an adapter; RequestError if none of that name is loaded."""
        with self._lock:
            self.find(name)
            del self._loaded[name]

    def _read(self, name: str, folder: Path) -> Adapter:
        manifest = read_adapter_manifest(folder)
        if manifest.base != self._base:
            raise BundleError("it was added for another base than this bundle's", "add it to this bundle", path=folder)
        if manifest.rank > self._limits.rank:
            raise BundleError(
                f"it has rank {manifest.rank}, and the bundle was built for {self._limits.rank}",
                "build it with a larger --rank",
                path=folder,
            )
        if unknown := [module for module in manifest.modules if module not in self._geometry.linear]:
            raise BundleError(f"the bundle has no linear {unknown[0]!r:.80}", "add the adapter again", path=folder)
        content = hashlib.sha256(repr((manifest.rank, manifest.modules, manifest.sha256)).encode()).hexdigest()
        return Adapter(AdapterInfo(name, content, manifest.rank), self._read_factors(folder, manifest))

    def _read_factors(self, folder: Path, manifest: AdapterManifest) -> dict[str, tuple[Array, Array]]:
        """The factors, as views of one array. The file is not mapped: a process that reads a mapped file ends when
        another cuts it short."""
        linears = [self._geometry.linear[module] for module in manifest.modules]
        sizes = [size for it in linears for size in (it.inputs, it.outputs)]
        try:
            values = _read_values(folder / FACTORS_FILE, manifest.rank * sum(sizes))
        except (OSError, ValueError) as error:
            raise BundleError(
                f"{FACTORS_FILE} cannot be read ({getattr(error, 'strerror', error)})",
                "add the adapter again",
                path=folder,
            ) from error
        if values is None:
            raise BundleError(
                f"{FACTORS_FILE} does not fit {len(linears)} linears", "add the adapter again", path=folder
            )
        if not np.isfinite(values).all():
            raise BundleError(f"{FACTORS_FILE} holds NaN or infinite values", "get the adapter again", path=folder)
        ends = np.cumsum(sizes)[:-1] * manifest.rank
        parts = [part.reshape(manifest.rank, -1) for part in np.split(values, ends)]
        return dict(zip(manifest.modules, zip(parts[::2], parts[1::2], strict=True), strict=True))


def _read_values(path: Path, count: int) -> Array | None:
    """All values of a file in NumPy's format; None where it holds no ``count`` of float32.
    Raises OSError, ValueError: it cannot be read."""
    with open_regular(path) as file:
        npy.read_magic(file)
        shape, _, dtype = npy.read_array_header_1_0(file)
        if shape != (count,) or dtype != np.float32:
            return None
        values = np.frombuffer(file.read(4 * count + 1), np.float32)
    return values if len(values) == count else None
