"""Files are checked when that is asked for, and else once, where each machine looks at other places."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from llmc import bundle
from llmc.bundle import Manifest
from llmc.bundle import integrity as hashes
from llmc.errors import BundleError
from llmc.publish import file_entries
from llmc.runtime.host import integrity
from llmc.runtime.host.integrity import check_files, check_once

NAMES = ["chunks.json", "weights.bin"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 400 chunks, of which 10 are looked at, and a cache of its own."""
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "cache"))
    for name, value in {"CHUNK": 16, "SAMPLED_CHUNKS": 10}.items():
        monkeypatch.setattr(hashes, name, value)
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(os.urandom(400 * 16))
    bundle.write_chunks(folder, ["weights.bin"])
    return folder


@pytest.fixture
def listed(folder: Path, manifest: Manifest) -> Manifest:
    return replace(manifest, files=file_entries(folder, NAMES))


def looked_at(folder: Path, listed: Manifest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the chunks that are looked at."""
    content = (folder / "weights.bin").read_bytes()
    seen: list[int] = []

    def watched(chunk: bytes) -> str:
        seen.append(content.index(chunk) // 16)
        return original(chunk)

    original = hashes._chunk_hash
    with monkeypatch.context() as patch:
        patch.setattr(hashes, "_chunk_hash", watched)
        check_files(folder, listed, None)
    return seen


def test_a_machine_looks_once_and_again_where_a_file_changed(folder, listed, monkeypatch):
    first = looked_at(folder, listed, monkeypatch)
    assert len(first) == 10
    assert looked_at(folder, listed, monkeypatch) == []
    stat = (folder / "weights.bin").stat()
    (folder / "weights.bin").write_bytes((folder / "weights.bin").read_bytes())
    os.utime(folder / "weights.bin", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # dates can be set, that of a change not
    assert looked_at(folder, listed, monkeypatch) == first


def test_another_machine_looks_elsewhere(folder, listed, monkeypatch):
    first = looked_at(folder, listed, monkeypatch)
    monkeypatch.setattr(integrity.socket, "gethostname", lambda: "another")
    monkeypatch.setenv("LLMC_CACHE", str(folder.parent / "other"))
    assert looked_at(folder, listed, monkeypatch) != first


def test_damage_is_found_whenever_all_is_read_and_not_remembered_as_sound(folder, listed):
    damaged = bytearray((folder / "weights.bin").read_bytes())
    damaged[-1] ^= 1
    check_files(folder, listed, True)
    (folder / "weights.bin").write_bytes(damaged)
    check_files(folder, listed, False)
    for _ in range(2):
        with pytest.raises(BundleError, match=r"weights.bin is corrupt"):
            check_files(folder, listed, True)


def test_a_check_that_failed_is_made_again(folder):
    outcomes = iter([BundleError("no"), None])
    calls = []

    def check() -> None:
        calls.append(1)
        if error := next(outcomes):
            raise error

    with pytest.raises(BundleError):
        check_once("x", [folder / "weights.bin"], check)
    for _ in range(3):
        check_once("x", [folder / "weights.bin"], check)
    assert len(calls) == 2
    check_once("x", [folder / "weights.bin"], lambda: calls.append(1), always=True)
    check_once("y", [folder / "weights.bin"], lambda: calls.append(1))
    assert len(calls) == 4
