"""The text that calibration and evaluation read: the user's, or llmc's own.

llmc's own text was written for this project, is under its licence, and holds no special tokens.
"""

import codecs
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import RequestError, UsageError, printable
from llmc.runtime.text.chat_template import ChatTemplate
from llmc.runtime.text.tokenizer import Tokenizer

Ids = NDArray[np.int64]

DEFAULT_TEXT = Path(__file__).with_name("data") / "calibration.txt"
# Most bytes that are read. Tokenizing takes about 170 bytes of memory per byte. This is half a million tokens, twice
# those of GPTQ's paper.
READ_AT_MOST = 2_000_000
FEWEST_WINDOWS = 8
# Tokens of a window that a bundle is judged on: enough for attention to matter, and a text has many of them.
JUDGED_WINDOW = 256
DATE = "01 Jan 2025"  # templates like Llama's insert today's date unless given one

_REMEDY = "give a file of UTF-8 text, or of chats as .jsonl"
_EXPECTED = '{"messages": [...]}, a list of messages, or {"text": "..."}'

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class CalibrationSamples:
    """Windows of text that calibration runs the model on."""

    ids: Ids  # token ids, int64 [windows, length]
    name: str  # the file's name, or "default text"
    sha256: str  # of the whole file
    default: bool  # whether it is the text that comes with llmc
    tokens: int  # tokens of the text, of which the windows are a part


def read_samples(
    path: Path | None,
    model_folder: Path,
    *,
    samples: int,
    length: int,
    vocab_size: int,
    held_out: bool = False,
    remedy: str = "ask for fewer tokens per window",
) -> CalibrationSamples:
    """Cut a text into consecutive windows of tokens; of more than ``samples`` windows, take some evenly spread.

    Each window begins as a prompt does (BOS, where the tokenizer puts one). A ``*.jsonl`` file has a conversation per
    line (``{"messages": [...]}``, which may have ``tools``, or the list alone) or a text (``{"text": ...}``), joined by
    the end-of-sequence token; any other file is UTF-8 text. Only the first :data:`READ_AT_MOST` bytes are used.

    Args:
        path: the text; None takes the default one.
        model_folder: the tokenizer's and the chat template's.
        samples: windows wanted, at least 1; a shorter text gives fewer.
        length: tokens per window, at least 2.
        vocab_size: of the model; ids beyond are refused.
        held_out: take the part of the default text for judging quality, not the part for calibration.
        remedy: advice for a text that is too short, besides a longer text; may be empty.
    """
    source = DEFAULT_TEXT if path is None else path
    text, sha256 = _read(source)
    if path is None:  # every fourth paragraph is for evaluation only, since text of the calibration flatters
        paragraphs = enumerate(text.split("\n\n"))
        text = "\n\n".join(paragraph for number, paragraph in paragraphs if (number % 4 == 3) == held_out)
    tokenizer = Tokenizer.from_folder(model_folder)
    if _is_jsonl(source):
        prefix, ids = np.array([], np.int64), _conversations(text, source, model_folder, tokenizer)
    else:
        prefix, ids = _prefix(tokenizer)[: length - 1], _encode(tokenizer, text, source, "text")
    _check_vocabulary(np.append(prefix, ids), vocab_size, tokenizer, source)
    step = length - len(prefix)
    fewest = 1 if path is None else min(samples, FEWEST_WINDOWS)
    needed = fewest * step
    if len(ids) < needed:
        beside = f", or {remedy}" if remedy else ""
        raise UsageError(
            "text",
            f"is too short: {len(ids)} tokens, expected at least {needed}",
            f"give a longer one{beside}",
            path=source,
        )
    return CalibrationSamples(
        ids=_windows(ids, step, samples, prefix),
        name="default text" if path is None else printable(path.name),
        sha256=sha256,
        default=path is None,
        tokens=len(ids),
    )


def _is_jsonl(path: Path) -> bool:
    return path.suffix.lower() == ".jsonl"


def _read(path: Path) -> tuple[str, str]:
    try:
        if path.exists() and not path.is_file():
            raise UsageError("text", "is not a regular file", _REMEDY, path=path)
        with path.open("rb") as file:
            data = file.read(READ_AT_MOST)
            digest = hashlib.sha256(data)
            while piece := file.read(1 << 20):
                digest.update(piece)
            cut = file.tell() > len(data)
    except OSError as error:
        raise UsageError("text", f"cannot be read ({error.strerror})", _REMEDY, path=path) from error
    text = _decode(data, path, cut)
    if cut:
        log.warning("%s is large: only its first %d bytes are used", path, READ_AT_MOST)
        text = text[: text.rfind("\n") + 1] if _is_jsonl(path) else text  # whole lines
    if not text.strip():
        raise UsageError("text", "is empty, expected one", _REMEDY, path=path)
    return text, digest.hexdigest()


def _decode(data: bytes, path: Path, cut: bool) -> str:
    """Decode UTF-8; drop an incomplete last character of a truncated file."""
    try:
        text, _ = codecs.utf_8_decode(data, "strict", not cut)
    except UnicodeDecodeError as error:
        raise UsageError(
            "text", f"is not UTF-8 ({error.reason} at byte {error.start})", "convert it", path=path
        ) from error
    if "\0" in text:
        raise UsageError("text", "is not UTF-8 (it holds zero bytes)", "convert it if it is text at all", path=path)
    return text.removeprefix("\ufeff")  # the byte order mark


# ------------------------------------------------------------------------------------------------------- conversations


def _conversations(text: str, path: Path, folder: Path, tokenizer: Tokenizer) -> Ids:
    """Token ids of all lines, with the end of sequence between, if the tokenizer names one."""
    eos = tokenizer.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
    end = np.array([] if eos is None else [eos], np.int64)
    template = cache(partial(ChatTemplate.from_folder, folder, tokenizer))  # read if a line needs it
    parts: list[Ids] = []
    for number, line in enumerate(text.split("\n"), 1):  # str.splitlines also splits at characters inside of JSON
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                where, f"is not JSON ({getattr(error, 'msg', error)}), expected {_EXPECTED}", path=path
            ) from error
        parts += [end] if parts else []
        parts.append(_encode(tokenizer, _text_of(entry, path, where, template), path, where))
    return np.concatenate([end[:0], *parts])  # all lines may be blank


def _text_of(entry: Any, path: Path, where: str, template: Callable[[], ChatTemplate]) -> str:
    messages, tools = entry if isinstance(entry, list) else None, None
    if isinstance(entry, dict):
        if isinstance(entry.get("text"), str) and "messages" not in entry:
            return str(entry["text"])
        messages, tools = entry.get("messages"), entry.get("tools")
    if not messages:
        raise UsageError(where, f"is {entry!r:.60}, expected {_EXPECTED}", path=path)
    try:
        return template().render(messages, add_generation_prompt=False, tools=tools, date_string=DATE)
    except (RequestError, UsageError) as error:
        raise UsageError(where, f"cannot be used: {error}", path=path) from error


# -------------------------------------------------------------------------------------------------------------- tokens


def _encode(tokenizer: Tokenizer, text: str, path: Path, where: str) -> Ids:
    try:
        return np.array(tokenizer.encode(text, add_special_tokens=False), np.int64)
    except RequestError as error:
        raise UsageError(where, f"cannot be used: {error}", path=path) from error


def _prefix(tokenizer: Tokenizer) -> Ids:
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return np.array(whole[: next(starts, 0)], np.int64)


def _check_vocabulary(ids: Ids, vocab_size: int, tokenizer: Tokenizer, path: Path) -> None:
    beyond = ids[ids >= vocab_size]
    if len(beyond):
        text = tokenizer.decode([int(beyond[0])], skip_special_tokens=False)
        raise UsageError(
            "text",
            f"has {text!r}, which is token {beyond[0]}, but the model's vocabulary ends at {vocab_size - 1}",
            "take it out of the text, or give the model the tokenizer it was trained with",
            path=path,
        )


def _windows(ids: Ids, step: int, samples: int, prefix: Ids) -> Ids:
    """Non-overlapping windows [n, prefix + step], at most ``samples``, evenly spread over the text."""
    possible = len(ids) // step
    wanted = min(samples, possible)
    chosen = np.arange(wanted) * possible // wanted
    parts = ids[: possible * step].reshape(possible, step)[chosen]
    return np.concatenate([np.tile(prefix, (wanted, 1)), parts], axis=1)
