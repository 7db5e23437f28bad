"""Prefixes on disk outlive the process, and whatever happens to the disk, no request notices."""

import errno
import logging
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.runtime.kv import prefix_store
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.kv.prefix_store import PrefixStore

BLOCK = 4
SHAPE = (4, 2, BLOCK, 8)  # 2 * layers, heads, positions, head_dim
BLOCK_BYTES = 4 * int(np.prod(SHAPE))
PLENTY = 1 << 24
PENDING = 1 << 28
PROMPT = list(range(100, 118))  # four blocks and two tokens
WHOLE = 16
ONE = PROMPT[:5]  # a block, and so a file
PATIENCE = 120  # seconds after which a disk that should have written counts as dead


def flush(store: PrefixStore, timeout: float | None = None) -> bool:
    """Wait until everything taken so far is written or given up; False when ``timeout`` seconds pass before."""
    with store._lock:
        return store._lock.wait_for(lambda: not store._jobs, timeout)


def rows(tokens: Sequence[int], dtype: str = "float32") -> NDArray[Any]:
    """Keys and values that depend on all tokens up to their position: [2 * layers, heads, n, head_dim]."""
    steps = np.arange(np.prod(SHAPE) // BLOCK).reshape(SHAPE[0], SHAPE[1], 1, SHAPE[3])
    sums = np.cumsum(np.array(tokens) * (1 + np.arange(len(tokens)))).reshape(1, 1, -1, 1)
    return ((sums * 31 + steps) % 127).astype(dtype)


def writer(cache: PrefixCache) -> Callable[..., int]:
    return lambda tokens, dtype="float32": cache.insert(tokens, lambda a, b: blocks(rows(tokens, dtype), a, b))


def blocks(values: NDArray[Any], start: int, end: int) -> list[NDArray[Any]]:
    """What a cache reads of these positions."""
    return [values[:, :, i : i + BLOCK].reshape(-1).copy() for i in range(start, end, BLOCK)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefixes"


@pytest.fixture
def opened(folder: Path) -> Iterator[Callable[..., tuple[PrefixCache, PrefixStore]]]:
    """Cache and store as a process that starts anew has them."""
    stores = []

    def start(max_bytes: int = PLENTY, memory: int = PLENTY, key: str = "model") -> tuple[PrefixCache, PrefixStore]:
        stores.append(PrefixStore(folder, max_bytes, pending_bytes=PENDING))
        return PrefixCache(key, BLOCK, max_bytes=memory, store=stores[-1]), stores[-1]

    yield start
    for store in stores:
        store.close()


Opened = Callable[..., tuple[PrefixCache, PrefixStore]]


def keep(opened: Opened, *prompts: Sequence[int], **settings: Any) -> None:
    """What an earlier process did with these prompts."""
    cache, store = opened(**settings)
    for prompt in prompts:
        writer(cache)(prompt)
        assert flush(store, PATIENCE)
    store.close()


def found(cache: PrefixCache, tokens: Sequence[int], dtype: str = "float32") -> int:
    """Length of the match, whose values must be right."""
    with cache.match(tokens) as match:
        if match.blocks:
            np.testing.assert_array_equal(
                np.concatenate(match.blocks), np.concatenate(blocks(rows(tokens, dtype), 0, match.length))
            )
            assert match.blocks[0].dtype == dtype
        return match.length


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_restarted_process_finds_the_prefix(opened, folder, dtype):
    cache, store = opened()
    writer(cache)(PROMPT, dtype)
    store.close()
    cache, _ = opened()
    assert found(cache, PROMPT, dtype) == WHOLE
    for file in files(folder):
        file.unlink()
    assert found(cache, PROMPT, dtype) == WHOLE  # the second time from memory


def test_what_memory_evicted_comes_back_from_disk(opened):
    cache, store = opened(memory=4 * BLOCK_BYTES)
    writer(cache)(PROMPT)
    flush(store)
    writer(cache)([1] * 8)  # takes the room of the last two blocks
    flush(store)
    assert found(cache, PROMPT) == WHOLE


@pytest.mark.threat("prefix-privacy")
def test_only_the_owner_may_read_the_files(opened, folder):
    keep(opened, PROMPT)
    assert {path.stat().st_mode & 0o777 for path in files(folder)} == {0o600}


def test_a_file_cut_anywhere_is_ignored_and_removed(opened, folder, caplog):
    keep(opened, ONE)
    (path,) = files(folder)
    content = path.read_bytes()
    start = len(content) - BLOCK_BYTES
    for cut in (0, 4, 12, 31, 100, start - 1, start, len(content) - 1):
        path.write_bytes(content[:cut])
        caplog.clear()
        cache, _ = opened()
        assert found(cache, ONE) == 0
        assert found(cache, ONE) == 0
        assert [message for message in warnings(caplog) if "is damaged and is removed" in message] == warnings(caplog)
        assert len(warnings(caplog)) == 1
        assert not path.exists()


def test_a_file_under_another_name_is_not_believed(opened, folder):
    keep(opened, ONE, [7] * 5)
    one, other = files(folder)
    other.write_bytes(one.read_bytes())
    cache, _ = opened()
    assert sorted([found(cache, ONE), found(cache, [7] * 5)]) == [0, BLOCK]
    assert files(folder) == [one]


def test_the_bound_holds_and_the_least_recently_used_goes(opened, folder):
    bound = 11 * BLOCK_BYTES
    cache, store = opened(max_bytes=bound, memory=0)
    cache = PrefixCache("model", BLOCK, max_bytes=PLENTY, store=store)
    for first in range(6):
        writer(cache)([first] * 16)
        assert flush(store, PATIENCE)
        assert used(folder) <= bound
    later, _ = opened()
    assert [found(later, [first] * 16) == WHOLE for first in range(6)] == [False] * 4 + [True] * 2


def fail_with(code: int) -> Callable[..., Any]:
    return raising(OSError(code, os.strerror(code)))


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("call", ["tempfile.mkstemp", "os.replace"])
def test_a_disk_that_refuses_leaves_memory_at_work(opened, folder, monkeypatch, caplog, code, call):
    monkeypatch.setattr(call, fail_with(code))
    monkeypatch.setattr(prefix_store, "PAUSE_S", 0.0)
    cache, store = opened()
    for prompt in (PROMPT, [1] * 8):
        writer(cache)(prompt)
        assert flush(store, PATIENCE)
    assert [found(cache, PROMPT), found(cache, [1] * 8)] == [WHOLE, 8]
    assert len(warnings(caplog)) == 1
    assert os.strerror(code) in warnings(caplog)[0]
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    monkeypatch.undo()
    writer(cache)(PROMPT)  # the disk works again
    assert flush(store, PATIENCE)
    assert found(opened()[0], PROMPT) == WHOLE


def test_use_in_memory_keeps_a_file(opened, folder, monkeypatch):
    monkeypatch.setattr(prefix_store, "TOUCH_S", 0.0)
    cache, store = opened(max_bytes=11 * BLOCK_BYTES)
    for first in range(2):
        writer(cache)([first] * 16)
        flush(store)
    assert found(cache, [0] * 16) == WHOLE
    writer(cache)([2] * 16)
    flush(store)
    later, _ = opened()
    assert [found(later, [first] * 16) == WHOLE for first in range(3)] == [True, False, True]


def test_a_failed_disk_is_left_alone_for_a_while(opened, monkeypatch):
    monkeypatch.setattr("os.replace", fail_with(errno.ENOSPC))
    cache, store = opened()
    writer(cache)(PROMPT)
    assert flush(store, PATIENCE)
    monkeypatch.undo()
    writer(cache)(PROMPT)
    assert flush(store, PATIENCE)
    assert found(opened()[0], PROMPT) == 0


def test_another_process_sees_what_this_one_writes_and_removes(opened, folder):
    reader, _ = opened()
    assert found(reader, PROMPT) == 0
    keep(opened, PROMPT)
    assert found(reader, PROMPT) == WHOLE
    forgetful, _ = opened(memory=BLOCK_BYTES)
    assert found(forgetful, PROMPT) == BLOCK
    for path in files(folder):
        path.unlink()
    assert found(forgetful, PROMPT) == BLOCK


@pytest.mark.threat("prefix-privacy")
def test_prefixes_of_a_scope_are_found_in_it_alone(opened):
    cache, store = opened()
    cache.insert(PROMPT, lambda a, b: blocks(rows(PROMPT), a, b), ("", "ann"))
    flush(store)
    for kept in (cache, opened()[0]):  # in memory, and on disk
        lengths = []
        for names in (("", "ben"), ("",), ("", "ann")):
            with kept.match(PROMPT, names=names) as match:
                lengths.append(match.length)
        assert lengths == [0, 0, WHOLE]


def given_away(path: Path, patch: pytest.MonkeyPatch) -> None:
    """From here on ``path`` belongs to another user than the one who runs this."""
    if os.geteuid() == 0:
        os.chown(path, 12_345, -1)
    else:
        owner = os.geteuid()
        patch.setattr(os, "geteuid", lambda: owner + 1)


@pytest.mark.threat("prefix-files")
@pytest.mark.parametrize("whose", ["file", "folder"])
def test_what_belongs_to_another_user_is_neither_read_nor_removed(opened, folder, whose, monkeypatch, caplog):
    keep(opened, ONE)
    (path,) = files(folder)
    for place in (path, path.parent)[: 1 + (whose == "folder")]:
        given_away(place, monkeypatch)
    cache, store = opened(max_bytes=2 * BLOCK_BYTES)
    assert found(cache, ONE) == 0
    writer(cache)(PROMPT[:4])
    assert flush(store, PATIENCE)
    assert f"{path if whose == 'file' else path.parent} is ignored: it belongs to user" in warnings(caplog)[0]
    assert path.exists() and (whose == "file" or files(folder) == [path])


@pytest.mark.threat("prefix-files")
def test_folders_are_closed_to_others_and_files_that_others_may_write_are_ignored(opened, folder, caplog):
    keep(opened, ONE)
    (path,) = files(folder)
    assert {place.stat().st_mode & 0o777 for place in (folder, path.parent)} == {0o700}
    path.parent.chmod(0o777)  # as an older llmc under another umask may have made it
    assert found(opened()[0], ONE) == BLOCK
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o666)
    assert found(opened()[0], ONE) == 0
    assert "mode 666 lets others write it" in warnings(caplog)[0] and path.exists()


@pytest.mark.threat("prefix-files")
def test_a_link_in_the_place_of_a_folder_is_not_followed(opened, folder, tmp_path):
    keep(opened, ONE)
    (path,) = files(folder)
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(tmp_path / "elsewhere")
    cache, store = opened(max_bytes=BLOCK_BYTES)
    assert found(cache, ONE) == 0
    writer(cache)([3] * 16)
    assert flush(store, PATIENCE)
    assert os.listdir(tmp_path / "elsewhere") == [path.name]


@pytest.mark.threat("prefix-files")
@pytest.mark.parametrize("form", [((1,), "float32"), (((int(np.prod(SHAPE)),)), "float16")])
def test_blocks_that_the_model_could_not_take_are_not_there(opened, form):
    keep(opened, PROMPT)
    _, store = opened()
    shape, dtype = form
    cache = PrefixCache("model", BLOCK, max_bytes=PLENTY, store=store, form=(shape, np.dtype(dtype)))
    assert found(cache, PROMPT) == 0
    right = ((int(np.prod(SHAPE)),), np.dtype("float32"))
    assert found(PrefixCache("model", BLOCK, max_bytes=PLENTY, store=store, form=right), PROMPT) == WHOLE


@pytest.mark.threat("prefix-files")
@pytest.mark.parametrize("text", [b"[" * 100_000, b"{}", b"9" * 5_000, b"\xff"])
def test_a_description_that_is_none_is_a_miss(opened, folder, text):
    keep(opened, ONE)
    (path,) = files(folder)
    digest = blake2b(text, digest_size=16).digest()
    path.write_bytes(b"llmcKV\r\n" + struct.pack("<II", 3, len(text)) + digest + text)
    assert found(opened()[0], ONE) == 0
    assert not path.exists()


LENGTH = 16  # tokens of every prompt: four blocks of one token, whose keys and values are all that token
MANY = 1000  # prompts that fit into PLENTY, for what is evicted is no whole file either

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


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 here")
def test_killing_a_writer_leaves_whole_files_only(tmp_path, monkeypatch, caplog):
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
