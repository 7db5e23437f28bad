"""Graphs as ONNX Runtime runs them on this machine: optimised, and with weights packed for its kernels.

Opening a plain graph packs all weights into memory of its own. Opening a compiled one maps them from a file, which
starts sooner and which processes share. Packing depends on the engine's version and on the processor, so compiled
graphs carry a key; a bundle brings those of the machine that built it, others are made in the cache. Raw and packed
weights lie in one file, each content once.

ONNX Runtime believes whatever a compiled graph says of places in that file. So it only gets to see graphs with the hash
that was written down when they were compiled; others are made anew from the plain ones.
"""

import hashlib
import json
import logging
import mmap
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache as once
from pathlib import Path
from typing import Any

import llmc
from llmc.bundle import WEIGHTS_FILE, Compiled, FileEntry, Manifest, sha256_file, standing, verify_files
from llmc.errors import BundleError, ResourceError
from llmc.publish import file_entries
from llmc.runtime.host import disk_cache
from llmc.runtime.sessions.onnxruntime.onnx_file import ExternalData, check_weights, relocated
from llmc.strict import decode

log = logging.getLogger(__name__)

KIND = "compiled"
# Bytes of compiled graphs in the cache; $LLMC_CACHE_BYTES sets another bound.
CACHE_BYTES = 8_000_000_000
SESSION_CONFIG = {
    # Two graphs take turns on the same cores: the idle one must not spin, or it steals half of the machine.
    "session.force_spinning_stop": "1",
    # Work is handed out in shrinking blocks, so a thread that a neighbour slows down does not hold up the others.
    "session.dynamic_block_base": "4",
}
SAVE_CONFIG = {
    "session.save_external_prepacked_constant_initializers": "1",
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
}
LOG_FATAL_ONLY = 4  # every other error comes as an exception
# In an entry of the cache: its other files, as a bundle's manifest lists those of the bundle.
LIST = "files.json"
# ONNX Runtime writes weights twice before each content is kept once, raw and packed, and pads them.
COPIES = 2.2
# Large tensors start on a page of their own, as mapping wants it; small ones on a cache line, as kernels want it.
PAGE, LINE = 4096, 64


@dataclass(frozen=True)
class Place:
    """Place of compiled graphs: ``files`` by the plain graph's name; ``entry`` is None for those of the bundle."""

    files: dict[str, Path]
    entry: Path | None


def session_options(runtime: Any, threads: int) -> Any:
    """ONNX Runtime's options for a graph of ours."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = LOG_FATAL_ONLY
    # Planning which intermediate tensors share memory takes time quadratic in the graph, half of the time to open it.
    # The arena reuses what is freed just as well.
    options.enable_mem_reuse = False
    for key, value in SESSION_CONFIG.items():
        options.add_session_config_entry(key, value)
    return options


def inference_session(runtime: Any, graph: str | bytes, options: Any) -> Any:
    """ONNX Runtime's session of a graph on the CPU.

    The library's own second try, on the CPU too, is left out: it comes to the same and writes to stdout.
    """
    return runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"], enable_fallback=0)


def environment(version: str) -> str:
    """A hash of what decides how weights are packed: the engine's ``version``, processor, options, llmc's version."""
    parts = [version, platform.machine(), sorted(_cpu_flags()), SESSION_CONFIG, llmc.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def compile_bundle(runtime: Any, folder: Path, graphs: Iterable[str]) -> Compiled:
    """Compile graph files of a bundle that is being written, into the same folder.

    Raises:
        BundleError: ONNX Runtime wrote something unexpected.
        ResourceError: the disk is full.
    """
    with _Blobs(folder / WEIGHTS_FILE) as blobs:
        for name in sorted(set(graphs)):
            relocated((folder / name).read_bytes(), blobs.known)
        files = {name: _compile(runtime, folder / name, folder, blobs) for name in sorted(set(graphs))}
    return Compiled(environment(runtime.__version__), files)


def find(runtime: Any, folder: Path, manifest: Manifest, graphs: Iterable[str]) -> Place | None:
    """Find compiled forms of the bundle's ``graphs``, made now if need be; None where the plain ones must do."""
    if manifest.compiled is None:
        return None
    disk_cache.bound(CACHE_BYTES)  # refused before any work
    here, reason = environment(runtime.__version__), f"{folder} was compiled for another machine or engine"
    names = sorted(set(graphs))
    if manifest.compiled.environment == here and manifest.compiled.files.keys() >= set(names):
        files = {name: manifest.compiled.files[name] for name in names}
        try:
            _check(folder, {file: manifest.files[file] for file in files.values()})
            return Place({name: folder / file for name, file in files.items()}, None)
        except BundleError as error:
            reason = str(error)
    return _cached(runtime, folder, here, manifest, names, reason)


def _check(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Refuse files that changed since they were written; weights, too many to read, by their size."""
    for name, entry in files.items():
        path = folder / name
        try:
            same = path.stat().st_size == entry.size and (name == WEIGHTS_FILE or sha256_file(path) == entry.sha256)
        except OSError as error:
            raise BundleError(f"{path} cannot be read ({error.strerror})") from error
        if not same:
            raise BundleError(f"{path} is damaged")


def cached_entry(version: str, manifest: Manifest) -> Path:
    """The cache's entry with the bundle's graphs for this machine and engine ``version``, if it has one."""
    names = sorted({graph.file for graph in manifest.graphs.values()})
    return disk_cache.entry(KIND, _key(environment(version), manifest, names))


def _cached(runtime: Any, folder: Path, here: str, manifest: Manifest, names: list[str], reason: str) -> Place | None:
    """Compiled graphs in the cache, made for the ``reason`` that those of the bundle cannot be used."""
    if not disk_cache.writable():
        return None
    entry = disk_cache.entry(KIND, _key(here, manifest, names))
    if entry.is_dir():
        try:
            _check(entry, _listed(entry))
        except BundleError as error:
            reason = str(error)
            disk_cache.remove(entry)
    if not entry.is_dir():
        log.warning("%s; compiling the graphs for this machine, once", reason)
        try:
            with disk_cache.published(entry) as staging:
                before = standing(folder)
                sources = {name: file for name, file in manifest.files.items() if name in (*names, WEIGHTS_FILE)}
                for _ in verify_files(folder, replace(manifest, files=sources)):
                    pass  # what is kept under these hashes is made of these files
                for name in names:
                    check_weights(folder / name, manifest.files)
                with _Blobs(staging / WEIGHTS_FILE) as blobs:
                    files = [_compile(runtime, folder / name, staging, blobs) for name in names]
                if standing(folder) != before:
                    raise BundleError("it was replaced meanwhile")
                listed = file_entries(staging, [*files, WEIGHTS_FILE])
                (staging / LIST).write_text(json.dumps({name: asdict(file) for name, file in listed.items()}))
        except (OSError, BundleError, ResourceError) as error:
            log.warning("%s cannot be compiled (%s); using its plain graphs, which load slower", folder, error)
            return None
        disk_cache.prune(KIND, disk_cache.bound(CACHE_BYTES))
    return Place({name: entry / _compiled_name(name) for name in names}, entry)


def _listed(entry: Path) -> dict[str, FileEntry]:
    try:
        listed: dict[str, FileEntry] = decode(dict[str, FileEntry], json.loads((entry / LIST).read_bytes()))
        return listed
    except (OSError, ValueError, BundleError) as error:
        raise BundleError(f"{entry / LIST} is damaged") from error


def _key(here: str, manifest: Manifest, names: list[str]) -> str:
    contents = {name: entry.sha256 for name, entry in manifest.files.items() if name.endswith((".onnx", ".bin"))}
    return hashlib.sha256(json.dumps([here, names, contents], sort_keys=True).encode()).hexdigest()[:32]


def _compiled_name(name: str) -> str:
    return f"compiled-{name}"


def _compile(runtime: Any, graph: Path, into: Path, blobs: "_Blobs") -> str:
    """Compile one graph; the file's name in ``into``."""
    name = _compiled_name(graph.name)
    with tempfile.TemporaryDirectory(prefix="compiling-", dir=into) as work:
        written, weights = Path(work) / graph.name, f"{graph.stem}.bin"
        options = session_options(runtime, 1)
        options.optimized_model_filepath = str(written)
        config = {**SAVE_CONFIG, "session.optimized_model_external_initializers_file_name": weights}
        for key, value in config.items():
            options.add_session_config_entry(key, value)
        try:
            inference_session(runtime, str(graph), options)
        except Exception as error:  # a class of its own for each status
            _check_disk(graph, Path(work), error)
            reason = " ".join(str(error).split())[:300]
            raise BundleError(f"{graph}: compiling failed in ONNX Runtime ({reason})") from error
        model = written.read_bytes()
        stored = Path(work) / weights
        if stored.exists():  # no tensor is large enough in the smallest of models
            with stored.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                model = relocated(model, lambda entry: blobs.moved(entry, data))
    (into / name).write_bytes(model)
    return name


def _check_disk(graph: Path, work: Path, error: Exception) -> None:
    """Raise ResourceError where writing the compiled ``graph`` failed because the disk is full: the engine does not say
    so."""
    needed = round(COPIES * (graph.parent / WEIGHTS_FILE).stat().st_size)
    written = sum(path.stat().st_size for path in work.iterdir())
    free = shutil.disk_usage(work).free
    if free < needed - written:
        disk = next(parent for parent in work.resolve().parents if parent.is_mount())
        raise ResourceError(
            f"the disk at {disk} is full: compiling {graph.name} writes about {needed:,} bytes, {free + written:,} are "
            "free; free some space and run again"
        ) from error


class _Blobs:
    """Contents of tensors in one file, each of them once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[tuple[int, bytes], int] = {}
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._end = self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> "_Blobs":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def known(self, entry: ExternalData) -> ExternalData:
        """Remember a tensor that is in the file already."""
        offset, length = int(entry.get("offset", 0)), int(entry["length"])
        self._file.seek(offset)
        self._offsets[length, hashlib.sha256(self._file.read(length)).digest()] = offset
        return entry

    def moved(self, entry: ExternalData, data: mmap.mmap) -> ExternalData:
        """The entry of a tensor in ``data`` after its raw and packed contents were put into this file."""
        place = {"location": self._path.name}
        for key, value in entry.items():
            if key == "offset":
                place |= {"offset": str(self._put(data, int(value), int(entry["length"])))}
            elif key.startswith("prepacked"):
                place |= {key: self._packed(value, data)}
            elif key != "location":
                place |= {key: value}
        return place

    def _packed(self, value: str, data: mmap.mmap) -> str:
        """``name|offset;length;checksum;offset;...`` with the offsets in this file."""
        name, _, numbers = value.rpartition("|")
        parts = numbers.split(";")
        if not name or len(parts) % 3:
            raise BundleError(f"ONNX Runtime describes packed weights as {value!r:.80}, which this llmc does not know")
        for i in range(0, len(parts), 3):
            parts[i] = str(self._put(data, int(parts[i]), int(parts[i + 1])))
        return f"{name}|{';'.join(parts)}"

    def _put(self, data: mmap.mmap, offset: int, length: int) -> int:
        if offset < 0 or length < 0 or offset + length > len(data):
            raise BundleError("ONNX Runtime wrote fewer weights than it names; is the disk full?")
        with memoryview(data) as whole, whole[offset : offset + length] as content:
            key = length, hashlib.sha256(content).digest()
            if key not in self._offsets:
                self._offsets[key] = self._append(content)
        return self._offsets[key]

    def _append(self, content: memoryview) -> int:
        alignment = PAGE if len(content) >= PAGE else LINE
        start = -(-self._end // alignment) * alignment
        self._file.seek(start)
        self._file.write(content)
        self._end = start + len(content)
        return start


@once
def _cpu_flags() -> frozenset[str]:
    """All features of the processor that its operating system reports; its name where it reports none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset({platform.processor()})
    named = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(" ".join(named).split())
