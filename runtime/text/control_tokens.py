"""Control tokens are the template's: texts of messages that spell one, such as ``</s>``, stay text.

Otherwise whoever writes a message could end it, and speak as the system. It takes three steps. Before the template is
compiled, the control tokens in its source become single characters (marks). While it runs, what messages spell is
hidden behind single characters, too (:class:`Disguise`), so that the template can trim, compare and slice as always.
Then the prompt goes through a twin of the tokenizer that knows control tokens by other, unguessable names
(:class:`ControlTokens`); the marks are given these names.

A template may also put a control token together, as ``'<|' + role + '|>'``. Such tokens are the template's if the same
conversation with harmless texts makes the same sequence of tokens.
"""

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import tokenizers

from llmc.errors import RequestError

# Stands are Tangut ideographs: letters without case, which no template writes. Those of messages are hidden, too.
FIRST_STAND, LAST_STAND = 0x17000, 0x187F7
# Marks are of the first private area, which has room for any tokenizer's.
FIRST_MARK, LAST_MARK = 0xF0000, 0xFFFFD
STANDS = f"{chr(FIRST_STAND)}-{chr(LAST_STAND)}{chr(FIRST_MARK)}-{chr(LAST_MARK)}"  # and marks, for a class
# Characters that are looked through in one call, in which no other thread of Python runs: 1 ms.
PIECE = 1 << 15


class Finder:
    """A pattern of texts of at most ``longest`` characters, which looks through a long text piece by piece."""

    def __init__(self, pattern: str, longest: int) -> None:
        self._pattern, self._longest = re.compile(pattern), longest

    def matches(self, text: str) -> Iterator[re.Match[str]]:
        start = 0
        while start < len(text):
            end = start + PIECE
            # A match that begins in the piece ends within the longest text behind it.
            for match in self._pattern.finditer(text, start, end + self._longest):
                if match.start() >= end:
                    break
                yield match
                start = match.end()
            start = max(start, end)

    def findall(self, text: str) -> list[str]:
        return [match[0] for match in self.matches(text)]

    def sub(self, replace: Callable[[re.Match[str]], str], text: str) -> str:
        pieces, parts, at = list[str](), list[str](), 0
        for match in self.matches(text):
            parts += text[at : match.start()], replace(match)
            at = match.end()
            if len(parts) > PIECE:
                pieces.append("".join(parts))
                parts.clear()
        return "".join([*pieces, *parts, text[at:]]) if at else text


_STAND = Finder(f"[{STANDS}]", 1)


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
        self._control_ids = {
            token_id: token.content
            for token_id, token in added.items()
            if token.special and token.content not in unknown
        }
        self._twin = _twin_of(backend, added.values(), self._names)
        self._ids = {self._twin.token_to_id(self._names.get(t.content, t.content)): i for i, t in added.items()}
        # A word is not marked: templates compare roles and look up keys by words.
        marks = zip(self._names, map(chr, range(FIRST_MARK, LAST_MARK + 1)), strict=False)
        self._marks = {text: mark for text, mark in marks if not text.isidentifier()}
        self.marked = {mark: text for text, mark in self._marks.items()}
        """Control tokens by their marks."""
        plain = [token.content for token in added.values() if not token.special and not token.normalized]
        longest = max(map(len, [*self._names, *plain]), default=1)
        self._written = Finder(f"{any_of([*self._names, *plain])}|[{STANDS}]", longest)
        self.spelt = Finder(any_of(self._names), longest)

    def mark(self, text: str) -> str:
        """``text`` of a template, with a mark in place of each control token."""
        return self._written.sub(lambda match: self._marks.get(match[0], match[0]), text)

    def unmark(self, text: str) -> str:
        """``text`` with control tokens in place of their marks."""
        return self._written.sub(lambda match: self.marked.get(match[0], match[0]), text)

    def settle(self, prompt: str, harmless: Callable[[], str]) -> str:
        """``prompt``, in which all control tokens that are the template's are marked, and others are text.

        Args:
            prompt: as a template with marks wrote it.
            harmless: renders the same conversation with texts that can be no part of a control token.

        Raises:
            RequestError: the template and the texts together spell control tokens.
        """
        found = self._written.findall(prompt)
        if self._names.keys().isdisjoint(found):
            return prompt
        expected = self._written.findall(harmless())
        if self._names.keys().isdisjoint(expected):
            return prompt
        if self._texts(found) != self._texts(expected):
            raise RequestError(
                "texts of the request and the model's chat template together spell a control token of the model "
                f"({next(text for text in found if text in self._names)!r:.60} or another); leave it out"
            )
        return self.mark(prompt)

    def _texts(self, found: Iterable[str]) -> list[str]:
        """The control tokens among ``found``, whether marked or spelled."""
        return [self.marked.get(text, text) for text in found if text in self.marked or text in self._names]

    def all_written(self, prompt: str, ids: Iterable[int]) -> bool:
        """True if the control tokens of ``ids`` are those that are marked in ``prompt``."""
        held = [self._control_ids[token_id] for token_id in ids if token_id in self._control_ids]
        controls = {*self._control_ids.values()}
        return held == [text for mark in self._written.findall(prompt) if (text := self.marked.get(mark)) in controls]

    def encode(self, prompt: str, disguise: "Disguise") -> list[int]:
        """Token ids of ``prompt``, in which all but marks is text.
        Raises RequestError: even so this tokenizer makes a control token of some text."""

        def named(match: re.Match[str]) -> str:
            text = self.marked.get(match[0])
            return self._names[text] if text is not None else disguise.hidden.get(match[0], match[0])

        twin_ids = self._twin.encode_batch_fast([self._written.sub(named, prompt)], add_special_tokens=False)[0].ids
        ids = [self._ids.get(token_id, token_id) for token_id in twin_ids]
        if not self.all_written(prompt, ids):
            raise RequestError(
                "the messages spell a control token of the model, and its tokenizer cannot encode it as text; leave it "
                "out, or set parse_special"
            )
        return ids


class Disguise:
    """Characters that stand for the control tokens that messages spell, for the time of one rendering."""

    def __init__(self, controls: ControlTokens) -> None:
        self.controls = controls
        self._stands: dict[str, str] = {}
        self.hidden: dict[str, str] = {}
        """Hidden texts by the character that stands for them."""

    def hide(self, text: str) -> str:
        """``text`` with a character in place of each control token; RequestError if there are too many."""
        if not text.isascii():
            text = _STAND.sub(self._stand, text)
        return self.controls.spelt.sub(self._stand, text)

    def _stand(self, match: re.Match[str]) -> str:
        text = match[0]
        if text not in self._stands:
            if FIRST_STAND + len(self._stands) > LAST_STAND:
                raise RequestError("the messages hold too many control tokens and Tangut ideographs; leave some out")
            self._stands[text] = chr(FIRST_STAND + len(self._stands))
            self.hidden[self._stands[text]] = text
        return self._stands[text]


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


def any_of(texts: Iterable[str]) -> str:
    """A regular expression of these texts, the longest first; of none if there are none."""
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
