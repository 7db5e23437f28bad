"""Log-probabilities in the forms of OpenAI's two dialects."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llmc.runtime import Model

Logprobs = Sequence[Any]  # of llmc.runtime.sampling.logprobs.TokenLogprobs


def _make_speller(model: Model) -> Callable[[int], tuple[str, list[int]]]:
    """Text and bytes of tokens, of which most are told of again and again."""

    @cache
    def spell(token: int) -> tuple[str, list[int]]:
        found = model.tokenizer.spell(token)
        return found.decode("utf-8", "replace"), list(found)

    return spell


def chat_logprobs(model: Model, logprobs: Logprobs | None) -> dict[str, Any] | None:
    """Of the tokens of a message; those before any processor, as everywhere in llmc."""
    return None if logprobs is None else {"content": logprob_entries(model, logprobs), "refusal": None}


def logprob_entries(model: Model, logprobs: Logprobs) -> list[dict[str, Any]]:
    """The tokens of :func:`chat_logprobs`."""
    spelt = _make_speller(model)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, spelling = spelt(token)
        return {"token": text, "logprob": logprob, "bytes": spelling}

    def describe(found: Any) -> dict[str, Any]:
        # The most probable tokens, where some are asked for, and the one that was chosen.
        top = dict(found.top) | {found.token: found.logprob} if found.top else {}
        return {**entry(found.token, found.logprob), "top_logprobs": [entry(*one) for one in top.items()]}

    return [describe(found) for found in logprobs]


def completion_logprobs(model: Model, logprobs: Logprobs | None, text: str, start: int = 0) -> dict[str, Any] | None:
    """Of the tokens of ``text``, which begins ``start`` characters after the beginning of what is returned."""
    if logprobs is None:
        return None
    spelt = _make_speller(model)
    tops = [dict(found.top) | {found.token: found.logprob} for found in logprobs]
    return {
        "tokens": [spelt(found.token)[0] for found in logprobs],
        "token_logprobs": [found.logprob for found in logprobs],
        "top_logprobs": [{spelt(token)[0]: logprob for token, logprob in top.items()} for top in tops],
        "text_offset": text_offsets(model, [found.token for found in logprobs], text, start),
    }


def text_offsets(model: Model, tokens: Sequence[int], text: str, start: int = 0) -> list[int]:
    """Places of tokens in their text, in characters: those that are not in it, such as BOS, take no room there.
    ``start``: of the text."""
    data, at, begun, found = text.encode("utf-8", "surrogatepass"), 0, start, []
    for token in tokens:
        inside = at < len(data) and _continues(data[at])
        found.append(begun - inside)
        spelt = model.tokenizer.spell(token)
        if not data.startswith(spelt, at) and data.startswith(spelt.lstrip(b" "), at):
            spelt = spelt.lstrip(b" ")  # which tokenizers put before a text
        if data.startswith(spelt, at) or not model.tokenizer.is_silent(token):
            passed = data[at : at + len(spelt)]
            at += len(passed)
            begun += sum(not _continues(byte) for byte in passed)
    return found


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80
