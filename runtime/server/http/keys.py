"""API keys, read from a file."""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llmc.errors import UsageError, format_name
from llmc.runtime.api.request import MOST_PRIORITY
from llmc.runtime.sampling.ranges import FLAG, Range, integer
from llmc.strict import TomlError, open_regular, parse_toml

T = TypeVar("T")
MOST_BYTES = 1 << 20  # of the file
MOST_KEYS = 1000  # each is compared with what every request brings: 1000 take about half a millisecond
MOST_RATE = 10**12  # a minute; buckets count in floats
SHORTEST = 16  # characters of a key; what people think up is guessed
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_KEY = re.compile(rf"[!-~]{{{SHORTEST},512}}")
_SENT = re.compile("[!-~]{1,4096}")  # what another service takes for a key
_HASH = re.compile("[0-9a-f]{64}")
_VALUES = {
    "models": Range(
        "names",
        "a list of names",
        lambda value: isinstance(value, list) and bool(value) and all(type(name) is str for name in value),
    ),
    "requests_per_minute": integer(1, MOST_RATE),
    "tokens_per_minute": integer(1, MOST_RATE),
    "lowest_priority": integer(-MOST_PRIORITY, MOST_PRIORITY),
    "admin": FLAG,
    "local_only": FLAG,
    "raw_special": FLAG,
}


@dataclass(frozen=True)
class Key:
    """One client's."""

    name: str  # for logs and metrics
    digest: bytes  # SHA-256 of the key; the key itself is not kept
    models: frozenset[str] | None = None  # names that it may use; None: all
    # None: as the settings say
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    lowest_priority: int = 0  # what its requests may ask for; lower ones have their turn sooner
    admin: bool = False  # it may load and unload models
    local_only: bool = False  # nothing of its requests goes to the upstream
    raw_special: bool = True  # its prompts of completions may spell control tokens, where the settings let them

    def __repr__(self) -> str:
        return f"Key({self.name!r})"

    def allows(self, model: str) -> bool:
        return self.models is None or model in self.models


class Keyring:
    """The keys of a file, which :meth:`reload` reads anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = read_keys(path)

    def reload(self) -> None:
        """Take what the file says now; where it cannot be read, the keys stay as they are.
        Raises UsageError: as :func:`read_keys`."""
        self._keys = read_keys(self._path)

    @property
    def has_admin(self) -> bool:
        return any(key.admin for key in self._keys)

    def find(self, presented: str) -> Key | None:
        """The key that was presented, in a time that tells nothing of those that were not."""
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a TOML file: a table for each, named after its client, with ``key`` or ``sha256``."""
    option = "keys_file"
    tables, status = _read(option, path, parse_toml)
    _check_access(option, path, status, any("key" in table for table in tables.values() if isinstance(table, Mapping)))
    if not 1 <= len(tables) <= MOST_KEYS:
        raise UsageError(option, f"{path} has {len(tables)} keys, expected 1 ... {MOST_KEYS}")
    keys = tuple(_key(path, name, table) for name, table in tables.items())
    if len({key.digest for key in keys}) < len(keys):
        raise UsageError(option, f"{path} has one key under two names", "give each client its own")
    return keys


def read_upstream_key(path: Path) -> str:
    """The one key that a file holds. Raises UsageError: others may read it, or it holds something else."""
    option = "upstream_key_file"
    key, status = _read(option, path, lambda content: content.decode("utf-8").strip())
    _check_access(option, path, status, plain=True)
    if not _SENT.fullmatch(key):
        raise UsageError(option, f"{path} holds no key, expected one line of printable ASCII, without spaces")
    return key


def _read(option: str, path: Path, parse: Callable[[bytes], T]) -> tuple[T, os.stat_result]:
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return parse(content), status
    except OSError as error:
        raise UsageError(option, f"{path} cannot be read: {error.strerror}") from error
    except TomlError as error:  # its message shows characters of the file
        line = re.search(r"at line \d+", str(error))
        raise UsageError(option, f"{path} is no TOML{f' {line[0]}' if line else ''}") from None
    except ValueError as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error
        raise UsageError(option, f"{path} cannot be read: {reason}") from None


def _check_access(option: str, path: Path, status: os.stat_result, plain: bool) -> None:
    """Refuse key files that other users can write, or read (unless they hold only hashes)."""
    if not hasattr(os, "getuid"):
        return
    if status.st_uid not in (0, os.getuid()):
        raise UsageError(option, f"{path} is another user's (uid {status.st_uid})", "make it yours or root's")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        raise UsageError(option, f"{path} has mode {mode:o}, others may write it", f"run chmod 600 {path}")
    if plain and mode & 0o004:
        raise UsageError(
            option,
            f"{path} has mode {mode:o}, everybody may read the keys in it",
            f"run chmod 600 {path}, or let it hold hashes alone",
        )


def _key(path: Path, name: str, table: Any) -> Key:
    where = f"[{name:.64}]"
    if not _NAME.fullmatch(name):
        raise UsageError(where, "is no name, expected letters, digits and . _ -, at most 64", path=path)
    if not isinstance(table, dict):
        raise UsageError(where, "is no table, expected one with key or sha256", path=path)
    if unknown := table.keys() - {"key", "sha256", *_VALUES}:
        raise UsageError(
            f"{where}.{format_name(min(unknown))}",
            f"is no entry, expected key or sha256, and any of {', '.join(_VALUES)}",
            path=path,
        )
    for entry, values in _VALUES.items():
        if entry in table:
            values.check(f"{where}.{entry}", table[entry], path)
    given = {entry: table[entry] for entry in _VALUES if entry in table}
    if "models" in given:
        given["models"] = frozenset(given["models"])
    return Key(name, _digest(path, where, table), **given)


def _digest(path: Path, where: str, table: Mapping[str, Any]) -> bytes:
    if ("key" in table) == ("sha256" in table):
        raise UsageError(where, "has key and sha256, or neither, expected one of them", path=path)
    if "sha256" in table:
        if type(table["sha256"]) is not str or not _HASH.fullmatch(table["sha256"]):
            raise UsageError(
                f"{where}.sha256", "is no 64 hexadecimal digits in lower case, as sha256sum prints them", path=path
            )
        return bytes.fromhex(table["sha256"])
    if type(table["key"]) is not str or not _KEY.fullmatch(table["key"]):
        raise UsageError(
            f"{where}.key", f"is no {SHORTEST} ... 512 printable ASCII characters without spaces", path=path
        )
    return hashlib.sha256(table["key"].encode()).digest()
