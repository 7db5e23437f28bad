"""Text from a stream of tokens: whole characters only, without stop strings."""

from collections.abc import Collection, Sequence

from llmc.runtime.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TextStream:
    """Turns one request's tokens into pieces of text; a returned piece is final.

    The pieces together equal ``tokenizer.decode`` of all tokens, up to the first complete stop string (if two end with
    the same character, the longer one). The cost of a token does not grow with the number of earlier tokens.

    Args:
        tokenizer: of the model that wrote the tokens. Special tokens have no text.
        stop: texts that end the stream; no part of one is ever returned.
        keep_stop: also return the stop string that ends the stream.
        shown: special tokens whose names are part of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, keep_stop: bool = False, shown: Collection[int] = ()
    ) -> None:
        self._decoder = _IncrementalDecoder(tokenizer, shown)
        self._stop = tuple(stop)
        self._keep_stop = keep_stop
        self._held = ""
        self._stopping = True
        self.stopped: str | None = None
        """The stop string that ended the stream."""

    def push(self, token_id: int, stopping: bool = True) -> str:
        """Take the next token and return the text that has become certain, often none.

        Without ``stopping``, no stop string ends the stream and no text is held back for one; a stop string matched
        later lies wholly after this text.
        """
        if self.stopped is not None:
            return ""
        self._stopping = stopping
        return self._until_stop(self._held + self._decoder.push(token_id))

    def finish(self) -> str:
        """End the stream and return the rest; an incomplete character becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._until_stop(self._held + self._decoder.finish())
        rest, self._held = self._held, ""
        return text + rest

    def _until_stop(self, text: str) -> str:
        """The part of ``text`` that cannot belong to a stop string; the rest is held back."""
        if not self._stop and not self._held:
            return text
        stops = self._stop if self._stopping else ()
        matches = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if matches:
            end, _, self.stopped = min(matches)
            self._held = ""
            return text[: end if self._keep_stop else end - len(self.stopped)]
        certain = len(text) - max((overlap(text, stop) for stop in stops), default=0)
        self._held = text[certain:]
        return text[:certain]


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper suffix of ``text`` that ``stop`` begins with."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0


def decode_all(tokenizer: Tokenizer, ids: Sequence[int], shown: Collection[int] = ()) -> str:
    """The text of all of ``ids``, with the names of special tokens in ``shown``."""
    if not shown:
        return tokenizer.decode(ids)
    stream = TextStream(tokenizer, shown=shown)
    return "".join(map(stream.push, ids)) + stream.finish()


class NoText(TextStream):
    """The stream of a request without text."""

    def __init__(self) -> None:
        self.stopped = None

    def push(self, token_id: int, stopping: bool = True) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _IncrementalDecoder:
    """Decodes a short window of the last tokens.

    A decoder may treat the first token differently (Metaspace and Strip drop a space), so the window keeps some tokens
    whose text was already returned. A character may span several tokens: an incomplete one decodes to U+FFFD at the
    end, which is held back; one bad byte-fallback token turns a whole run of them into U+FFFD, so a run waits for its
    end. If every token is plain bytes, the window is empty after whole characters.
    """

    # An incomplete character has at most 3 bytes, hence 3 tokens; one more precedes them.
    _KEPT = 4
    _LONGEST = 12

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown = frozenset(shown)
        self._window: list[int] = []
        self._returned = 0  # characters of the window's text that were returned

    def push(self, token_id: int) -> str:
        joins = self._tokenizer.joins_bytes
        if joins and not self._window and token_id not in self._shown:
            text = self._tokenizer.decode((token_id,))
            if text.endswith(_REPLACEMENT):
                self._window, self._returned = [token_id], len(text) - 1
            return text[: self._returned] if self._window else text
        if self._tokenizer.is_silent(token_id):
            return self._name_token(token_id) if token_id in self._shown else ""
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._tokenizer.decode(self._window)
        open_end = text.endswith(_REPLACEMENT)
        certain = len(text) - open_end
        delta, self._returned = text[self._returned : certain], certain
        if joins and not open_end:
            self._window, self._returned = [], 0
        elif len(self._window) > self._LONGEST:
            del self._window[: -self._KEPT]
            self._returned = len(self._tokenizer.decode(self._window)) - open_end
        return delta

    def _name_token(self, token_id: int) -> str:
        """The text not yet returned and the token's name; text after it is decoded separately."""
        text = self.finish() + self._tokenizer.decode([token_id], skip_special_tokens=False)
        self._window, self._returned = [], 0
        return text

    def finish(self) -> str:
        text = self._tokenizer.decode(self._window)
        delta, self._returned = text[self._returned :], len(text)
        return delta
