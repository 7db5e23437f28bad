"""KV caches on disk: prefixes that outlive the process, and sessions that somebody saves on purpose.

One format serves both::

    8 bytes   magic
    4 bytes   version of the format, little-endian like everything here
    4 bytes   length of the description
    16 bytes  digest of the version and the description
    ...       the description: JSON with key, parent, last (chain hashes), tokens, block (tokens of each), shape, dtype,
              a digest per block
    ...       zeros up to a multiple of 64
    ...       the blocks, one after the other

A digest is BLAKE2b (RFC 7693, https://www.rfc-editor.org/rfc/rfc7693) of 16 bytes. A block is named by its chain hash,
the digest of its parent's chain hash and its own tokens: equal names mean equal tokens from the first one on.

Digests show damage, not who computed the values: whoever writes a file also writes its digests. So a file is believed
only if nobody but this user and the administrator can have written it.
"""

import errno
import json
import math
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmc.errors import RequestError, ResourceError, UsageError
from llmc.publish import replaced

MAGIC = b"llmcKV\r\n"  # a transfer that changes line ends breaks it at once
VERSION = 2
ALIGNMENT = 64
DIGEST_BYTES = 16
STAGING = ".staging-"

# That of a million tokens has 8 MB. Parsing takes some twenty times as much memory, which a file must not ask for.
DESCRIPTION_BYTES = 1 << 24

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


@dataclass(frozen=True)
class Description:
    """The description of a file's blocks."""

    kind: str
    key: bytes
    parent: bytes
    hashes: tuple[bytes, ...]
    tokens: NDArray[np.int64]  # of all blocks, and in a session those after them
    block: int  # tokens of one
    shape: tuple[int, ...]  # of one block
    dtype: np.dtype[Any]
    digests: tuple[bytes, ...]

    @classmethod
    def of(
        cls, kind: str, key: bytes, parent: bytes, tokens: NDArray[np.int64], blocks: Sequence[NDArray[Any]], block: int
    ) -> "Description":
        """Describe blocks of ``block`` tokens each; ``parent`` is the chain hash before the first one."""
        hashes = chain_hashes(parent, tokens[: len(blocks) * block], block)
        digests = tuple(_digest(_raw(block)) for block in blocks)
        return cls(kind, key, parent, tuple(hashes), tokens, block, blocks[0].shape, blocks[0].dtype, digests)

    @classmethod
    def decoded(cls, text: bytes) -> "Description":
        """The description that :meth:`encoded` wrote; any of Python's errors for bad data if it is none."""
        raw = json.loads(text)
        tokens = np.array(raw["tokens"], np.int64)
        digests = tuple(bytes.fromhex(digest) for digest in raw["digests"])
        if not _NUMBERS.fullmatch(raw["dtype"]):
            raise ValueError(f"its values are of type {raw['dtype']}")
        parent, dtype, shape = bytes.fromhex(raw["parent"]), np.dtype(raw["dtype"]), tuple(int(n) for n in raw["shape"])
        block = int(raw["block"])
        hashes = tuple(chain_hashes(parent, tokens[: len(digests) * block], block))
        if tokens.ndim != 1 or min(*shape, block) < 1 or len(hashes) != len(digests) or hashes[-1].hex() != raw["last"]:
            raise ValueError("it contradicts itself")
        about = cls(raw["kind"], bytes.fromhex(raw["key"]), parent, hashes, tokens, block, shape, dtype, digests)
        if about._text() != text:  # of other types, with other fields, or written otherwise
            raise ValueError("it is not as llmc writes it")
        return about

    def encoded(self) -> bytes:
        """The beginning of the file, up to the first block."""
        text = self._text()
        lead = _LEAD.pack(MAGIC, VERSION, len(text), _description_digest(VERSION, text))
        return (lead + text).ljust(_aligned(len(lead) + len(text)), b"\0")

    def _text(self) -> bytes:
        raw = {
            "kind": self.kind,
            "key": self.key.hex(),
            "parent": self.parent.hex(),
            "last": self.hashes[-1].hex(),
            "tokens": self.tokens.tolist(),
            "block": self.block,
            "shape": self.shape,
            "dtype": self.dtype.str,
            "digests": [digest.hex() for digest in self.digests],
        }
        return json.dumps(raw, separators=(",", ":")).encode()

    @property
    def form(self) -> Form:
        """Shape and type of one block."""
        return self.shape, self.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class CacheFile:
    """A file that was opened: what it has, and where."""

    file: BinaryIO
    description: Description
    offset: int  # of the first block

    def read(self, count: int) -> list[NDArray[Any]]:
        """The first blocks, each checked; UnreadableError if one is damaged."""
        about = self.description
        self.file.seek(self.offset)
        blocks = []
        for digest in about.digests[:count]:
            block = np.empty(about.shape, about.dtype)
            if self.file.readinto(_raw(block)) != about.block_bytes:  # type: ignore[attr-defined]
                raise UnreadableError("it ends too early")
            if _digest(_raw(block)) != digest:
                raise UnreadableError("the digest of a block is not that of its values")
            blocks.append(block)
        return blocks


def possible_path(path: str | Path) -> Path:
    """``path``, or UsageError if no file can have this name."""
    try:
        encoded = os.fsencode(path)
    except TypeError as error:
        raise UsageError(f"{path!r:.60} is no path; give the name as text") from error
    except UnicodeEncodeError as error:
        raise UsageError(f"{str(path)!r} is no path: it holds a lone surrogate; give the name as text") from error
    if b"\0" in encoded:
        raise UsageError(f"{str(path)!r} is no path: it holds a NUL character; leave it out")
    return Path(path)


@contextmanager
def opened(path: Path, *, follow_symlinks: bool) -> Iterator[CacheFile]:
    """Open a file, check its owner, and check its description against its size. A pipe or device is not opened.

    Raises:
        OSError: there is no file, or it may not be read.
        UnreadableError: it is no whole file of ours, or others may have written it.
    """
    mode = os.stat(path, follow_symlinks=follow_symlinks).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise UnreadableError("it is no regular file", damaged=False)
    more = 0 if follow_symlinks else os.O_NOFOLLOW
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | more)) as file:
        check_owner(os.fstat(file.fileno()))
        yield _described(file)


def check_owner(status: os.stat_result) -> None:
    """Raise UnreadableError for what belongs to, or may be written by, others than this user and the administrator."""
    if status.st_uid not in (os.geteuid(), 0):
        said = f"it belongs to user {status.st_uid}, expected {os.geteuid()}, who runs this"
        raise UnreadableError(said, damaged=False)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        said = f"its mode {stat.S_IMODE(status.st_mode):03o} lets others write it, expected 600"
        raise UnreadableError(said, damaged=False)


def _described(file: BinaryIO) -> CacheFile:
    size = os.fstat(file.fileno()).st_size
    lead = file.read(_LEAD.size)
    if lead[: len(MAGIC)] != MAGIC[: len(lead)]:
        raise UnreadableError(f"it begins with {lead[: len(MAGIC)]!r}, not with {MAGIC!r}", damaged=False)
    if len(lead) < _LEAD.size:
        raise UnreadableError(f"it ends after {size} bytes")
    _, version, length, digest = _LEAD.unpack(lead)
    if length > DESCRIPTION_BYTES:
        raise UnreadableError(f"its description has {length} bytes, expected {DESCRIPTION_BYTES} or less")
    text = file.read(min(length, size))
    if _description_digest(version, text) != digest:
        raise UnreadableError("the digest of its description is not that of its text")
    if version != VERSION:
        raise UnreadableError(f"it is written in format {version}, this llmc reads {VERSION}")
    try:
        about = Description.decoded(text)
    except (ValueError, KeyError, TypeError, IndexError, ArithmeticError, RecursionError) as error:
        raise UnreadableError(f"its description cannot be read ({error})") from error
    offset = _aligned(_LEAD.size + length)
    expected = offset + about.block_bytes * len(about.digests)
    if size != expected:
        raise UnreadableError(f"it has {size} bytes, its description says {expected}")
    return CacheFile(file, about, offset)


def publish(path: Path, about: Description, blocks: Sequence[NDArray[Any]], *, synced: bool = True) -> None:
    """Write a file beside its place and rename it: whoever looks sees nothing or all of it."""
    with replaced(path, STAGING, synced=synced) as file:
        file.write(about.encoded())
        for block in blocks:
            file.write(_raw(block))


def save_session(path: str | Path, tokens: Sequence[int], blocks: Sequence[NDArray[Any]], block: int, key: str) -> None:
    """Save what the cache holds of one sequence, for its owner alone; an existing file is replaced at the end.

    UsageError where there is nothing to save or the place cannot be written, ResourceError where the disk is full.

    Args:
        tokens: the sequence; the last ones need not be in the cache.
        blocks: what the cache holds of its first tokens, all of one shape and type, at least one.
        block: tokens of each.
        key: all that the values depend on, as for the prefix cache.
    """
    path = possible_path(path)
    assert 1 <= len(blocks) * block <= len(tokens)
    root, sequence = root_hash(key), np.asarray(tokens, np.int64)
    try:
        publish(path, Description.of("session", root, root, sequence, blocks, block), blocks)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"{path}: the disk is full; free some space and save again") from error
        raise UsageError(f"{path}: cannot write here ({error.strerror}); choose another file") from error


def load_session(
    path: str | Path, block: int, key: str, *, form: Form, vocab_size: int, max_bytes: int
) -> tuple[list[int], list[NDArray[Any]]]:
    """The tokens that :func:`save_session` was given, and as many of its first blocks as ``max_bytes`` hold.

    Args:
        block, key: as for :func:`save_session`.
        form: shape and type that a block must have.
        vocab_size: every token must be below it.
        max_bytes: of blocks.

    Raises:
        UsageError: the file cannot be opened, or no file can have this name.
        RequestError: it is no session of llmc's, is damaged, belongs to another model, or others may have written it.
    """
    path = possible_path(path)
    try:
        with opened(path, follow_symlinks=True) as found:
            about = found.description
            ours = (about.kind, about.key, about.block, about.form) == ("session", root_hash(key), block, form)
            if not ours or not 0 <= about.tokens.min() <= about.tokens.max() < vocab_size:
                raise RequestError(f"{path} is no session of this model and type of cache; start the session anew")
            blocks = found.read(max_bytes // about.block_bytes)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened ({error.strerror}); name a saved session") from error
    except UnreadableError as error:
        raise RequestError(f"{path} cannot be restored: {error}; start the session anew") from error
    return about.tokens.tolist(), blocks


def _digest(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _description_digest(version: int, text: bytes) -> bytes:
    return _digest(version.to_bytes(4, "little") + text)


def _raw(array: NDArray[Any]) -> memoryview:
    """The bytes of an array; those of a contiguous one are not copied."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
