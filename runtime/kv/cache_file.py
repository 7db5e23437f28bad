"""Blocks of the KV cache on disk, one in a file::

    8 bytes   magic
    4 bytes   version of the format, little-endian like everything here
    4 bytes   length of the description
    16 bytes  digest of the description
    ...       the description: JSON with key and chain (hashes), shape, dtype, and the digest of the values
    ...       the values

A digest is BLAKE2b (RFC 7693, https://www.rfc-editor.org/rfc/rfc7693) of 16 bytes. A block is named by its chain hash,
the digest of its parent's chain hash and its own tokens: equal names mean equal tokens from the first one on.

Digests show damage, not who computed the values: whoever writes a file also writes its digests. So a file is believed
only if nobody but this user and the administrator can have written it.
"""

import json
import math
import os
import re
import stat
import struct
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmc.publish import replace_file

MAGIC = b"llmcKV\r\n"  # a transfer that changes line ends breaks it at once
VERSION = 3
DIGEST_BYTES = 16
STAGING = ".staging-"
DESCRIPTION_BYTES = 1 << 12  # at most; some 200 are usual

# Shape and type of a block.
Form = tuple[tuple[int, ...], np.dtype[Any]]

_NUMBERS = re.compile(r"[<>|][iuf][1248]")  # numpy's dtype.str
_LEAD = struct.Struct(f"<8sII{DIGEST_BYTES}s")


def root_hash(key: str, scope: str | None = None) -> bytes:
    """The beginning of one model's chains, of those that share a scope; the key names everything that cached values
    depend on."""
    named = [key, ""] if scope is None else [key, "", scope]  # the second is an adapter's name, and there are none
    return _digest(json.dumps(named).encode())


def chain_hashes(parent: bytes, tokens: NDArray[np.int64], block: int) -> list[bytes]:
    """Chain hashes of the whole blocks of ``tokens``, the first one below ``parent``."""
    data, step = tokens.astype("<i8", copy=False).tobytes(), 8 * block
    hashes = []
    for start in range(0, len(data) // step * step, step):
        parent = _digest(parent + data[start : start + step])
        hashes.append(parent)
    return hashes


class UnreadableError(Exception):
    """A file cannot be used: it is ``damaged``, or it is none of this user's."""

    def __init__(self, reason: str, *, damaged: bool = True) -> None:
        super().__init__(reason)
        self.damaged = damaged


def write_block(path: Path, root: bytes, chain: bytes, block: NDArray[Any]) -> None:
    """Write a file beside its place and rename it: whoever looks sees nothing or all of it.

    It is not synced: what a crash leaves of it shows as damage.
    """
    raw = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
    about = {"key": root.hex(), "chain": chain.hex(), "shape": block.shape, "dtype": block.dtype.str}
    text = json.dumps({**about, "digest": _digest(raw).hex()}).encode()
    with replace_file(path, STAGING, synced=False) as file:
        file.write(_LEAD.pack(MAGIC, VERSION, len(text), _digest(text)) + text)
        file.write(raw)


def read_block(path: Path, root: bytes, chain: bytes, max_bytes: int) -> NDArray[Any] | None:
    """The block of a file, checked; None if it has more than ``max_bytes``."""
    if not stat.S_ISREG(os.lstat(path).st_mode):  # a pipe would never end
        raise UnreadableError("it is no regular file", damaged=False)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
        check_owner(os.fstat(file.fileno()))
        about = _description(file)
        try:
            named = (about["key"], about["chain"]) == (root.hex(), chain.hex())
            shape, dtype, digest = tuple(about["shape"]), about["dtype"], bytes.fromhex(about["digest"])
            if not named or min(shape) < 1 or not _NUMBERS.fullmatch(dtype):
                raise ValueError("it describes another block than its name does")
            size = math.prod(shape) * np.dtype(dtype).itemsize
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableError(f"its description cannot be used ({error})") from error
        if os.fstat(file.fileno()).st_size != file.tell() + size:
            raise UnreadableError(f"its description says {size} bytes of values, it has others")
        if size > max_bytes:
            return None
        values = file.read(size)
        if _digest(values) != digest:
            raise UnreadableError("the digest of its values is another one")
        return np.frombuffer(values, dtype).reshape(shape)


def check_owner(status: os.stat_result) -> None:
    """Raise UnreadableError for what belongs to, or may be written by, others than this user and the administrator."""
    if status.st_uid not in (os.geteuid(), 0):
        said = f"it belongs to user {status.st_uid}, expected {os.geteuid()}, who runs this"
        raise UnreadableError(said, damaged=False)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        said = f"its mode {stat.S_IMODE(status.st_mode):03o} lets others write it, expected 600"
        raise UnreadableError(said, damaged=False)


def _description(file: BinaryIO) -> Any:
    lead = file.read(_LEAD.size)
    if lead[: len(MAGIC)] != MAGIC[: len(lead)]:
        raise UnreadableError(f"it begins with {lead[: len(MAGIC)]!r}, not with {MAGIC!r}", damaged=False)
    if len(lead) < _LEAD.size:
        raise UnreadableError("it ends too early")
    _, version, length, digest = _LEAD.unpack(lead)
    text = file.read(min(length, DESCRIPTION_BYTES))
    if version != VERSION or _digest(text) != digest:
        raise UnreadableError(f"it is of format {version} (this llmc reads {VERSION}), or its digest is another one")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"its description cannot be read ({error})") from error


def _digest(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
