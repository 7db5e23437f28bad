"""Tokenizers and chat templates are programs: before their first use, try them in a separate process.

The tokenizer library can panic, crash or hang on a broken character map or a replacement that expands one character to
a thousand; a template can loop forever. A passed trial is remembered.
"""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from llmc.bundle import TOKENIZER_FILE
from llmc.errors import BundleError, RequestError
from llmc.runtime.host import disk_cache
from llmc.runtime.host.apart import ApartError, call_apart
from llmc.runtime.text.chat_template import TEMPLATE_FILE, ChatTemplate, has_template
from llmc.runtime.text.tokenizer import CONFIG_FILE, REMEDY, SPECIAL_TOKENS_FILE, Tokenizer

log = logging.getLogger(__name__)

# The largest vocabularies load in about a second on a desktop; a small board with a slow disk takes ten times as long.
TRIAL_S = 60.0
# Reading a vocabulary of 262,144 tokens takes some 500 MB.
TRIAL_BYTES = 4 << 30
# Most tokens, and normalized characters, per character: four bytes, or the letters of a ligature.
MOST_PER_CHARACTER = 24
LONGEST_TEXT = 1000  # characters of one replacement; a character map has hundreds of thousands
TRIAL = 4  # raise it when the trial changes
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


def try_tokenizer(folder: Path) -> None:
    """Try the tokenizer of a checkpoint, export or bundle, unless the cache knows that it works.
    Raises BundleError: it is missing or broken, or exceeds the limits."""

    def examine_apart() -> None:
        try:
            call_apart(f"{__name__}:examine", str(folder), seconds=TRIAL_S, memory=TRIAL_BYTES)
        except ApartError as error:
            if error.refused:
                raise BundleError(str(error)) from error
            raise BundleError(
                f"the tokenizer or chat template does not work: a trial in a separate process failed ({error})",
                REMEDY,
                path=folder,
            ) from error

    try:
        disk_cache.once("tokenizer", _key(folder), examine_apart)
    except OSError as error:
        log.warning("%s is not tried before its use (%s)", folder, error)


def _key(folder: Path) -> str:
    parts: list[object] = [TRIAL, tokenizers.__version__]
    for path in (folder / name for name in (TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, TEMPLATE_FILE)):
        if path.is_file():  # reading a pipe would never end
            try:
                parts.append((path.name, hashlib.sha256(path.read_bytes()).hexdigest()))
            except OSError as error:
                raise BundleError(f"{path} cannot be read ({error}); {REMEDY}") from error
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def examine(folder: str) -> None:
    """Load a tokenizer and a chat template and use them on samples; runs in a separate process.
    Raises BundleError: it is broken, or produces too much output from its input."""
    path = Path(folder) / TOKENIZER_FILE
    tokenizer = Tokenizer.from_folder(folder)
    _ = tokenizer.controls
    for sample in (*SAMPLES, " ".join(_texts(tokenizer.rewriters()))):
        try:
            _use(tokenizer, sample, path)
        except RequestError as error:
            if not isinstance(error.__cause__, Exception):  # a panic; other errors concern single requests
                raise BundleError(f"{path} does not work: {error}; {REMEDY}") from error
    if has_template(path.parent):
        _chat(tokenizer, path.parent)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value[:LONGEST_TEXT]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _use(tokenizer: Tokenizer, sample: str, path: Path) -> None:
    most = MOST_PER_CHARACTER * (len(sample) + MOST_PER_CHARACTER)
    for special in (True, False):
        ids = tokenizer.encode(sample, add_special_tokens=special)
        if (made := max(len(ids), tokenizer.count_normalized(sample))) > most:
            raise BundleError(f"{path} makes {made} tokens or characters of {len(sample)}, expected at most {most}")
        tokenizer.decode(ids, skip_special_tokens=special)


def _chat(tokenizer: Tokenizer, folder: Path) -> None:
    for chat in CHATS:
        try:
            ChatTemplate.from_folder(folder, tokenizer).render(**chat)
        except RequestError as error:  # templates may refuse the samples
            if isinstance(error.__cause__, MemoryError):
                raise BundleError("the chat template takes all memory", REMEDY, path=folder) from error
