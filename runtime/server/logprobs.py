"""Log-probabilities in the forms of OpenAI's two dialects."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llmc.runtime import Model

Logprobs = Sequence[Any]  # of llmc.runtime.sampling.logprobs.TokenLogprobs


def _spelling(model: Model) -> Callable[[int], tuple[str, list[int]]]:
    """Text and bytes of tokens, of which most are told of again and again."""

    @cache
    def spelt(token: int) -> tuple[str, list[int]]:
        found = model.tokenizer.spelling(token)
        return found.decode("utf-8", "replace"), list(found)

    return spelt


def chat_logprobs(model: Model, logprobs: Logprobs | None) -> dict[str, Any] | None:
    """Of the tokens of a message; those before any processor, as everywhere in llmc."""
    if logprobs is None:
        return None
    spelt = _spelling(model)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, spelling = spelt(token)
        return {"token": text, "logprob": logprob, "bytes": spelling}

    content = [
        {**entry(found.token, found.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in found.top]}
        for found in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(model: Model, logprobs: Logprobs | None, offset: int) -> dict[str, Any] | None:
    """Of the tokens of a completion whose text begins ``offset`` characters after the beginning of what is returned."""
    if logprobs is None:
        return None
    spelt = _spelling(model)
    texts = [spelt(found.token)[0] for found in logprobs]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [found.logprob for found in logprobs],
        "top_logprobs": [{spelt(token)[0]: logprob for token, logprob in found.top} for found in logprobs],
        "text_offset": offsets,
    }
