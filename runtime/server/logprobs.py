"""Log-probabilities in the forms of OpenAI's two dialects."""

from collections.abc import Sequence
from typing import Any

from llmc.runtime import Model

Logprobs = Sequence[Any]  # of llmc.runtime.sampling.logprobs.TokenLogprobs


def _text(model: Model, token: int) -> str:
    return model.tokenizer.spelling(token).decode("utf-8", "replace")


def _entry(model: Model, token: int, logprob: float) -> dict[str, Any]:
    found = model.tokenizer.spelling(token)
    return {"token": found.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(found)}


def chat_logprobs(model: Model, logprobs: Logprobs | None) -> dict[str, Any] | None:
    """Of the tokens of a message; those before any processor, as everywhere in llmc."""
    if logprobs is None:
        return None
    content = [
        {
            **_entry(model, found.token, found.logprob),
            "top_logprobs": [_entry(model, token, logprob) for token, logprob in found.top],
        }
        for found in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(model: Model, logprobs: Logprobs | None, offset: int) -> dict[str, Any] | None:
    """Of the tokens of a completion whose text begins ``offset`` characters after the beginning of what is returned."""
    if logprobs is None:
        return None
    texts = [_text(model, found.token) for found in logprobs]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [found.logprob for found in logprobs],
        "top_logprobs": [{_text(model, token): logprob for token, logprob in found.top} for found in logprobs],
        "text_offset": offsets,
    }
