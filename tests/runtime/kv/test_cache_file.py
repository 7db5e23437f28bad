"""A block comes back from its file bit for bit, and nothing else passes for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.runtime.kv import cache_file
from llmc.runtime.kv.cache_file import UnreadableError, chain_hashes, read_block, root_hash, write_block

ROOT = root_hash("model")
(CHAIN,) = chain_hashes(ROOT, np.array([5, 151_000]), 2)
PLENTY = 1 << 20


def values(dtype: str = "float32") -> NDArray[Any]:
    return np.random.default_rng(0).integers(-127, 128, 128).astype(dtype)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_block(tmp_path / "block.kv", ROOT, CHAIN, values())
    return tmp_path / "block.kv"


@pytest.mark.parametrize("dtype", ["float32", "int8", "float16"])
def test_a_block_comes_back_bit_for_bit(tmp_path, dtype):
    write_block(tmp_path / "block.kv", ROOT, CHAIN, values(dtype))
    found = read_block(tmp_path / "block.kv", ROOT, CHAIN, PLENTY)
    assert found is not None and found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found, values(dtype))


def test_a_block_that_is_too_large_is_not_read(written):
    assert read_block(written, ROOT, CHAIN, values().nbytes - 1) is None


def test_a_block_of_another_model_or_chain_is_refused(written):
    for root, chain in ((root_hash("another"), CHAIN), (ROOT, ROOT)):
        with pytest.raises(UnreadableError, match="digest"):
            read_block(written, root, chain, PLENTY)


def survives_flips(path: Path, refused: type[Exception] = UnreadableError) -> set[int]:
    """Positions whose change went unnoticed and changed what came back."""
    content, wrong = bytearray(path.read_bytes()), set()
    for position in range(len(content)):
        content[position] ^= 1 << position % 8
        path.write_bytes(content)
        content[position] ^= 1 << position % 8
        try:
            found = read_block(path, ROOT, CHAIN, PLENTY)
        except refused:
            continue
        if found is None or not np.array_equal(found, values()):
            wrong.add(position)
    return wrong


def test_no_flipped_bit_changes_a_block_unnoticed(written):
    assert survives_flips(written) == set()


def test_flipped_bits_would_be_found_without_the_digests(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "_digest", lambda *parts: bytes(16))
    write_block(tmp_path / "block.kv", ROOT, CHAIN, values())
    assert len(survives_flips(tmp_path / "block.kv", Exception)) > values().nbytes // 2
