"""Tokenizers and chat templates are programs: before their first use they are tried in a process of their own.

The library that runs tokenizers can panic, end the process or never return, for a character map that is broken or a
replacement that makes a thousand characters of one; a template can loop for ever. What passed is remembered.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from llmc.bundle import TOKENIZER_FILE
from llmc.errors import BundleError, RequestError
from llmc.runtime.host import disk_cache
from llmc.runtime.host.apart import ApartError, call_apart
from llmc.runtime.text.chat_template import TEMPLATE_FILE, ChatTemplate, has_template
from llmc.runtime.text.tokenizer import CONFIG_FILE, SPECIAL_TOKENS_FILE, Tokenizer
from llmc.strict import read_json

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
# Normalizers that lengthen what characters they know, each for itself: one Unicode form, one map, one of bytes.
LENGTHENING, MOST_LENGTHENING = ("ByteLevel", "NFKC", "NFKD", "Precompiled"), 4
KIND, CACHE_BYTES = "tokenizer", 1_000_000
TRIAL = 3  # another number for another trial
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
_QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [_QUESTION]},
    {"messages": [{"role": "system", "content": "Be brief."}, _QUESTION], "tools": [_TOOL]},
    {"messages": [_QUESTION, {"role": "assistant", "content": "It is fine. " * 100}] * 20 + [_QUESTION]},
)
_REMEDY = "take it from the checkpoint again"
# What matches beside a character, which then stays.
_LOOKAROUND = re.compile(r"\(\?<?[=!]|\\K")
_REPLACING = ("normalizer", "decoder")
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
    # By their times first, so that no start reads the files for it; by their content, so that copies are known.
    seen = disk_cache.entry(KIND, _key(folder, _times))
    if seen.exists():
        return
    known = disk_cache.entry(KIND, _key(folder, _content))
    if known.exists() or _passes(folder):
        try:
            for entry in (seen, known):
                with disk_cache.published(entry):
                    pass
        except OSError as error:
            log.warning("the trial of a tokenizer is not kept (%s)", error)
        disk_cache.prune(KIND, CACHE_BYTES)


def _passes(folder: Path) -> bool:
    """True after a trial, false where none can be made.

    Raises:
        BundleError: the tokenizer does not pass.
    """
    try:
        call_apart(f"{__name__}:examine", str(folder), seconds=TRIAL_S, memory=TRIAL_BYTES)
    except ApartError as error:
        if error.refused:
            raise BundleError(str(error)) from error
        raise BundleError(
            f"{folder}: the tokenizer or chat template does not work: tried in a process of its own it failed "
            f"({error}); {_REMEDY}"
        ) from error
    except OSError as error:
        log.warning("%s is not tried before its use, for no process can be started (%s)", folder, error)
        return False
    return True


def _key(folder: Path, tell: Callable[[Path], object]) -> str:
    """A hash of what tells the files from any others, and of the library that runs them."""
    found: list[object] = [TRIAL, tokenizers.__version__]
    for name in (TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, TEMPLATE_FILE):
        if (folder / name).is_file():  # a pipe would never end
            try:
                found.append((name, tell(folder / name)))
            except OSError as error:
                raise BundleError(f"{folder / name} cannot be read ({error}); {_REMEDY}") from error
    return hashlib.sha256(repr(found).encode()).hexdigest()[:32]


def _times(path: Path) -> object:
    """Nobody can set the time of a file's change back."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _content(path: Path) -> object:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def examine(folder: str) -> None:
    """Load a tokenizer and a chat template and use them on samples. It is called in a process of its own.

    Raises:
        BundleError: it is broken, or makes too much of too little.
    """
    path = Path(folder) / TOKENIZER_FILE
    content = _content_of(path)
    patterns = _check_sections(path, content)  # before the library reads it, which normalizes added tokens
    tokenizer = Tokenizer.from_folder(folder)
    for token in content.get("added_tokens") or ():
        _check_length(path, "an added token", token["content"], LONGEST_ADDED_TOKEN)
    _ = tokenizer.controls
    for sample in (*SAMPLES, "".join(patterns)):
        try:
            _use(tokenizer, sample, path)
        except RequestError as error:
            if not isinstance(error.__cause__, Exception):  # a panic; others are for requests with such texts
                raise BundleError(f"{path} does not work: {error}; {_REMEDY}") from error
    if has_template(path.parent):
        _chat(tokenizer, path.parent)


def _chat(tokenizer: Tokenizer, folder: Path) -> None:
    for chat in CHATS:
        try:
            ChatTemplate.from_folder(folder, tokenizer).render(**chat)
        except RequestError as error:  # templates may refuse what they do not know
            if isinstance(error.__cause__, MemoryError):
                raise BundleError(f"{folder}: the chat template takes all memory; {_REMEDY}") from error


def _content_of(path: Path) -> dict[str, Any]:
    """The description of a tokenizer; empty where there is none, which the library says better.

    Raises:
        BundleError: it is broken, or beyond a bound.
    """
    try:
        found = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} is broken ({error}); {_REMEDY}") from error
    return found if isinstance(found, dict) else {}


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
    _check_growth(path, content)
    return [part["String"] for part in parts if isinstance(part.get("String"), str)]


def _check_growth(path: Path, content: dict[str, Any]) -> None:
    """Refuse replacements that make too much of a character, however rare it is.

    Raises:
        BundleError: they do.
    """
    forms = [part for part in _parts(content.get("normalizer")) if part.get("type") in LENGTHENING]
    if len(forms) > MOST_LENGTHENING:
        raise BundleError(
            f"{path}: {len(forms)} normalizers each lengthen what they know, at most {MOST_LENGTHENING} are expected"
        )
    for section in _REPLACING:
        made = _growth(list(_parts(content.get(section))))
        if made > MOST_PER_CHARACTER:
            raise BundleError(
                f"{path}: replacements of its {section} make {made:.3g} characters of one, at most "
                f"{MOST_PER_CHARACTER} are expected; {_REMEDY}"
            )


def _growth(parts: list[dict[str, Any]]) -> float:
    """The most characters that one may become by replacements, one after the other; no text has to be tried for it.

    From the last one back, each character weighs as much as it may still become: a text of some characters shares
    what its replacement weighs among them; an expression may match any character, or beside it.
    """
    weights: dict[str, float] = {}
    others = 1.0  # the weight of all that is not in weights
    for part in reversed(parts):
        pattern, content = part.get("pattern"), part.get("content")
        if not isinstance(pattern, dict) or not isinstance(content, str):
            continue  # something else than a replacement
        made = sum(weights.get(character, others) for character in content)
        if isinstance(text := pattern.get("String"), str):
            for character in text:
                weights[character] = max(weights.get(character, others), made / len(text))
        elif isinstance(expression := pattern.get("Regex"), str):
            stays = _LOOKAROUND.search(expression) is not None
            weights = {key: weight + made if stays else max(weight, made) for key, weight in weights.items()}
            others = others + made if stays else max(others, made)
    return max([others, *weights.values()])


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
