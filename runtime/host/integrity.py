"""A bundle's files held against what is known of them, each time or once: a machine remembers what passed."""

import hashlib
import json
import logging
import random
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from llmc.bundle import Manifest, verify_files, verify_samples
from llmc.runtime.host import disk_cache

log = logging.getLogger(__name__)

KIND = "integrity"


def check_once(what: str, files: Iterable[Path], check: Callable[[], None], *, always: bool = False) -> None:
    """Call ``check`` unless the cache knows that it passed for these very files and ``what``, or ``always``.

    The same are those of the same sizes, times of change and inodes. A failure is not remembered.
    """
    stats = [(str(path.name), path.stat()) for path in files]
    found = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev) for name, s in stats]
    disk_cache.once(KIND, hashlib.sha256(json.dumps([what, found]).encode()).hexdigest()[:32], check, always=always)


def check_files(folder: Path, manifest: Manifest, wanted: bool | None) -> None:
    """Hash every file (true), none (false), or (None) samples of each, the first time.

    Where a machine looks depends on nothing but the machine and the bundle, so that damage is found again, and differs
    from machine to machine.

    Raises:
        BundleError: a file differs from what was built, or cannot be read.
    """
    if wanted is False:
        return
    hashes = "\n".join(entry.sha256 for entry in manifest.files.values())

    def check() -> None:
        log.info("checking the files of %s%s", folder, "" if wanted else " on this machine, once")
        places = random.Random(f"{socket.gethostname()}\n{hashes}")
        for _ in verify_files(folder, manifest) if wanted else verify_samples(folder, manifest, places):
            pass

    check_once(hashes, [folder / name for name in manifest.files], check, always=bool(wanted))
