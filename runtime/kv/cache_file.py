"""Blocks of the KV cache on disk, one in a file: 16 bytes of digest, then NumPy's own format (.npy).

The digest is BLAKE2b (RFC 7693, https://www.rfc-editor.org/rfc/rfc7693) of key, chain and all bytes after it. A block
is named by its chain hash, the digest of its parent's chain hash and its own tokens: equal names mean equal tokens from
the first one on.

Digests show damage, not who computed the values. So a file is used only if this user or the administrator owns it and
no other user can write it.
"""

import io
import json
import os
import stat
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from llmc.publish import replace_file

DIGEST_BYTES = 16
HEAD_BYTES = 256  # what a file takes beside its values, at most
STAGING = ".staging-"

NO_NAMES = ("",)  # of chains that depend on nothing else

# Shape and type of a block.
Form = tuple[tuple[int, ...], np.dtype[Any]]


def root_hash(key: str, names: Sequence[str] = NO_NAMES) -> bytes:
    """The beginning of a model's chains: ``key`` and ``names`` tell all that cached values depend on, beside tokens."""
    return _digest(json.dumps([key, *names]).encode())


def chain_hashes(parent: bytes, tokens: NDArray[np.int64], block: int) -> list[bytes]:
    """Chain hashes of the whole blocks of ``tokens``, the first one below ``parent``."""
    data, step = tokens.astype("<i8", copy=False).tobytes(), 8 * block
    hashes = []
    for start in range(0, len(data) // step * step, step):
        parent = _digest(parent + data[start : start + step])
        hashes.append(parent)
    return hashes


def states_hash(chain: bytes) -> bytes:
    """The name of the states after the tokens that ``chain`` names."""
    return _digest(chain + b"states")


class UnreadableError(Exception):
    """A file cannot be used: it is ``damaged``, or it is none of this user's."""

    def __init__(self, reason: str, *, damaged: bool = True) -> None:
        super().__init__(reason)
        self.damaged = damaged


def write_block(path: Path, root: bytes, chain: bytes, block: NDArray[Any]) -> None:
    """Write a file under another name and rename it, so that readers see nothing or all of it. It is not synced: a
    file cut by a crash shows as damage."""
    values, head = np.ascontiguousarray(block), io.BytesIO()
    npy.write_array_header_1_0(head, npy.header_data_from_array_1_0(values))
    raw = values.reshape(-1).view(np.uint8).data
    with replace_file(path, STAGING, synced=False) as file:
        file.write(_digest(root, chain, head.getvalue(), raw) + head.getvalue())
        file.write(raw)


def read_block(path: Path, root: bytes, chain: bytes, max_bytes: int) -> NDArray[Any] | None:
    """The block of a file, checked; None if it has more than ``max_bytes``."""
    if not stat.S_ISREG(os.lstat(path).st_mode):  # a pipe would never end
        raise UnreadableError("it is no regular file", damaged=False)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
        check_owner(os.fstat(file.fileno()))
        if os.fstat(file.fileno()).st_size > max_bytes + HEAD_BYTES:
            return None
        digest, content = file.read(DIGEST_BYTES), file.read(max_bytes + HEAD_BYTES)
    if _digest(root, chain, content) != digest:
        raise UnreadableError("its digest is another one")
    head = io.BytesIO(content)
    npy.read_magic(head)
    shape, _, dtype = npy.read_array_header_1_0(head)
    block = np.frombuffer(content, dtype, offset=head.tell()).reshape(shape)
    return block if block.nbytes <= max_bytes else None


def check_owner(status: os.stat_result) -> None:
    """Raise UnreadableError for what belongs to, or may be written by, others than this user and the administrator."""
    if status.st_uid not in (os.geteuid(), 0):
        reason = f"it belongs to user {status.st_uid}, expected {os.geteuid()}, who runs this"
        raise UnreadableError(reason, damaged=False)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"its mode {stat.S_IMODE(status.st_mode):03o} lets others write it, expected 600"
        raise UnreadableError(reason, damaged=False)


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
