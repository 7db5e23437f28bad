"""Keep control tokens, such as ``</s>``, for the template: a message that spells one stays text.

Otherwise the author of a message could end it and speak as the system. There are three steps. Before the template is
compiled, each control token in its source becomes a single character (a mark). While the template runs, each control
token in a message is hidden behind a single character, too (:class:`Disguise`), so the template can trim, compare and
slice as usual. Then a twin of the tokenizer, which knows control tokens by unguessable names (:class:`ControlTokens`),
encodes the prompt; the marks become these names.

A template may also assemble a control token, as ``'<|' + role + '|>'``. Such tokens count as the template's if the same
conversation with harmless texts produces the same sequence of control tokens.
"""

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import tokenizers

from llmc.errors import RequestError

# Stands are Tangut ideographs: letters without case that no template uses. Those in messages are hidden, too.
FIRST_STAND, LAST_STAND = 0x17000, 0x187F7
# Marks are private-use characters, enough for any tokenizer's control tokens.
FIRST_MARK, LAST_MARK = 0xF0000, 0xFFFFD
STANDS = f"{chr(FIRST_STAND)}-{chr(LAST_STAND)}{chr(FIRST_MARK)}-{chr(LAST_MARK)}"  # with marks, for a regex class
# Characters searched in one call, during which no other Python thread runs: 1 ms.
PIECE = 1 << 15


class Finder:
    """A pattern whose matches have at most ``longest`` characters; it searches a long text in pieces."""

    def __init__(self, pattern: str, longest: int) -> None:
        self._pattern, self._longest = re.compile(pattern), longest

    def matches(self, text: str) -> Iterator[re.Match[str]]:
        start = 0
        while start < len(text):
            end = start + PIECE
            # A match that begins in this piece ends at most `longest` characters after it.
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
    """The control tokens of a tokenizer: the tokens that it declares special.

    Args:
        backend: the loaded tokenizer, with all its added tokens.
        unknown: texts of tokens for unknown characters, which are not control tokens.
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
        # A plain word is not marked: templates compare roles and look up keys by words.
        marks = zip(self._names, map(chr, range(FIRST_MARK, LAST_MARK + 1)), strict=False)
        self._marks = {text: mark for text, mark in marks if not text.isidentifier()}
        self.marked = {mark: text for text, mark in self._marks.items()}
        """Control tokens by their marks."""
        plain = [token.content for token in added.values() if not token.special and not token.normalized]
        longest = max(map(len, [*self._names, *plain]), default=1)
        self._written = Finder(f"{any_of([*self._names, *plain])}|[{STANDS}]", longest)
        self.spelt = Finder(any_of(self._names), longest)

    def mark(self, text: str) -> str:
        """``text`` of a template with each control token replaced by its mark."""
        return self._written.sub(lambda match: self._marks.get(match[0], match[0]), text)

    def unmark(self, text: str) -> str:
        """``text`` with each mark replaced by its control token."""
        return self._written.sub(lambda match: self.marked.get(match[0], match[0]), text)

    def settle(self, prompt: str, harmless: Callable[[], str]) -> str:
        """``prompt`` with all of the template's control tokens marked; others stay text.

        Args:
            prompt: written by a template with marks.
            harmless: renders the same conversation with texts that cannot be part of a control token.

        Raises:
            RequestError: the template and the texts together spell control tokens.
        """
        written = self._written.findall(prompt)
        if self._names.keys().isdisjoint(written):
            return prompt
        expected = self._written.findall(harmless())
        if self._names.keys().isdisjoint(expected):
            return prompt
        if self._texts(written) != self._texts(expected):
            raise RequestError(
                "texts of the request and the model's chat template together spell a control token of the model "
                f"({next(text for text in written if text in self._names)!r:.60} or another); leave it out"
            )
        return self.mark(prompt)

    def _texts(self, texts: Iterable[str]) -> list[str]:
        """The control tokens in ``texts``, marked or spelled out."""
        return [self.marked.get(text, text) for text in texts if text in self.marked or text in self._names]

    def all_written(self, prompt: str, ids: Iterable[int]) -> bool:
        """True if the control tokens in ``ids`` are exactly the marked ones in ``prompt``."""
        controls_in_ids = [self._control_ids[token_id] for token_id in ids if token_id in self._control_ids]
        controls = {*self._control_ids.values()}
        return controls_in_ids == [
            text for mark in self._written.findall(prompt) if (text := self.marked.get(mark)) in controls
        ]

    def encode(self, prompt: str, disguise: "Disguise") -> list[int]:
        """Token ids of ``prompt``; everything except marks is text.
        Raises RequestError: this tokenizer still makes a control token from some text."""

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
    """Characters that stand for the control tokens in messages during one rendering."""

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
    """A tokenizer with the same vocabulary, whose added tokens in ``names`` have these names instead."""
    twin = tokenizers.Tokenizer(backend.model)  # shared, not copied
    for part in ("normalizer", "pre_tokenizer"):
        if (component := getattr(backend, part)) is not None:
            setattr(twin, part, component)
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
    # The library numbers new tokens from the vocabulary's size or the last added token on.
    start = max([backend.get_vocab_size(with_added_tokens=False) - 1, *(i for i in ids if i is not None)]) + 1
    new = [token for token, token_id in zip(renamed, ids, strict=True) if token_id is None]
    twin.add_tokens([*_beyond_gaps(backend.model, new, start)])
    return twin


def _beyond_gaps(
    model: tokenizers.models.Model, new: Iterable[tokenizers.AddedToken], token_id: int
) -> Iterator[tokenizers.AddedToken]:
    """``new`` tokens, numbered from ``token_id``; ids that the vocabulary uses are filled with unspellable tokens."""
    for token in new:
        while model.id_to_token(token_id) is not None:
            yield tokenizers.AddedToken(secrets.token_hex(16), normalized=False)
            token_id += 1
        yield token
        token_id += 1


def any_of(texts: Iterable[str]) -> str:
    """A regular expression for these texts, longest first; it matches nothing if there are none."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree) if tree else "(?!)"


def _branches(node: dict[str, Any]) -> str:
    branches = [re.escape(character) + _branches(rest) for character, rest in node.items() if character]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if "" in node else joined
