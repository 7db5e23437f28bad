"""A tokenizer.json is a program, too: before its first use it is tried in a process of its own, under limits.

The library that runs it can panic, end the process or never return, for a character map that is broken or a
replacement that makes a thousand characters of one. What passed is remembered.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers

from llmc.bundle import TOKENIZER_FILE
from llmc.errors import BundleError, RequestError
from llmc.runtime.host import disk_cache
from llmc.runtime.host.apart import ApartError, call_apart
from llmc.runtime.text.tokenizer import CONFIG_FILE, SPECIAL_TOKENS_FILE, Tokenizer

log = logging.getLogger(__name__)

# The largest vocabularies load in about a second on a desktop; a small board with a slow disk takes ten times as long.
TRIAL_S = 60.0
# A vocabulary of 262,144 tokens takes some 500 MB while it is read.
TRIAL_BYTES = 4 << 30
# Of normalizers and the like: replacements have some characters, sequences some parts.
LONGEST_TEXT, MOST_PARTS = 64, 1000
# Added tokens have up to some 40 characters.
LONGEST_ADDED_TOKEN = 200
# Tokens, and characters after normalization, that a character may become: four bytes, or what a ligature stands for.
MOST_PER_CHARACTER = 24
KIND, CACHE_BYTES = "tokenizer", 1_000_000
TRIAL = 1  # another number for another trial
SAMPLES = (
    "",
    " ",
    "".join(map(chr, range(0x250))),
    "The quick brown fox, don't you think? 1234567890 3.14159 def f(x):\n\treturn {'a': [x]}  # comment\r\n" * 4,
    "Русский ελληνικά العربية עברית हिन्दी ไทย 中文 日本語 한국어 e\u0301 \u1100\u1161 ﬁ ﷽ Ⅷ ½",
    "👩‍👩‍👧 🇫🇷 𝕌 \ufeff\u200b\ufffd",
    *(character * 500 for character in ("a", " ", "1", ".", "\n", "é", "中")),
    " a" * 250 + "!",
)
_REMEDY = "take it from the checkpoint again"
_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def tried_tokenizer(folder: Path) -> Tokenizer:
    """:meth:`Tokenizer.from_folder`, after a trial where these files have not been tried on this machine.

    Raises:
        BundleError: the files are missing or broken, or the tokenizer does not work within the limits.
    """
    try_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def try_tokenizer(folder: Path) -> None:
    """Try the tokenizer of a checkpoint, export or bundle, unless the cache knows that it works.

    Raises:
        BundleError: it is missing or broken, or does not work within the limits.
    """
    entry = disk_cache.entry(KIND, _identity(folder))
    if entry.exists():
        return
    try:
        call_apart(f"{__name__}:examine", str(folder), seconds=TRIAL_S, memory=TRIAL_BYTES)
    except ApartError as error:
        if error.refused:
            raise BundleError(str(error)) from error
        raise BundleError(
            f"{folder / TOKENIZER_FILE} does not work: tried in a process of its own it failed ({error}); {_REMEDY}"
        ) from error
    except OSError as error:
        log.warning("%s is not tried before its use, for no process can be started (%s)", folder, error)
        return
    try:
        with disk_cache.published(entry):
            pass
    except OSError as error:
        log.warning("the trial of a tokenizer is not kept (%s)", error)
    disk_cache.prune(KIND, CACHE_BYTES)


def _identity(folder: Path) -> str:
    """A hash of what tells the files from any others, and of the library that runs them.

    Not of their content, whose reading would count at every start: nobody can set a file's time of change back.
    """
    found: list[object] = [TRIAL, tokenizers.__version__]
    for name in (TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE):
        with suppress(OSError):
            status = (folder / name).stat()
            found.append((name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:32]


def examine(folder: str) -> None:
    """Load a tokenizer and use it on samples. It is called in a process of its own.

    Raises:
        BundleError: it is broken, or makes too much of too little.
    """
    tokenizer = Tokenizer.from_folder(folder)
    path = Path(folder) / TOKENIZER_FILE
    content = json.loads(path.read_text(encoding="utf-8"))
    patterns = _check_sections(path, content)
    for token in content.get("added_tokens") or ():
        _check_length(path, "an added token", token["content"], LONGEST_ADDED_TOKEN)
    _ = tokenizer.controls
    for sample in (*SAMPLES, "".join(patterns)):
        try:
            _use(tokenizer, sample, path)
        except RequestError as error:
            raise BundleError(f"{path} does not work: {error}; {_REMEDY}") from error


def _use(tokenizer: Tokenizer, sample: str, path: Path) -> None:
    most = MOST_PER_CHARACTER * (len(sample) + MOST_PER_CHARACTER)
    for special in (True, False):
        ids = tokenizer.encode(sample, add_special_tokens=special)
        if (made := max(len(ids), tokenizer.normalized_length(sample))) > most:
            raise BundleError(f"{path} makes {made} tokens or characters of {len(sample)}, at most {most} are expected")
        tokenizer.decode(ids, skip_special_tokens=special)


def _check_sections(path: Path, content: dict[str, Any]) -> list[str]:
    """The texts that normalizers and others look for.

    Raises:
        BundleError: they have too many parts, or a text that is too long.
    """
    parts = [part for name in _SECTIONS for part in _parts(content.get(name))]
    if len(parts) > MOST_PARTS:
        raise BundleError(f"{path} describes {len(parts)} parts of a pipeline, at most {MOST_PARTS} are expected")
    for part in parts:
        for name in ("content", "prepend", "replacement", "prefix", "suffix"):
            if isinstance(part.get(name), str):
                _check_length(path, name, part[name], LONGEST_TEXT)
    return [part["String"] for part in parts if isinstance(part.get("String"), str)]


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _parts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _parts(item)


def _check_length(path: Path, name: str, text: str, longest: int) -> None:
    if len(text) > longest:
        raise BundleError(f"{path}: {name} has {len(text)} characters, at most {longest} are expected; {_REMEDY}")
