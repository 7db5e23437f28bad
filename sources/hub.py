"""Download what llmc reads of a model at the Hugging Face hub into the hub's cache, with the hub's own client.

The cache and the environment are huggingface_hub's (``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``).
A repository's list of files is untrusted: only names that llmc reads are taken, and no pickles and no code.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from llmc.bundle import ADAPTER_FILE, CONFIG_FILE, TOKENIZER_FILES, sha256_file
from llmc.errors import CheckpointError, HubError, LlmcError, ResourceError, UsageError, format_name, text_of
from llmc.origin import COMMIT, find_own_file
from llmc.publish import FULL
from llmc.strict import MOST_JSON, read_json

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.utils.tqdm import tqdm

log = logging.getLogger(__name__)

# org/name, @revision, and after a colon the type of a GGUF file's weights, or the file. A web address may go on; it
# has one slash where it was taken for a path.
_NAME = re.compile(
    r"(?P<host>(?:https?://?)?(?:www\.)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<repository>\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b)"
    r"(?:@(?P<revision>\w[\w.+/-]{0,199}))?(?::(?P<pick>[^:\\\x00-\x1f]{1,400}))?"
    r"(?(host)(?:/(?:tree|blob|resolve)/(?P<branch>\w[\w.+-]{0,199})(?:/(?P<file>[^:\\\x00-\x1f]{1,400}\.gguf))?)?/?)",
    re.ASCII,
)
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
GGUF = ".gguf"
# Kinds of models that sentence-transformers' file on reading texts was named after.
_READERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
# Files beside the weights that an export reads; an adapter's is among them, since an export refuses to leave it out.
TEXT_FILES = {
    *(CONFIG_FILE, "generation_config.json", *TOKENIZER_FILES, "chat_template.json", ADAPTER_FILE),
    *("processor_config.json", "preprocessor_config.json", "modules.json"),
    *(f"sentence_{kind}_config.json" for kind in _READERS),
}
_MORE_TEXTS = re.compile(r"additional_chat_templates/[\w.-]+\.jinja|\d+_\w+/config\.json", re.ASCII)
_MORE_WEIGHTS = re.compile(r"\d+_\w+/model\.safetensors", re.ASCII)  # of sentence-transformers' dense layers
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")  # never read, only named in an error
_KNOWN = (".json", ".jinja", ".safetensors", GGUF, *_PICKLES)
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_NO_MODEL = re.compile("mmproj|imatrix", re.IGNORECASE)  # GGUF files beside a model's
# Types of weights in a GGUF file, by preference, where the name gives none: llama.cpp's.
_USUAL_TYPES = ("Q4_K_M", "Q8_0")
_SHA256, _SHA1 = 64, 40  # digits
_ROOM = "free some space, or choose another disk with HF_HOME"
MOST_LISTED = 100_000  # files of a repository
MOST_FILES = 1024  # files to download; the models with most shards have about 200


@dataclass(frozen=True)
class HubName:
    """A model's name at the hub."""

    repository: str
    revision: str  # branch, tag or commit
    pick: str  # GGUF file or type of its weights, or empty


@dataclass(frozen=True)
class Listed:
    """A file in the hub's list: its bytes, and its SHA-256, or git's SHA-1 if git stores it."""

    size: int
    digest: str


@dataclass(frozen=True)
class Choice:
    """Files to download, weights last, so that a folder with weights has all of them; ``entry`` is a GGUF file."""

    files: tuple[str, ...]
    entry: str = ""


def parse_name(text: str) -> HubName | None:
    """Parse ``org/name``, with ``@revision``, and with ``:TYPE`` or ``:FILE`` for a GGUF file; None for other texts.

    ``hf.co/`` or ``https://huggingface.co/`` may precede the name. The hub is not asked.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    repository, revision = match["repository"], match["revision"] or match["branch"] or "main"
    if any(mark in repository for mark in ("--", "..")) or repository.endswith((GGUF, ".git")):
        return None
    if any(part in ("", ".", "..") for part in revision.split("/")):
        return None
    return HubName(repository, revision, match["pick"] or match["file"] or "")


def download(wanted: HubName, *, offline: bool | None, progress: Callable[..., None]) -> Path:
    """Download a model of the hub, unless the cache has it; return its folder, or its GGUF file.

    Without a type or file in the name, safetensors come first, then the GGUF file of Q4_K_M, else of Q8_0, else the
    first one. If the hub does not answer, the copy in the cache is used, with a warning. A cut connection is resumed;
    a process that ends keeps its complete files. Each new file is compared with the hub's hash.

    Args:
        wanted: the name.
        offline: True uses no network; None: as ``HF_HUB_OFFLINE`` says.
        progress: called with the model, its size and its licence, and the fraction that is done.

    Raises:
        HubError: the hub does not answer or does not give the model, or ``offline`` and the cache does not have it.
        CheckpointError: the repository has no weights that llmc reads, its list is corrupt, or a file was damaged.
        UsageError: no GGUF file, or more than one, fits the name.
        ResourceError: the disk has no room.
    """
    from huggingface_hub import constants  # slow to import, and only needed for a name of the hub

    constants.HF_HUB_DISABLE_TELEMETRY = True  # else it asks the hub which agent may run it, and tells torch's version
    cache = Path(constants.HF_HUB_CACHE) / f"models--{wanted.repository.replace('/', '--')}"
    if constants.is_offline_mode() if offline is None else offline:
        return _find_cached(wanted, cache)
    try:
        with _translate_errors(wanted, cache):
            model = _ask(wanted)
    except HubError as error:
        try:
            path = _find_cached(wanted, cache)
        except LlmcError:
            raise error from None
        log.warning("%s; the copy in the cache is used", error)
        return path
    if model.id.lower() != wanted.repository.lower():
        progress(f"{wanted.repository} is now called {format_name(model.id)}")
    return _fetch(wanted, model, cache, progress)


def _ask(wanted: HubName) -> "ModelInfo":
    from huggingface_hub import HfApi, constants

    model = HfApi().model_info(
        wanted.repository,
        revision=wanted.revision,
        files_metadata=True,
        timeout=constants.HF_HUB_ETAG_TIMEOUT,  # by default it waits forever
    )
    if not (isinstance(model.id, str) and isinstance(model.sha, str) and COMMIT.fullmatch(model.sha)):
        raise ValueError("the answer has no commit")
    if not isinstance(model.tags or [], list):
        raise ValueError("the answer's tags are no list")
    return model


def _fetch(wanted: HubName, model: "ModelInfo", cache: Path, progress: Callable[..., None]) -> Path:
    """Download the files that the cache lacks; return what to open."""
    files, commit = _read_list(wanted, model), str(model.sha)
    snapshot = cache / "snapshots" / commit

    def fetch(names: Sequence[str], step: str) -> None:
        missing = {name: files[name] for name in names if not (snapshot / name).is_file()}
        for name, listed in missing.items():
            if name.endswith((".json", ".jinja")) and listed.size > MOST_JSON:
                raise CheckpointError(f"{wanted.repository}: {name} has {_megabytes(listed.size)}; tell its owner")
        new = sum(listed.size for listed in missing.values() if not (cache / "blobs" / listed.digest).exists())
        _check_room(wanted, cache, new)
        bar = _make_bar(progress, step, new) if missing else None
        for name, listed in missing.items():
            with _translate_errors(wanted, cache):
                hf_hub_download(wanted.repository, name, revision=commit, tqdm_class=bar)
                _compare(snapshot, name, listed)

    def read_index() -> Any:
        fetch([INDEX_FILE], f"{wanted.repository}: {INDEX_FILE}")
        return read_json(snapshot / INDEX_FILE)

    from huggingface_hub import hf_hub_download

    choice = _choose(wanted, files, read_index)
    size = sum(files[name].size for name in choice.files)
    fetch(choice.files, f"{wanted.repository}: {_megabytes(size)}, {_licence(model)}")
    with suppress(OSError):  # a cache that others wrote
        _note_revision(cache, wanted.revision, commit)
    return snapshot / choice.entry


def _make_bar(progress: Callable[..., None], step: str, total: int) -> "type[tqdm]":
    """A class for the client's bars, which are not shown: the bytes of all of them are reported to ``progress``."""
    from huggingface_hub.utils.tqdm import tqdm

    done = 0

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            nonlocal done
            done += int(n or 0)  # less than 0 if a file starts again
            progress(step, min(done / max(total, 1), 1.0))

    progress(step, 0.0)
    return Bar


def _find_cached(wanted: HubName, cache: Path) -> Path:
    """The model's folder or GGUF file in the cache. Raises HubError: the cache lacks it, or a part of it."""
    problem, commit = f"{wanted.repository}@{wanted.revision} is not in the cache {cache.parent}", wanted.revision
    with suppress(OSError, ValueError):
        commit = (cache / "refs" / wanted.revision).read_text(encoding="ascii").strip()
    snapshot = cache / "snapshots" / commit
    if COMMIT.fullmatch(commit) and snapshot.is_dir():
        names = {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()}
        try:
            return snapshot / _choose(wanted, names, lambda: read_json(snapshot / INDEX_FILE)).entry
        except (CheckpointError, UsageError) as error:
            problem = f"the cache {cache.parent} has only a part of {wanted.repository}@{wanted.revision} ({error})"
    raise HubError(problem, "run once with network, without --offline and HF_HUB_OFFLINE, or copy that cache here")


# ------------------------------------------------------------------------------------------------------------- choice


def _read_list(wanted: HubName, model: "ModelInfo") -> dict[str, Listed]:
    """The files that llmc may read, by path. Raises CheckpointError: the list is corrupt."""
    listed = model.siblings or []
    if len(listed) > MOST_LISTED:
        raise CheckpointError(f"{wanted.repository} lists {len(listed)} files, expected at most {MOST_LISTED}")
    files: dict[str, Listed] = {}
    for item in listed:
        name = item.rfilename
        if not (isinstance(name, str) and name.endswith(_KNOWN) and _stays_inside(name)):
            continue
        size, digest = (item.lfs.size, item.lfs.sha256) if item.lfs else (item.size, item.blob_id)
        digits = _SHA256 if item.lfs else _SHA1
        if type(size) is not int or size < 0 or not re.fullmatch(f"[0-9a-f]{{{digits}}}", str(digest)) or name in files:
            raise CheckpointError(
                f"{wanted.repository} lists {format_name(name)} twice, or without size and hash; tell its owner"
            )
        files[name] = Listed(size, str(digest))
    return files


def _stays_inside(name: str) -> bool:
    """True for a plain relative path, on every system."""
    parts = name.split("/")
    return name.isprintable() and not set(name) & set('\\:*?"<>|') and not {"", ".", ".."} & set(parts)


def _choose(wanted: HubName, names: Collection[str], read_index: Callable[[], Any]) -> Choice:
    """The files of a repository that llmc reads.
    Raises CheckpointError: it has no weights that llmc reads; UsageError: no GGUF file fits the name."""
    ggufs = sorted(name for name in names if name.endswith(GGUF) and not _NO_MODEL.search(name))
    pick = "" if wanted.pick.lower() == "latest" else wanted.pick
    weights: list[str] = []
    if not pick and CONFIG_FILE in names:
        weights = [SINGLE_FILE] if SINGLE_FILE in names else _list_shards(names, read_index)
    if not pick and not weights and {ADAPTER_FILE, ADAPTER_WEIGHTS} <= set(names):
        weights = [ADAPTER_WEIGHTS]
    if weights:
        texts = [name for name in names if name in TEXT_FILES or _MORE_TEXTS.fullmatch(name)]
        weights += [name for name in names if _MORE_WEIGHTS.fullmatch(name)]
        choice = Choice((*sorted(texts), *weights))
    else:
        choice = _choose_gguf(wanted, pick, ggufs, names)
    if len(choice.files) > MOST_FILES:
        raise CheckpointError(f"{wanted.repository} has {len(choice.files)} files, expected at most {MOST_FILES}")
    return choice


def _list_shards(names: Collection[str], read_index: Callable[[], Any]) -> list[str]:
    if INDEX_FILE not in names:
        return []
    try:
        shards = sorted(set(read_index()["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{INDEX_FILE} cannot be read ({text_of(error)}); tell the model's owner") from error
    for name in shards:
        if name not in names or not str(name).endswith(".safetensors"):
            raise CheckpointError(f"{INDEX_FILE} names {format_name(str(name))}, which is not there; tell its owner")
    return [INDEX_FILE, *shards]


def _choose_gguf(wanted: HubName, pick: str, ggufs: Sequence[str], names: Collection[str]) -> Choice:
    firsts = [name for name in ggufs if not (part := _PART.fullmatch(name)) or int(part["number"]) == 1]
    if pick.endswith(GGUF):
        fitting = [name for name in ggufs if name == pick]
    elif pick:
        fitting = [name for name in firsts if _is_of_type(name, pick)]
    else:
        usual = [name for kind in _USUAL_TYPES for name in firsts if _is_of_type(name, kind)]
        fitting = [*usual, *firsts][:1]
    listed = ", ".join(format_name(name) for name in (fitting if pick and fitting else firsts)[:8])
    if len(fitting) == 1:
        return _add_parts(fitting[0], names)
    if fitting:
        raise UsageError("source", f"{wanted.repository} has several files of {pick}: {listed}", "name one after ':'")
    if pick and firsts:
        raise UsageError(
            "source", f"{wanted.repository} has no GGUF file of {pick!r}, but {listed}", "name one of them"
        )
    lacking = "GGUF file" if pick else f"{SINGLE_FILE} with a {CONFIG_FILE}, and no GGUF file"
    pickles = sorted({PurePosixPath(name).suffix for name in names if name.endswith(_PICKLES)})
    raise CheckpointError(
        f"{wanted.repository} has no {lacking}"
        + (f", only {', '.join(pickles)}, which can run code" if pickles else ""),
        "use a repository with safetensors or GGUF",
    )


def _is_of_type(name: str, kind: str) -> bool:
    """True if the file's name, without the number of its part, or its folder ends with the type."""
    part = _PART.fullmatch(name)
    stem = part["stem"] if part else name.removesuffix(GGUF)
    ending = re.compile(rf"(?:.*[^a-z0-9])?{re.escape(kind)}", re.IGNORECASE)
    return any(ending.fullmatch(text) for text in PurePosixPath(stem).parts[-2:])


def _add_parts(name: str, names: Collection[str]) -> Choice:
    """The file, or all parts of a model in several files."""
    part = _PART.fullmatch(name)
    if part is None:
        return Choice((name,), name)
    if int(part["count"]) > MOST_FILES:
        raise CheckpointError(f"{format_name(name)} is one of {part['count']} parts, expected at most {MOST_FILES}")
    parts = tuple(f"{part['stem']}-{number + 1:05d}-of-{part['count']}{GGUF}" for number in range(int(part["count"])))
    if absent := [each for each in parts if each not in names]:
        raise CheckpointError(f"{format_name(absent[0])} is missing, a part of {format_name(name)}; tell its owner")
    return Choice(parts, parts[0])


# ----------------------------------------------------------------------------------------------------------- download


def _check_room(wanted: HubName, cache: Path, size: int) -> None:
    folder = next(each for each in (cache, *cache.parents) if each.exists())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ResourceError(
            f"{wanted.repository} needs {_megabytes(size)} more, the disk has {free // 1_000_000:,} MB free",
            _ROOM,
            path=cache.parent,
        )


def _compare(snapshot: Path, name: str, listed: Listed) -> None:
    """Remove a new file whose hash is not the hub's.

    Raises:
        CheckpointError: its hash is another one, or it lies elsewhere: the client takes a blob's name from the hub.
        ValueError: the client has put it into another commit's folder.
    """
    link = snapshot / name
    try:
        path = find_own_file(snapshot, name)
    except CheckpointError:
        link.unlink()
        raise
    if path is None:
        raise ValueError(f"{name} is of another commit")
    if len(listed.digest) == _SHA256:
        digest = sha256_file(path)
    else:  # git's hash of a small file
        content = path.read_bytes()
        digest = hashlib.sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False).hexdigest()
    if digest != listed.digest:
        for each in (path, link):
            each.unlink(missing_ok=True)
        raise CheckpointError(
            f"its hash is {digest}, the hub's {listed.digest}: it was damaged on the way, and removed",
            "run again",
            path=link,
        )


def _note_revision(cache: Path, revision: str, commit: str) -> None:
    """Write the commit of a branch or tag where the hub's client keeps it, for use without network."""
    ref = cache / "refs" / revision
    if revision != commit:
        ref.parent.mkdir(parents=True, exist_ok=True)
        part = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        part.write_text(commit, encoding="ascii")
        os.replace(part, ref)


def _licence(model: "ModelInfo") -> str:
    stated = [tag for tag in model.tags or [] if isinstance(tag, str) and tag.startswith("license:")]
    return format_name(stated[0].removeprefix("license:")) if stated else "no licence stated"


def _megabytes(size: int) -> str:
    return f"{-(-size // 1_000_000):,} MB"


@contextmanager
def _translate_errors(wanted: HubName, cache: Path) -> Iterator[None]:
    """Translate the errors of the hub's client."""
    import httpx2

    try:
        yield
    except (httpx2.HTTPError, OSError, AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _translate(error, wanted, cache) from error


def _translate(error: Exception, wanted: HubName, cache: Path) -> LlmcError:
    import httpx2
    from huggingface_hub import constants, errors

    name, login = wanted.repository, "log in with: hf auth login, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        problem = f"{name} is gated: the hub gives it to accounts that accept its terms"
        return HubError(problem, f"accept them at {constants.ENDPOINT}/{name}, then {login}")
    if isinstance(error, errors.RepositoryNotFoundError):
        problem = f"{name} is not a path here, and the hub has no such model, or it is private"
        return HubError(problem, f"check the name; for a private model {login}")
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(f"{name} has no revision {wanted.revision}", "name a branch, a tag or a commit after '@'")
    if isinstance(error, (httpx2.TransportError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        problem = f"{constants.ENDPOINT} cannot be reached, or the connection was cut ({type(error).__name__})"
        return HubError(problem, "check the network and run again: complete files are kept")
    if isinstance(error, errors.HfHubHTTPError):
        advice = {401: f"the token is wrong: {login}", 429: f"it gets too many requests: wait, or {login}"}
        status = error.response.status_code
        return HubError(f"the hub answers with status {status} for {name}", advice.get(status, "run again later"))
    if isinstance(error, OSError) and error.errno in FULL:
        return ResourceError("the disk is full", _ROOM, path=cache)
    if isinstance(error, OSError) and error.strerror:
        return HubError(f"it cannot be written ({error.strerror})", "choose another folder with HF_HOME", path=cache)
    return HubError(f"{name} did not arrive whole, or the hub's answer is corrupt ({text_of(error)})", "run again")
