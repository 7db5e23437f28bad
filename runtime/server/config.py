"""Settings of the service: one frozen dataclass whose fields are the keys of the file and the flags of ``llmc serve``.

It imports the standard library only, so that ``llmc serve --help`` can list the settings at once.
"""

# ruff: noqa: RUF009  (what _setting returns is dataclasses.field)

import ipaddress
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from llmc.errors import UsageError, format_name, format_value
from llmc.runtime.api import DRAFT_WORDS
from llmc.strict import parse_toml, read_bytes

# The largest number and time of any setting: floats, and the system's waits, hold no more.
LARGEST, MOST_SECONDS = 1 << 63, 1e9
MOST_CONFIG = 1 << 20  # bytes of the file; one with every key has some two thousand
# Beyond the schemes of the web, what browsers send for pages of extensions, and "null" for pages without an address.
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^/\s?#@*A-Z]+")
MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.:/+@-]{0,254}", re.ASCII)

LISTEN, MODELS, SECURITY, LIMITS, RATES, OPERATION, UPSTREAM, FLEET = (
    "Where it listens",
    "Models and the engine",
    "Security",
    "Limits",
    "Rates",
    "Operation",
    "Upstream",
    "More than one machine",
)


def _setting(section: str, default: Any, text: str, **attributes: Any) -> Any:
    known = {"section": section, "help": text, **attributes}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=known)
    return field(default=default, metadata=known)


@dataclass(frozen=True)
class Setting:
    """One key, as ``llmc serve`` and the reference in README.md show it."""

    name: str  # of the key; its flag is flag
    # `flag` (true or false), `integer`, `number`, `text`, `path`, `choice`, `list` (of texts) or `models` (names to
    # paths)
    kind: str
    default: Any  # what holds if it is left out; None: what `help` says, or none
    section: str  # the heading that it stands under
    help: str
    unit: str = ""  # `bytes`, `seconds` and the like, or nothing
    # the range of a number, both included
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()  # the values of a `choice`

    @property
    def flag(self) -> str:
        """``--max-body-bytes``; where it is true or false there is a ``--no-`` of it too."""
        return f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True)
class ServerConfig:
    """All settings of the service. Left out ones have the defaults that ``settings()`` lists.
    Raises UsageError: a value is of another type, out of its range or contradicts another one."""

    models: Mapping[str, Path] = _setting(MODELS, {}, "Names that clients use, each with the folder of its bundle.")
    warm: tuple[str, ...] = _setting(
        MODELS, (), "Models to load at the start; default: the first. Others are loaded when asked for."
    )
    threads: int | None = _setting(
        MODELS, None, "Threads that each model computes with; default: as many as are usable.", low=1, high=1024
    )
    memory: int | None = _setting(
        MODELS, None, "Memory that all models together may take; default: what is available.", unit="bytes", low=1
    )
    max_context: int | None = _setting(
        MODELS, None, "Longest sequence; default: what the bundle was built for.", unit="tokens", low=1
    )
    max_batch: int | None = _setting(
        MODELS, None, "Rows of a model that run at once; default: what the bundle was built for.", low=1, high=1024
    )
    max_queue: int | None = _setting(
        MODELS, None, "Requests to a model that may wait; one more is refused; default: 256.", low=1, high=1_000_000
    )
    max_queue_s: float | None = _setting(
        MODELS,
        None,
        "Longest wait of a request in the queue; then it is refused; default: unlimited.",
        unit="seconds",
        low=0.1,
    )
    determinism: Literal["fast", "batch", "strict"] = _setting(
        MODELS, "fast", "What tokens may depend on besides the request: see Determinism in runtime/README.md."
    )
    draft: str = _setting(
        MODELS,
        "auto",
        "Speculative decoding: none, lookup, the folder of a draft bundle, or auto: lookup if answers stay identical.",
    )
    tool_format: tuple[str, ...] = _setting(
        MODELS, (), "Format of tool calls, as FORMAT or MODEL=FORMAT; default: the one that the chat template teaches."
    )
    prefix_cache_bytes: int | None = _setting(
        MODELS,
        None,
        "Memory of each model's prefix cache; default: an eighth of the available memory, at most 256 MB.",
        unit="bytes",
        low=0,
    )
    prefix_cache_folder: Path | None = _setting(
        MODELS, None, "Folder that keeps cached prefixes across restarts; default: none."
    )
    prefix_cache_disk_bytes: int | None = _setting(
        MODELS, None, "Disk space of that folder; default: 4 GiB.", unit="bytes", low=0
    )
    prefix_cache_scope: Literal["key", "shared"] = _setting(
        MODELS, "key", "Share cached prefixes among the requests of one key, or among all; without keys among all."
    )

    host: str = _setting(LISTEN, "127.0.0.1", "Address to listen on; others than this machine's own need keys.")
    port: int = _setting(LISTEN, 8000, "TCP port; 0 takes a free one.", low=0, high=65535)
    unix_socket: Path | None = _setting(LISTEN, None, "Unix socket to listen on instead of host and port.")
    tls_cert: Path | None = _setting(LISTEN, None, "Certificate chain in PEM, for HTTPS; it needs tls_key too.")
    tls_key: Path | None = _setting(LISTEN, None, "Private key in PEM of that certificate.")

    keys_file: Path | None = _setting(SECURITY, None, "TOML file of API keys; without it no key is asked for.")
    allow_no_keys: bool = _setting(SECURITY, False, "Serve other machines without asking for keys.")
    allowed_hosts: tuple[str, ...] = _setting(
        SECURITY, (), "Allowed values of Host, '*' for any; default: this machine's names without keys, else any."
    )
    cors_origins: tuple[str, ...] = _setting(
        SECURITY,
        (),
        "Origins whose pages may use the service, such as https://example.com; default: only its own page.",
    )
    allow_special: bool = _setting(
        SECURITY, False, "Let requests ask that text of messages may contain special tokens."
    )
    raw_special: bool = _setting(
        SECURITY, True, "Let raw prompts of completions contain special tokens, unless the client's key says otherwise."
    )
    page: bool = _setting(SECURITY, True, "Serve the chat page at /.")

    max_body_bytes: int = _setting(LIMITS, 8 << 20, "Largest body of a request.", unit="bytes", low=1024, high=1 << 30)
    body_timeout_s: float = _setting(
        LIMITS, 60.0, "Time for a request's body to arrive.", unit="seconds", low=0.1, high=3600
    )
    max_connections: int = _setting(
        LIMITS, 4096, "Open connections and running requests; beyond them requests get 503.", low=1, high=1_000_000
    )
    max_request_tokens: int | None = _setting(
        LIMITS,
        None,
        "Most tokens that a request may ask for, over all its outputs; default: the context's room.",
        unit="tokens",
        low=1,
    )
    request_deadline_s: float | None = _setting(
        LIMITS, None, "Time after which a request ends with an error; default: none.", unit="seconds", low=0.1
    )

    requests_per_minute: int | None = _setting(
        RATES,
        None,
        "Requests of each key without a rate of its own, or of all clients without keys; default: unlimited.",
        low=1,
    )
    tokens_per_minute: int | None = _setting(
        RATES, None, "Tokens of prompts and answers, counted in the same way; default: unlimited.", unit="tokens", low=1
    )

    heartbeat_s: float = _setting(
        OPERATION, 15.0, "Time without a token after which a stream sends a heartbeat.", unit="seconds", low=0.1
    )
    drain_s: float = _setting(
        OPERATION, 30.0, "Time for running requests to finish after SIGTERM.", unit="seconds", low=0, high=86_400
    )
    log_format: Literal["json", "text"] | None = _setting(
        OPERATION, None, "Format of log lines; default: text if stderr is a terminal, else json."
    )
    log_prompts: bool = _setting(OPERATION, False, "Log prompts, messages and outputs, too.")
    response_store_bytes: int = _setting(
        OPERATION,
        64 << 20,
        "Memory of stored responses (previous_response_id); 0 stores none.",
        unit="bytes",
        low=0,
        high=1 << 40,
    )

    upstream: str | None = _setting(
        UPSTREAM,
        None,
        "Base URL, with /v1, of an OpenAI-compatible service that answers what is refused here; default: none.",
    )
    upstream_key_file: Path | None = _setting(
        UPSTREAM, None, "File with the upstream's key, read again for each request; default: no key is sent."
    )
    upstream_models: tuple[str, ...] = _setting(
        UPSTREAM, (), "Names of models at the upstream, as NAME=ITS_NAME; default: the names that clients send."
    )
    upstream_timeout_s: float = _setting(
        UPSTREAM,
        300.0,
        "Longest wait for the upstream's first byte and between two bytes.",
        unit="seconds",
        low=0.1,
        high=86_400,
    )
    upstream_plain_http: bool = _setting(
        UPSTREAM, False, "Send requests and the upstream's key to another machine unencrypted."
    )

    ray: bool = _setting(FLEET, False, "Answer by replicas, which Ray places on the machines of a cluster.")
    ray_address: str | None = _setting(
        FLEET, None, "Ray's cluster, 'auto' for this machine's; default: start one here."
    )
    ray_min_replicas: int = _setting(FLEET, 1, "Fewest replicas.", low=1, high=10_000)
    ray_max_replicas: int | None = _setting(
        FLEET, None, "Most replicas; default: ray_min_replicas.", low=1, high=10_000
    )
    ray_cpus: float | None = _setting(
        FLEET,
        None,
        "Cores that Ray reserves for each replica; default: threads, else this machine's cores shared by all.",
        low=0.01,
        high=1024,
    )
    ray_gpus: float = _setting(FLEET, 0.0, "GPUs that Ray reserves for each replica.", low=0, high=64)

    def __post_init__(self) -> None:
        for setting in settings():
            object.__setattr__(self, setting.name, _check(setting, getattr(self, setting.name)))
        _check_together(self)

    @property
    def load_options(self) -> dict[str, Any]:
        """Arguments of :func:`llmc.runtime.load` that were given, ``memory`` excepted: all models share it.

        An answer may fill the context where a client names no number of tokens.
        """
        given = {name: getattr(self, name) for name in _LOADED if getattr(self, name) is not None}
        return {**given, "default_max_tokens": ANY_TOKENS}

    @property
    def tool_formats(self) -> dict[str, str]:
        """The formats of calls by the names of models that have one."""
        given = [setting.rpartition("=") for setting in self.tool_format]
        common = {name: form for name in self.models for _, sign, form in given if not sign}
        return common | {name: form for name, sign, form in given if sign}


ANY_TOKENS = 1 << 31  # more than any context has
_LOADED = (
    "threads",
    "max_context",
    "max_batch",
    "max_queue",
    "determinism",
    "draft",
    "prefix_cache_bytes",
    "prefix_cache_folder",
    "prefix_cache_disk_bytes",
)
_KINDS = {
    bool: "flag",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    tuple[str, ...]: "list",
    Mapping[str, Path]: "models",
}


@cache
def settings() -> tuple[Setting, ...]:
    hints = typing.get_type_hints(ServerConfig)
    return tuple(_describe(f.name, hints[f.name], f.default, f.metadata) for f in fields(ServerConfig))


def _describe(name: str, hint: Any, default: Any, metadata: Mapping[str, Any]) -> Setting:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = typing.get_args(hint)[0]
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    kind = "choice" if choices else _KINDS[hint]
    return Setting(name, kind, None if default is MISSING else default, choices=choices, **metadata)


def read_config(
    path: Path | None, flags: Mapping[str, Any] | None = None, is_name: Callable[[str], bool] = lambda text: False
) -> ServerConfig:
    """The settings of a TOML file, and over them ``flags``, of which None means left out.

    Paths in the file are relative to its folder. Models and the draft may also be names, if ``is_name`` says so and the
    folder has nothing of that name.

    Raises:
        UsageError: the file cannot be read, a key is unknown, or a value of another type, out of its range or in
            contradiction to another one; of what stands in the file with its name.
    """
    given = {} if path is None else _read(path, is_name)
    return ServerConfig(**given | {name: value for name, value in (flags or {}).items() if value is not None})


def _read(path: Path, is_name: Callable[[str], bool]) -> dict[str, Any]:
    try:
        content = parse_toml(read_bytes(path, MOST_CONFIG))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError("config", f"is {path}, which cannot be read as settings: {reason}") from error
    known = {setting.name: setting for setting in settings()}
    given = {}
    for name, value in content.items():
        if name not in known:
            raise UsageError(format_name(name), "is no setting", _advice(name, known), path=path)
        try:
            given[name] = _beside(path, known[name], _check(known[name], value), is_name)
        except UsageError as error:
            raise UsageError(error.parameter, error.problem, error.advice, path=path) from error
    return given


def _advice(name: str, known: Mapping[str, Setting]) -> str:
    import difflib  # slow to import, and rarely wanted

    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else "llmc serve --help lists them"


def _beside(path: Path, setting: Setting, value: Any, is_name: Callable[[str], bool]) -> Any:
    """A path that the file names is relative to the file's folder, wherever the service is started."""

    def find(source: str | Path) -> Path:
        beside = path.parent / source
        return Path(source) if is_name(str(source)) and not os.path.lexists(beside) else beside

    if setting.kind == "models":
        return {name: find(source) for name, source in value.items()}
    if setting.kind == "path":
        return path.parent / value
    if setting.name == "draft" and value not in DRAFT_WORDS:
        return str(find(value))
    return value


def _check(setting: Setting, value: Any) -> Any:
    """The value in the type of its field: a list as a tuple, a whole number as a number, a text as a path."""
    if value is None and setting.default is None and setting.kind != "models":
        return None
    taken = _TAKEN[setting.kind](value)
    low, high = setting.low, setting.high
    if setting.kind == "models" and isinstance(value, Mapping):
        for name in value:
            if type(name) is not str or not MODEL_NAME.fullmatch(name):
                said = "expected letters, digits and . _ : / + @ -"
                raise UsageError(
                    "models",
                    f"has the name {format_value(name)}, {said}, a letter or digit first",
                    "give it another name",
                )
    wrong = taken is None or (setting.choices and value not in setting.choices)
    if wrong or (low is not None and taken < low) or (high is not None and not taken <= high):
        raise UsageError(setting.name, f"is {format_value(value)}, expected {describe_values(setting)}")
    return taken


def describe_values(setting: Setting) -> str:
    """The values of a setting in words, such as ``1 ... 65535 bytes``."""
    if setting.choices:
        return f"one of {', '.join(setting.choices)}"
    if setting.low is None:
        return _WORDS[setting.kind]
    amount = f"{setting.low:g} or more" if setting.high is None else f"{_plain(setting.low)} ... {_plain(setting.high)}"
    return f"{amount} {setting.unit}".rstrip()


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _path(value: Any) -> Path | None:
    text = str(value) if isinstance(value, str | Path) else ""
    return Path(text) if text and text.isprintable() else None


def _texts(value: Any) -> tuple[str, ...] | None:
    whole = isinstance(value, list | tuple) and all(type(item) is str and item.isprintable() for item in value)
    return tuple(value) if whole else None


def _read_named_paths(value: Any) -> Mapping[str, Path] | None:
    if not isinstance(value, Mapping):
        return None
    found = {name: _path(folder) for name, folder in value.items() if type(name) is str and MODEL_NAME.fullmatch(name)}
    paths = {name: folder for name, folder in found.items() if folder is not None}
    return paths if len(paths) == len(value) else None  # a plain one, which can be pickled


# Readers of values by kind; each returns None for a value of another kind.
_TAKEN: Mapping[str, Any] = {
    "flag": lambda value: value if type(value) is bool else None,
    "integer": lambda value: value if type(value) is int and abs(value) < LARGEST else None,
    "number": lambda value: float(value) if type(value) in (int, float) and abs(value) <= MOST_SECONDS else None,
    "text": lambda value: value if type(value) is str and value and value.isprintable() else None,
    "choice": lambda value: value if type(value) is str else None,
    "path": _path,
    "list": _texts,
    "models": _read_named_paths,
}
_WORDS = {
    "flag": "true or false",
    "text": "a text",
    "path": "a path",
    "list": "a list of texts",
    "models": "names (letters, digits and . _ : / + @ -) with paths",
}


# ------------------------------------------------------------------------------------------------ several keys together


def is_local(host: str) -> bool:
    """True of an address that no other machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_together(config: ServerConfig) -> None:
    unknown = [name for name in config.warm if name not in config.models]
    if unknown and config.models:
        raise UsageError(
            "warm", f"holds {format_value(unknown[0])}, expected names of models: {', '.join(config.models)}"
        )
    _check_formats(config)
    if (config.tls_cert is None) != (config.tls_key is None):
        given, other = ("tls_key", "tls_cert") if config.tls_cert is None else ("tls_cert", "tls_key")
        raise UsageError(given, f"is given without {other}, expected both for HTTPS, or neither")
    if config.unix_socket is not None and config.tls_cert is not None:
        raise UsageError(
            "unix_socket", "is given beside tls_cert, and no network carries a Unix socket", "give one of them"
        )
    open_to_others = config.unix_socket is None and not is_local(config.host)
    if open_to_others and config.keys_file is None and not config.allow_no_keys:
        raise UsageError(
            "host",
            f"is {format_value(config.host)}, which other machines reach, and no key would be asked for",
            "give keys_file or, if everybody may use the service, allow_no_keys",
        )
    for origin in config.cors_origins:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(
                "cors_origins",
                f"holds {format_value(origin)}, expected origins as browsers write them, such as "
                "https://example.com: lower case, no path, no '*'",
            )
    _check_upstream(config)


def _check_formats(config: ServerConfig) -> None:
    if not config.tool_format:
        return
    from llmc.runtime.tools.formats import FORMATS  # which are not needed to list the settings

    for given in config.tool_format:
        name, sign, form = given.rpartition("=")
        if form not in FORMATS or (sign and config.models and name not in config.models):
            models, forms = ", ".join(config.models), ", ".join(FORMATS)
            raise UsageError(
                "tool_format",
                f"holds {format_value(given)}, expected a format or NAME=FORMAT",
                f"models are {models}" if form in FORMATS else f"formats are {forms}",
            )


def _check_upstream(config: ServerConfig) -> None:
    if config.upstream is None:
        if given := [n for n in ("upstream_key_file", "upstream_models", "upstream_plain_http") if getattr(config, n)]:
            raise UsageError(given[0], "is given without upstream, expected both or neither")
        return
    if config.ray:
        raise UsageError("upstream", "is given beside ray, and a fleet sends nothing elsewhere", "give one of them")
    url = read_upstream_url(config.upstream)
    if url.scheme == "http" and not is_local(url.hostname or "") and not config.upstream_plain_http:
        raise UsageError(
            "upstream",
            "is of http on another machine, where others read what is sent",
            "expected https, or upstream_plain_http if the network is yours",
        )
    for pair in config.upstream_models:
        if not all(map(MODEL_NAME.fullmatch, pair.partition("=")[::2])):
            raise UsageError(
                "upstream_models", f"holds {format_value(pair)}, expected NAME=ITS_NAME, as small=gpt-5-mini"
            )


def read_upstream_url(text: str) -> SplitResult:
    """The parts of the upstream's address. Raises UsageError: it is none; the address, which may hold a password, is
    not in the message."""
    try:
        url = urlsplit(text)
        _ = url.port
    except ValueError:
        url = urlsplit("")
    if url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc or set("?#") & set(text):
        raise UsageError(
            "upstream",
            "is no address of a service, expected one as https://api.example.com/v1, without a name, a password or "
            "a query",
            "give a password as upstream_key_file",
        )
    return url
