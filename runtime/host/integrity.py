"""A bundle's files held against its hashes: all bytes on request, some of each file when a machine first loads them."""

import hashlib
import json
import logging
import random
import socket
import time
from pathlib import Path

from llmc.bundle import Manifest, verify_files, verify_samples
from llmc.runtime.host import disk_cache

log = logging.getLogger(__name__)

KIND = "integrity"
CACHE_BYTES = 1_000_000
MACHINE_FILE = Path("/etc/machine-id")


def check_files(folder: Path, manifest: Manifest, wanted: bool | None) -> None:
    """Hash every file (true), none (false), or (None) samples of them unless the cache knows that they passed here.

    A pass holds for files with these names, sizes, times of change and places on the disk. A failure is not remembered,
    and found again: where a machine looks depends on nothing but the machine and the bundle, and differs from machine
    to machine. Where the cache cannot be written every load looks.

    Raises:
        BundleError: a file differs from what was built, or cannot be read.
    """
    if wanted is False:
        return
    entry = disk_cache.entry(KIND, _key(folder, manifest))
    if wanted is None and entry.exists():
        return
    start = time.perf_counter()
    for _ in verify_files(folder, manifest) if wanted else verify_samples(folder, manifest, _places(manifest)):
        pass
    log.info("%s: its files were checked in %.2f s", folder, time.perf_counter() - start)
    try:
        with disk_cache.published(entry) as staging:
            (staging / "report.json").write_text(json.dumps({"whole": bool(wanted)}))
    except OSError as error:
        log.warning("the result of checking files is not kept (%s)", error)
    disk_cache.prune(KIND, CACHE_BYTES)


def _key(folder: Path, manifest: Manifest) -> str:
    found = []
    for name, file in sorted(manifest.files.items()):
        info = (folder / name).stat()
        found.append((name, file.size, file.sha256, info.st_mtime_ns, info.st_ino, info.st_dev))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32]


def _places(manifest: Manifest) -> random.Random:
    """Chance that is this machine's own."""
    try:
        machine = MACHINE_FILE.read_text()
    except OSError:
        machine = ""
    return random.Random("\n".join([machine, socket.gethostname(), *(e.sha256 for e in manifest.files.values())]))
