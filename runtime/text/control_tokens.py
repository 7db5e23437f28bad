"""Control tokens are the template's: texts of messages that spell one, such as ``</s>``, stay text.

Otherwise whoever writes a message could end it, and speak as the system. It takes two steps. While the template runs,
what messages spell is hidden behind single characters (:class:`Disguise`), so that the template can trim, compare and
slice as always. Then the prompt goes through a twin of the tokenizer that knows control tokens by other,
unguessable names (:class:`ControlTokens`); those that the template wrote are given these names.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import tokenizers

from llmc.errors import RequestError

# Stands are Tangut ideographs: letters without case, which only JSON in ASCII escapes, and which no template writes.
# Those that messages write are hidden, too, and what would make an escaped one of a backslash.
FIRST_STAND, LAST_STAND = 0x17000, 0x187F7
PIECE = 1 << 17  # characters that are searched in one call, which takes a few milliseconds
_STAND = f"[{chr(FIRST_STAND)}-{chr(LAST_STAND)}]"
_HIGH = "ud8[12][0-9a-f]"
_ESCAPED_STAND = re.compile(rf"\\{_HIGH}\\ud[c-f][0-9a-f]{{2}}")


class ControlTokens:
    """The control tokens of a tokenizer: those that it declares special.

    Args:
        backend: the loaded tokenizer, with all its added tokens.
        unknown: texts of tokens that stand for unknown characters; they control nothing.
    """

    def __init__(self, backend: tokenizers.Tokenizer, unknown: Collection[str]) -> None:
        added = backend.get_added_tokens_decoder()
        nonce = secrets.token_hex(8)
        self._names = {token.content: f"{nonce}x{token_id}x" for token_id, token in added.items() if token.special}
        self._controls = {token.content for token in added.values() if token.special} - {*unknown}
        self._control_ids = {token_id for token_id, token in added.items() if token.content in self._controls}
        self._twin = _twin_of(backend, added.values(), self._names)
        self._ids = {self._twin.token_to_id(self._names.get(t.content, t.content)): i for i, t in added.items()}
        # By texts alone the tokenizer's own search finds the template's, unless it searches normalised text.
        self._searches_text = backend.normalizer is None or not any(t.special and t.normalized for t in added.values())
        plain = [token.content for token in added.values() if not token.special and not token.normalized]
        self._written = re.compile(f"{_any_of([*self._names, *plain])}|{_STAND}")
        self.spelt = re.compile(f"{_any_of(self._names)}|{_STAND}|{_HIGH}")
        self.longest_spelt = max(map(len, ["ud800", *self._names]))
        # A text may end with what the next one completes. Not where that is a letter: templates compare words.
        self.beginnings = {text[:end] for text in self._names if not text[0].isalnum() for end in range(1, len(text))}

    def all_written(self, prompt: str, ids: Iterable[int]) -> bool:
        """True if ``ids``, which the tokenizer itself made of ``prompt``, hold the control tokens that it spells."""
        held = sum(token_id in self._control_ids for token_id in ids)
        return self._searches_text and held == sum(text in self._controls for text in self._written.findall(prompt))

    def encode(self, prompt: str, disguise: "Disguise") -> list[int]:
        """Token ids of ``prompt``, in which what ``disguise`` hides is text.

        Raises:
            RequestError: even so this tokenizer makes a control token of some text.
        """
        expected = 0

        def named(match: re.Match[str]) -> str:
            nonlocal expected
            expected += match[0] in self._controls
            return disguise.hidden.get(match[0]) or self._names.get(match[0], match[0])

        twin_ids = self._twin.encode_batch_fast([self._written.sub(named, prompt)], add_special_tokens=False)[0].ids
        ids = [self._ids.get(token_id, token_id) for token_id in twin_ids]
        if sum(token_id in self._control_ids for token_id in ids) != expected:
            raise RequestError(
                "the messages spell a control token of the model, and its tokenizer cannot encode it as text; leave it "
                "out, or set parse_special"
            )
        return ids


class Disguise:
    """Characters that stand for what messages spell, for the time of one rendering.

    Args:
        controls: the control tokens to hide.
    """

    def __init__(self, controls: ControlTokens) -> None:
        self._controls = controls
        self._stands: dict[str, str] = {}
        self.hidden: dict[str, str] = {}
        """Hidden texts by the character that stands for them."""

    def hide(self, text: str) -> str:
        """``text`` with a character in place of each control token, and of the beginning of one at its end.

        Raises:
            RequestError: there are more texts to hide than characters.
        """
        stands = self._stands

        def stand(match: re.Match[str]) -> str:
            return stands.get(match[0]) or self._stand(match[0])

        search = self._controls.spelt
        text = search.sub(stand, text) if len(text) <= PIECE else "".join(self._pieces(stand, text))
        end = len(text.rstrip())
        for start in range(max(0, end - max(map(len, self._controls.beginnings), default=0)), end):
            if text[start:end] in self._controls.beginnings:
                return text[:start] + self._stand(text[start:end]) + text[end:]
        return text

    def _pieces(self, stand: Callable[[re.Match[str]], str], text: str) -> Iterator[str]:
        """A long text as :meth:`hide` leaves it. A search through all of it would keep other threads waiting."""
        at = 0
        while at < len(text):
            found = self._controls.spelt.search(text, at, at + PIECE + self._controls.longest_spelt)
            if found is None or found.start() >= at + PIECE:
                yield text[at : at + PIECE]
                at += PIECE
            else:
                yield text[at : found.start()]
                yield stand(found)
                at = found.end()

    def _stand(self, text: str) -> str:
        if text not in self._stands:
            if FIRST_STAND + len(self._stands) > LAST_STAND:
                raise RequestError("the messages hold too many control tokens and Tangut ideographs; leave some out")
            self._stands[text] = chr(FIRST_STAND + len(self._stands))
            self.hidden[self._stands[text]] = text
        return self._stands[text]

    def unescaped(self, rendered: str) -> str:
        """The rendered text, with stands as they were where JSON in ASCII has escaped them."""

        def character(match: re.Match[str]) -> str:
            found: str = json.loads(f'"{match[0]}"')
            text = self.hidden.get(found)
            if text is None:
                return match[0]
            return json.dumps(text)[1:-1] if re.fullmatch(_STAND, text) else found

        return _ESCAPED_STAND.sub(character, rendered) if self.hidden else rendered


def _twin_of(
    backend: tokenizers.Tokenizer, added: Iterable[tokenizers.AddedToken], names: dict[str, str]
) -> tokenizers.Tokenizer:
    """A tokenizer on the same vocabulary, in whose added tokens those of ``names`` have these."""
    twin = tokenizers.Tokenizer(backend.model)  # which is shared, not copied
    for part in ("normalizer", "pre_tokenizer"):
        if (found := getattr(backend, part)) is not None:
            setattr(twin, part, found)
    renamed = [
        tokenizers.AddedToken(
            names.get(token.content, token.content),
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
        )
        for token in added
    ]
    ids = [backend.model.token_to_id(token.content) for token in renamed]
    twin.add_tokens([token for token, token_id in zip(renamed, ids, strict=True) if token_id is not None])
    # The library numbers new ones from the size of the vocabulary on, or from the last of those.
    start = max([backend.get_vocab_size(with_added_tokens=False) - 1, *(i for i in ids if i is not None)]) + 1
    new = [token for token, token_id in zip(renamed, ids, strict=True) if token_id is None]
    twin.add_tokens([*_beyond_gaps(backend.model, new, start)])
    return twin


def _beyond_gaps(
    model: tokenizers.models.Model, new: Iterable[tokenizers.AddedToken], token_id: int
) -> Iterator[tokenizers.AddedToken]:
    """``new``, numbered from ``token_id`` on, with tokens that no text spells where the vocabulary has the id itself:
    one with gaps has ids beyond its size."""
    for token in new:
        while model.id_to_token(token_id) is not None:
            yield tokenizers.AddedToken(secrets.token_hex(16), normalized=False)
            token_id += 1
        yield token
        token_id += 1


def _any_of(texts: Iterable[str]) -> str:
    """A regular expression that matches the longest of ``texts``, however many there are."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree) if tree else "(?!)"


def _branches(node: dict[str, Any]) -> str:
    found = [re.escape(character) + _branches(rest) for character, rest in node.items() if character]
    if not found:
        return ""
    joined = found[0] if len(found) == 1 and "" not in node else f"(?:{'|'.join(found)})"
    return f"{joined}?" if "" in node else joined
