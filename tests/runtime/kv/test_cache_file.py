"""A saved session comes back bit for bit, and nothing else passes for one."""

import errno
import json
import os
import struct
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.errors import RequestError, ResourceError, UsageError
from llmc.runtime.kv import cache_file
from llmc.runtime.kv.cache_file import Description, chain_hashes, load_session, publish, root_hash, save_session

TOKENS = [5, 1, 151_000, 7]


SIZE = 2  # tokens of a block


def values(count: int = 2, dtype: str = "float32") -> list[NDArray[Any]]:
    """Blocks of two tokens each."""
    return list(np.random.default_rng(0).integers(-127, 128, (count, 64 * SIZE)).astype(dtype))


def save(path: Path, tokens: list[int], blocks: list[NDArray[Any]], key: str = "model") -> None:
    save_session(path, tokens, blocks, SIZE, key)


VOCAB = 151_001
PLENTY = 1 << 20


def load(path: Path, key: str = "model", block: int = SIZE, **form: Any) -> tuple[list[int], list[NDArray[Any]]]:
    shape, dtype = form.get("shape", (64 * SIZE,)), np.dtype(form.get("dtype", "float32"))
    return load_session(
        path, block, key, form=(shape, dtype), vocab_size=VOCAB, max_bytes=form.get("max_bytes", PLENTY)
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "chat.kv", TOKENS, values())
    return tmp_path / "chat.kv"


@pytest.mark.parametrize("dtype", ["float32", "int8", "float16"])
def test_a_session_comes_back_bit_for_bit(tmp_path: Path, dtype: str):
    save(tmp_path / "chat.kv", TOKENS, values(dtype=dtype))
    tokens, restored = load(tmp_path / "chat.kv", dtype=dtype)
    assert tokens == TOKENS
    assert {block.dtype for block in restored} == {np.dtype(dtype)}
    np.testing.assert_array_equal(restored, values(dtype=dtype))


def test_only_its_owner_may_read_a_session(saved: Path):
    assert saved.stat().st_mode & 0o777 == 0o600


def test_a_session_of_another_model_is_refused(saved: Path):
    with pytest.raises(RequestError, match="no session of this model"):
        load(saved, "another model")


def test_a_file_of_the_prefix_cache_is_no_session(tmp_path: Path):
    root = root_hash("model")
    publish(tmp_path / "x", Description.of("prefix", root, root, np.array(TOKENS), values(), SIZE), values())
    with pytest.raises(RequestError, match="is no session"):
        load(tmp_path / "x")


def test_somebody_elses_file_is_named_as_such(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("Dear diary, this is longer than what a file of ours begins with.")
    with pytest.raises(RequestError, match=r"cannot be restored.*Dear dia"):
        load(tmp_path / "notes.txt")


@pytest.mark.parametrize(("name", "why"), [("a\0b", "NUL character"), ("a\ud800b", "lone surrogate")])
def test_what_no_file_can_be_called_is_a_wrong_argument(tmp_path: Path, name: str, why: str):
    for call in (load, lambda path: save(path, TOKENS, values())):
        with pytest.raises(UsageError, match=f"a.*b' is no path: it holds a {why}"):
            call(tmp_path / name)
    with pytest.raises(UsageError, match="cannot be opened"):  # a byte that is no UTF-8, as file names may have
        load(tmp_path / "a\udcffb")


def survives_flips(saved: Path) -> set[int]:
    """Positions whose change went unnoticed and changed what came back."""
    content, wrong = bytearray(saved.read_bytes()), set()
    for position in range(len(content)):
        content[position] ^= 1 << position % 8
        saved.write_bytes(content)
        content[position] ^= 1 << position % 8
        try:
            tokens, restored = load(saved)
        except RequestError:
            continue
        if tokens != TOKENS or not np.array_equal(restored, values()):
            wrong.add(position)
    return wrong


def test_no_flipped_bit_changes_a_session_unnoticed(saved: Path):
    assert survives_flips(saved) == set()


def test_flipped_bits_would_be_found_without_the_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_file, "_digest", lambda data: bytes(16))
    save(tmp_path / "chat.kv", TOKENS, values())
    assert len(survives_flips(tmp_path / "chat.kv")) > sum(block.nbytes for block in values()) // 2


def test_a_full_disk_leaves_the_old_session(saved: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="disk is full"):
        save(saved, TOKENS[::-1], values(1))
    assert list(saved.parent.iterdir()) == [saved]
    assert load(saved)[0] == TOKENS


def given_away(path: Path, patch: pytest.MonkeyPatch) -> None:
    """From here on ``path`` belongs to another user than the one who runs this."""
    if os.geteuid() == 0:
        os.chown(path, 12_345, -1)
    else:
        owner = os.geteuid()
        patch.setattr(os, "geteuid", lambda: owner + 1)


def test_what_others_may_have_written_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch):
    for mode in (0o620, 0o602):
        saved.chmod(mode)
        with pytest.raises(RequestError, match=rf"mode {mode:o} lets others write it"):
            load(saved)
    saved.chmod(0o644)
    assert load(saved)[0] == TOKENS
    given_away(saved, monkeypatch)
    with pytest.raises(RequestError, match="belongs to user"):
        load(saved)


def forged(path: Path, change: Callable[[dict[str, Any]], object], blocks: list[NDArray[Any]] | None = None) -> None:
    """A session whose digests are right and whose description is not."""
    root, blocks = root_hash("model"), values() if blocks is None else blocks
    about = Description.of("session", root, root, np.array(TOKENS, np.int64), blocks, SIZE)
    raw = json.loads(about._text())
    raw = change(raw) or raw
    text = raw if isinstance(raw, bytes) else json.dumps(raw, separators=(",", ":")).encode()
    digest = blake2b(struct.pack("<I", 2) + text, digest_size=16).digest()
    content = b"llmcKV\r\n" + struct.pack("<II", 2, len(text)) + digest + text
    path.write_bytes(content.ljust(-(-len(content) // 64) * 64, b"\0") + b"".join(block.tobytes() for block in blocks))


def retold(tokens: list[int]) -> Callable[[dict[str, Any]], object]:
    """Other tokens, with the hashes that are right for them."""
    hashes = chain_hashes(root_hash("model"), np.array(tokens, np.int64), SIZE)
    return lambda raw: raw.update(tokens=tokens, last=hashes[1].hex())


@pytest.mark.parametrize(
    "change",
    [
        retold([5, 1, -1, 7]),
        retold([5, 1, VOCAB, 7]),
        lambda raw: raw.update(tokens=[*TOKENS, 10**30]),
        lambda raw: raw.update(tokens=[5.0, 1, 151_000, 7]),
        lambda raw: raw.update(tokens=[[5, 1], [151_000, 7]]),
        lambda raw: raw.update(block=4),
        lambda raw: raw.update(shape=[]),
        lambda raw: raw.update(shape=[2, 64]),
        lambda raw: raw.update(shape=[1 << 40, 1 << 40]),
        lambda raw: raw.update(dtype="<i4"),
        lambda raw: raw.update(dtype="|O8"),
        lambda raw: raw.update(digests=[]),
        lambda raw: raw.update(key=5),
        lambda raw: raw.update(more=1),
        lambda raw: raw.pop("parent"),
        lambda raw: b"[" * 100_000,
        lambda raw: b"9" * 5_000,
        lambda raw: b" " * (1 << 24) + b"{}",
    ],
)
def test_a_forged_description_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]):
    forged(tmp_path / "chat.kv", change)
    with pytest.raises(RequestError, match="start the session anew"):
        load(tmp_path / "chat.kv")


def test_what_is_forged_well_comes_back(tmp_path: Path):
    """The digests of a file cannot tell who wrote it, which is why its owner is looked at."""
    forged(tmp_path / "chat.kv", lambda raw: None, [-block for block in values()])
    np.testing.assert_array_equal(load(tmp_path / "chat.kv")[1], [-block for block in values()])
