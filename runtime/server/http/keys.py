"""API keys from a file, and the middleware that asks for one."""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.errors import UsageError
from llmc.runtime.api.request import MOST_PRIORITY
from llmc.runtime.sampling.ranges import FLAG, Range, integer
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.errors import ApiError, refuse
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
    """One client's.

    Attributes:
        name: for logs and metrics.
        digest: SHA-256 of the key; the key itself is not kept.
        models: names that it may use; None: all.
        requests_per_minute, tokens_per_minute: None: as the settings say.
        lowest_priority: what its requests may ask for; lower ones have their turn sooner.
        admin: it may load and unload models.
        local_only: nothing of its requests goes to the upstream.
        raw_special: its prompts of completions may spell control tokens, where the settings let them.
    """

    name: str
    digest: bytes
    models: frozenset[str] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    lowest_priority: int = 0
    admin: bool = False
    local_only: bool = False
    raw_special: bool = True

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
    named = f"keys_file {path}"
    tables, status = _read(named, path, parse_toml)
    _check_access(named, path, status, any("key" in table for table in tables.values() if isinstance(table, Mapping)))
    if not 1 <= len(tables) <= MOST_KEYS:
        raise UsageError(f"{named} has {len(tables)} keys, expected 1 ... {MOST_KEYS}")
    keys = tuple(_key(named, name, table) for name, table in tables.items())
    if len({key.digest for key in keys}) < len(keys):
        raise UsageError(f"{named} has one key under two names; give each client its own")
    return keys


def read_upstream_key(path: Path) -> str:
    """The one key that a file holds. Raises UsageError: others may read it, or it holds something else."""
    named = f"upstream_key_file {path}"
    key, status = _read(named, path, lambda content: content.decode("utf-8").strip())
    _check_access(named, path, status, plain=True)
    if not _SENT.fullmatch(key):
        raise UsageError(f"{named} holds no key, expected one line of printable ASCII, without spaces")
    return key


def _read(named: str, path: Path, parse: Callable[[bytes], T]) -> tuple[T, os.stat_result]:
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return parse(content), status
    except OSError as error:
        raise UsageError(f"{named} cannot be read: {error.strerror}") from error
    except TomlError as error:  # its message shows characters of the file
        line = re.search(r"at line \d+", str(error))
        raise UsageError(f"{named} is no TOML{f' {line[0]}' if line else ''}") from None
    except ValueError as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error
        raise UsageError(f"{named} cannot be read: {reason}") from None


def _check_access(named: str, path: Path, status: os.stat_result, plain: bool) -> None:
    """Keys that others can replace are nobody's, and those that others can read are everybody's; hashes may be read."""
    if not hasattr(os, "getuid"):
        return
    if status.st_uid not in (0, os.getuid()):
        raise UsageError(f"{named} is another user's (uid {status.st_uid}); make it yours or root's")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        raise UsageError(f"{named} has mode {mode:o}, others may write it; run chmod 600 {path}")
    if plain and mode & 0o004:
        said = f"everybody may read the keys in it; run chmod 600 {path}, or let it hold hashes alone"
        raise UsageError(f"{named} has mode {mode:o}, {said}")


def _key(named: str, name: str, table: Any) -> Key:
    where = f"{named}, [{name:.64}]"
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: expected a name of letters, digits and . _ -, at most 64")
    if not isinstance(table, dict):
        raise UsageError(f"{where}: expected a table with key or sha256")
    if unknown := table.keys() - {"key", "sha256", *_VALUES}:
        raise UsageError(
            f"{where}: unknown entry {min(unknown)!r:.60}, expected key or sha256, and any of {', '.join(_VALUES)}"
        )
    for entry, values in _VALUES.items():
        if entry in table:
            values.check(f"{where}: {entry}", table[entry])
    given = {entry: table[entry] for entry in _VALUES if entry in table}
    if "models" in given:
        given["models"] = frozenset(given["models"])
    return Key(name, _digest(where, table), **given)


def _digest(where: str, table: Mapping[str, Any]) -> bytes:
    if ("key" in table) == ("sha256" in table):
        raise UsageError(f"{where}: expected either key or sha256")
    if "sha256" in table:
        if type(table["sha256"]) is not str or not _HASH.fullmatch(table["sha256"]):
            raise UsageError(f"{where}: sha256 is no 64 hexadecimal digits in lower case, as sha256sum prints them")
        return bytes.fromhex(table["sha256"])
    if type(table["key"]) is not str or not _KEY.fullmatch(table["key"]):
        raise UsageError(f"{where}: key is no {SHORTEST} ... 512 printable ASCII characters without spaces")
    return hashlib.sha256(table["key"].encode()).digest()


# -------------------------------------------------------------------------------------------------------- middleware


class Keys:
    """Ask for a key on every route but those that are open; without a file, on none.

    ``scope["state"]`` gets ``key`` (:class:`Key` or None) and ``has_admin`` (True if some key is an admin's); what was
    presented is removed from the headers, so that nothing behind can log it.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, keyring: Keyring | None) -> None:
        self.app = app
        self._keyring = keyring
        self._page = config.page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        presented = take_key(scope)
        key = self._keyring.find(presented) if self._keyring and presented else None
        if self._keyring and key is None and not self._is_open(scope):
            found = "the API key is unknown" if presented else "there is no API key"
            message = f"{found}; send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            error = ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            return await refuse(scope, receive, send, error)
        has_admin = self._keyring is not None and self._keyring.has_admin
        scope.setdefault("state", {}).update(key=key, has_admin=has_admin)
        return await self.app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """True of liveness, and of the page, which must load before it can ask for a key."""
        if scope["method"] not in ("GET", "HEAD"):
            return False
        path = scope["path"]
        return path == "/health" or (self._page and (path == "/" or path.startswith("/page/")))


def take_key(scope: Scope) -> str:
    """The key that a client presented, as ``Authorization: Bearer`` or else ``x-api-key``; the request loses it."""
    headers = Headers(scope=scope)
    scheme, _, presented = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        presented = headers.get("x-api-key", "")
    secret = (b"authorization", b"x-api-key")
    scope["headers"] = [(name, value) for name, value in scope["headers"] if name not in secret]
    return presented.strip()
