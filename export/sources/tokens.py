"""Remove tokens without rows in the model from a tokenizer: their texts become plain text."""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from llmc.bundle import TOKENIZER_FILE
from llmc.errors import CheckpointError

CONFIG_FILE, MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"
# Keys of these files where the runtime reads tokens, in its order.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
# Settings with which a BPE model finds a token without a merge.
_FOUND_WHOLE = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
_NAMED_IN_NOTE = 3


def cut_tokenizer(where: str, files: Mapping[str, dict[str, Any]], rows: int) -> tuple[dict[str, str], list[str]]:
    """Remove all tokens with ids of ``rows`` or more from the contents of a tokenizer's files.

    Returns the texts of the files that change, and notes. Published Gemma 3 1B needs this: its tokenizer has a token
    that only the larger models have a row for.

    Raises:
        CheckpointError: ordinary text contains such tokens, or gets one around it; or a file is broken.
    """
    try:
        return _cut(f"{where}/{TOKENIZER_FILE}", files, rows)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where}: its tokenizer is broken ({error}); download it again") from error


def _cut(where: str, files: Mapping[str, dict[str, Any]], rows: int) -> tuple[dict[str, str], list[str]]:
    content = files[TOKENIZER_FILE]
    beyond = {token for number, token in read_tokens(where, content) if number >= rows}
    if beyond:
        _check_unused(where, content, beyond, rows)
        content = _cut_content(content, beyond)
    beyond |= _list_unknown(content, files, rows)
    if not beyond:
        return {}, []
    changed = {TOKENIZER_FILE: content}
    changed |= {name: _cut_names(files[name], beyond) for name in (CONFIG_FILE, MAP_FILE) if name in files}
    texts = {name: json.dumps(new, ensure_ascii=False) for name, new in changed.items() if new is not files[name]}
    few = ", ".join(f"{token!r:.80}" for token in sorted(beyond)[:_NAMED_IN_NOTE])
    more = f" and {len(beyond) - _NAMED_IN_NOTE} more" if len(beyond) > _NAMED_IN_NOTE else ""
    return texts, [f"{TOKENIZER_FILE}: the model has {rows} rows and none for {few}{more}, which stay plain text"]


def lower(content: dict[str, Any]) -> dict[str, Any]:
    """A ``tokenizer.json`` that makes letters small before it does anything else."""
    own = content.get("normalizer")
    steps = [{"type": "Lowercase"}, *([own] if own is not None else [])]
    return {**content, "normalizer": {"type": "Sequence", "normalizers": steps}}


def read_tokens(where: str, content: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Id and text of every token of a ``tokenizer.json``; Unigram's vocabulary is a list."""
    try:
        vocab = content["model"].get("vocab", {})
        known = vocab.items() if isinstance(vocab, dict) else ((row[0], index) for index, row in enumerate(vocab))
        added = ((entry["content"], entry["id"]) for entry in content.get("added_tokens") or ())
        for token, number in chain(known, added):
            if type(number) is not int or type(token) is not str:
                raise TypeError("no text and a number")
            yield number, token
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where} is not a tokenizer (its vocabulary is not a list of tokens); download it again"
        ) from error


def _check_unused(where: str, content: dict[str, Any], beyond: set[str], rows: int) -> None:
    """Refuse a tokenizer that makes tokens beyond the rows from ordinary text: it belongs to another model."""
    model = content["model"]
    added = {entry["content"] for entry in content.get("added_tokens") or ()}
    made = {left + right for left, right in map(_pair, model.get("merges") or ())}
    whole = model.get("type") != "BPE" or any(model.get(name) for name in _FOUND_WHOLE)
    used = [token for token in beyond - added if whole or token in made or len(token) < 2 or token.startswith("<0x")]
    used += [token for token in _around(content.get("post_processor")) if token in beyond]
    used += [token for token in (model.get("unk_token"),) if token in beyond]
    if used:
        known = 1 + max(number for number, _ in read_tokens(where, content))
        raise CheckpointError(
            f"{where}: it has {known} tokens, and makes tokens such as {min(used)!r:.80} from text, but the model has "
            f"{rows} rows (vocab_size); give it the tokenizer that it was trained with"
        )


def _around(processor: Any) -> Iterator[str]:
    """Texts of the tokens that a post-processor adds around a text."""
    for name, value in processor.items() if isinstance(processor, dict) else enumerate(processor or ()):
        if name == "SpecialToken" and isinstance(value, dict):
            yield str(value.get("id"))
        elif name in ("sep", "cls") and isinstance(value, list):
            yield str(value[0])
        elif isinstance(value, dict | list) and name != "special_tokens":
            yield from _around(value)


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _cut_content(content: dict[str, Any], beyond: set[str]) -> dict[str, Any]:
    model = dict(content["model"])
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {token: number for token, number in model["vocab"].items() if token not in beyond}
    if model.get("merges"):
        parts = ((merge, *_pair(merge)) for merge in model["merges"])
        model["merges"] = [merge for merge, a, b in parts if not beyond & {a, b, a + b}]
    added = [entry for entry in content.get("added_tokens") or () if entry["content"] not in beyond]
    return {**content, "added_tokens": added, "model": model}


def _list_unknown(content: dict[str, Any], files: Mapping[str, dict[str, Any]], rows: int) -> set[str]:
    """Tokens that only the other files name, and whose ids, after the last known one, have no row."""
    known = {token for _, token in read_tokens(TOKENIZER_FILE, content)}
    added = [entry["id"] for entry in content.get("added_tokens") or ()]
    first = max(len(content["model"].get("vocab", ())), 1 + max(added, default=-1))
    config = files.get(CONFIG_FILE, {})
    if "added_tokens_decoder" not in config:  # the rule of transformers
        config = {**config, **files.get(MAP_FILE, {})}
    declared = config.get("added_tokens_decoder") or {}
    extra: Any = next((stated for name in _LISTS if (stated := config.get(name))), [])
    tokens = [declared[number] for number in sorted(declared, key=int)]
    tokens += [config.get(name) for name in _NAMED]
    tokens += extra.values() if isinstance(extra, dict) else extra
    unknown = {text: None for token in tokens if (text := _text(token)) is not None and text not in known}
    return {*[*unknown][max(0, rows - first) :]}


def _cut_names(config: dict[str, Any], beyond: set[str]) -> dict[str, Any]:
    """``config`` without the tokens ``beyond``; the same object if it names none of them."""
    cut = {name: value for name, value in config.items() if not (name.endswith("_token") and _text(value) in beyond)}
    for name in ("added_tokens_decoder", *_LISTS):
        value = cut.get(name)
        if isinstance(value, dict):
            cut[name] = {key: token for key, token in value.items() if _text(token) not in beyond}
        elif isinstance(value, list):
            cut[name] = [token for token in value if _text(token) not in beyond]
    return config if cut == config else cut


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
