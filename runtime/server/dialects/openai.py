"""The common half of OpenAI's two older dialects: heads, chunks, usage and log-probabilities."""

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import Field

from llmc.runtime import GenerationResult, Handle, Model
from llmc.runtime.server.http.bodies import Body
from llmc.runtime.server.http.streams import event, guard_pieces
from llmc.runtime.server.models.service import new_id
from llmc.runtime.server.turn import TextBody, Turn

B = TypeVar("B", bound=TextBody)
H = TypeVar("H", bound=Handle)
Logprobs = Sequence[Any]  # of llmc.runtime.sampling.logprobs.TokenLogprobs


class OpenAITurn(Turn[B, H]):
    """A turn whose pieces are chunks of JSON."""

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """The members with which an answer, and each of its chunks, begins."""
        return {
            "id": new_id(f"{prefix}-"),
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "system_fingerprint": f"fp_{self.model.manifest.source.fingerprint[:12]}",
        }

    @abstractmethod
    def pieces(self) -> AsyncIterator[str]:
        """The answer's chunks as they come."""

    def events(self) -> AsyncIterator[bytes]:
        return guard_pieces(
            self.pieces(),
            lambda chunk: f"data: {chunk}\n\n".encode(),
            lambda error: event(error.body),
            end=b"data: [DONE]\n\n",
        )


class StreamOptions(Body):
    IGNORED = frozenset({"include_obfuscation"})
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, Field(description="vLLM's: each chunk tells the usage so far")] = (
        None
    )


def usage_of(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """The usage of all results together."""
    usages = [result.usage for result in results]
    return {
        **_count_tokens(sum(each.prompt_tokens for each in usages), sum(each.completion_tokens for each in usages)),
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in usages)},
    }


def _count_tokens(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class StreamUsage:
    """The usage that a stream tells.

    Args:
        options: None tells none.
        prompts: tokens of the prompt of each output.

    Attributes:
        ends: the stream ends with the whole usage.
    """

    def __init__(self, options: StreamOptions | None, prompts: Sequence[int]) -> None:
        self.ends = options is not None and options.include_usage is True
        self._goes_along = options is not None and options.continuous_usage_stats is True
        self._prompts = prompts
        self._counts = [0] * len(prompts)

    def add(self, output: int, tokens: int) -> None:
        """Count new tokens of an output."""
        self._counts[output] += tokens

    def member(self, output: int) -> dict[str, Any]:
        """The member of a chunk of an output: its usage so far, null where the end alone tells it."""
        if self._goes_along:
            return {"usage": _count_tokens(self._prompts[output], self._counts[output])}
        return {"usage": None} if self.ends else {}


def _make_speller(model: Model) -> Callable[[int], tuple[str, list[int]]]:
    """Text and bytes of tokens, remembered: most come again and again."""

    @cache
    def spell(token: int) -> tuple[str, list[int]]:
        found = model.tokenizer.spell(token)
        return found.decode("utf-8", "replace"), list(found)

    return spell


def chat_logprobs(model: Model, logprobs: Logprobs | None) -> dict[str, Any] | None:
    """Log-probabilities of a message's tokens, before any logits processor."""
    return None if logprobs is None else {"content": logprob_entries(model, logprobs), "refusal": None}


def logprob_entries(model: Model, logprobs: Logprobs) -> list[dict[str, Any]]:
    """The entries of :func:`chat_logprobs`, one a token."""
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
    """Log-probabilities of the tokens of ``text``, which begins at character ``start`` of the answer's text."""
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
