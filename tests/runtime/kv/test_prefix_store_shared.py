"""Processes that share a folder of prefixes, and one that is killed in the middle, leave whole files only."""

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from llmc.runtime.kv import prefix_store
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.kv.prefix_store import PrefixStore

LENGTH = 16  # tokens of every prompt: four blocks of one token, whose keys and values are all that token
PLENTY = 1 << 24
PENDING = 1 << 28
MANY = 1000  # prompts that fit into that, for what is evicted is no whole file either

PATIENCE = 120  # seconds after which something that should happen counts as not happening

# A process that keeps prefixes, over and over until its input is closed, so that nobody looks too late. Its arguments:
# folder, bound, first token, number of prompts.
KEEPS_PREFIXES = """
import select
import sys
import numpy as np
from pathlib import Path
from llmc.runtime.kv import prefix_store
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.kv.prefix_store import PrefixStore

folder, bound, first, count = Path(sys.argv[1]), *map(int, sys.argv[2:])
store = PrefixStore(folder, bound, pending_bytes=1 << 28)
cache = PrefixCache("model", 4, max_bytes=1 << 24, store=store)
print("ready", flush=True)
told = False
while not told:
    for token in range(first, first + count):
        cache.insert([token] * 16, lambda start, end: list(np.full(((end - start) // 4, 256), token, np.float32)))
        with store._lock:
            store._lock.wait_for(lambda: not store._jobs)
    told = bool(select.select([sys.stdin], [], [], 0.01)[0])
store.close()
"""


def flush(store: PrefixStore, timeout: float | None = None) -> bool:
    """Wait until everything taken so far is written or given up; False when ``timeout`` seconds pass before."""
    with store._lock:
        return store._lock.wait_for(lambda: not store._jobs, timeout)


@contextmanager
def process(folder: Path, bound: int, first: int, count: int) -> Iterator["subprocess.Popen[str]"]:
    """Such a process, once it is about to begin; it does not outlive the block."""
    command = [sys.executable, "-c", KEEPS_PREFIXES, str(folder), str(bound), str(first), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "ready\n"
            yield started
        finally:
            started.kill()


def finds(cache: PrefixCache, token: int) -> bool:
    """Whether the whole prompt is there; what is there must be right."""
    with cache.match([token] * LENGTH) as match:
        assert all((block == token).all() for block in match.blocks)
        return match.length == LENGTH


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 here")
def test_killing_a_writer_leaves_whole_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with process(tmp_path, PLENTY, 0, MANY) as writing:
        deadline = time.monotonic() + PATIENCE
        while len(files(tmp_path)) < 20 and time.monotonic() < deadline:
            time.sleep(0.002)
        writing.send_signal(signal.SIGKILL)
    kept = len(files(tmp_path)) // 4  # a file for each block
    assert kept >= 5
    shelf = files(tmp_path)[0].parent
    (shelf / ".staging-killed").write_bytes(bytes(100))  # what the worst moment leaves
    with closing(PrefixStore(tmp_path, PLENTY, pending_bytes=PENDING)) as store:
        cache = PrefixCache("model", 4, max_bytes=PLENTY, store=store)
        assert [finds(cache, token) for token in range(kept + 1)] == [True] * kept + [False]
        assert warnings(caplog) == []
        monkeypatch.setattr(prefix_store, "ABANDONED_S", 0.0)
        cache.insert(
            [kept + 1] * LENGTH, lambda start, end: list(np.full(((end - start) // 4, 256), kept + 1, np.float32))
        )
        assert flush(store, PATIENCE)
    assert list(shelf.glob(".staging-*")) == []
