"""Check a bundle's files against their hashes, each time or once per machine."""

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
    """Call ``check`` unless the cache knows that it passed for exactly these files and ``what``, or if ``always``.

    Files are the same if size, times of change and inode are. A failure is not remembered.
    """
    stats = [(str(path.name), path.stat()) for path in files]
    states = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev) for name, s in stats]
    disk_cache.once(KIND, hashlib.sha256(json.dumps([what, states]).encode()).hexdigest()[:32], check, always=always)


def check_files(folder: Path, manifest: Manifest, wanted: bool | None) -> None:
    """Hash every file (True), none (False), or (None) samples of each, the first time only.

    The samples depend only on the machine and the bundle, so that damage is found again, and differ between machines.

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
