"""Text to token ids and back, with the same ids and text as transformers' fast tokenizers.

tokenizer.json decides. transformers 5 does the same, except for classes that it rebuilds from the vocabulary:
``LlamaTokenizer`` then adds its leading space in other places than tokenizer.json and SentencePiece do (after special
tokens, before a space).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from llmc.bundle import TOKENIZER_FILE
from llmc.errors import BundleError, RequestError, UsageError
from llmc.runtime.host.machine import return_freed_memory
from llmc.runtime.text.control_tokens import ControlTokens, Disguise
from llmc.runtime.text.infill import find_ends, find_infill, write_infill
from llmc.strict import read_json

CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
# Usual texts have fewer characters per token; for a longer text, first check whether its beginning fits.
PLAIN_CHARACTERS = 8
# Number of tokens that may change if a text is cut in the middle.
CUT_TOKENS = 64
# Classes of transformers that add no tokens around a text, regardless of tokenizer.json.
_BARE_CLASSES = ("GPTNeoXTokenizer", "GPTNeoXTokenizerFast")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A tokenizer.json, with the special tokens of the files beside it. Safe to share between threads.
    ``special_tokens``: texts by name (``bos_token``, ``eos_token``, ...), as chat templates see them.

    Attributes:
        joins_bytes: True if every text is its tokens' bytes in sequence.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], *, cleans_up: bool = False
    ) -> None:
        self._cleans_up = cleans_up
        self.special_tokens = dict(special_tokens)
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_ids = _byte_ids(backend)
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.joins_bytes = type(backend.decoder).__name__ == "ByteLevel"
        self._is_byte_level = backend.decoder is not None and b"ByteLevel" in backend.decoder.__getstate__()

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Load the tokenizer files of a checkpoint, export or bundle.
        Raises BundleError: tokenizer.json is missing or broken, or a file beside it is."""
        folder = Path(folder)
        backend = _load_backend(folder / TOKENIZER_FILE)
        config = read_tokenizer_config(folder)
        if config.get("tokenizer_class") in _BARE_CLASSES:
            backend.post_processor = tokenizers.processors.TemplateProcessing("$A", "$A $B", [])
        try:
            special_tokens = _add_special_tokens(backend, config)
        except (TypeError, ValueError, AttributeError) as error:
            raise BundleError(f"{folder / CONFIG_FILE} is broken ({error}); {REMEDY}") from error
        cleans_up = config.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE"
        return cls(backend, special_tokens, cleans_up=bool(cleans_up))

    def require_spaces(self, folder: Path) -> None:
        """Refuse a tokenizer of ``folder`` whose texts lack spaces that the model wrote. Raises BundleError."""
        if self._cleans_up:
            raise BundleError(
                f"clean_up_tokenization_spaces is true for a {type(self._backend.model).__name__} tokenizer, expected "
                "false",
                "it removes spaces that the model wrote",
                path=folder / CONFIG_FILE,
            )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones; the model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; with ``add_special_tokens`` also the tokens around a prompt, such as BOS.

        Special tokens spelled in ``text`` become special tokens.

        Raises:
            UsageError: ``text`` is not a string.
            RequestError: ``text`` is not valid Unicode; it has undecodable bytes, for instance.
        """
        with _translate_errors(text):
            # Unlike encode, this releases Python's lock.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_cut(self, text: str, most: int | None, pair: str | None = None) -> tuple[list[int], list[int]]:
        """:meth:`encode` the beginning of ``text`` in at most ``most`` tokens, including those around it; and the type
        of each token, mostly 0 in ``text`` and 1 in ``pair``.

        Of two texts, the longer one is cut, down to the length of the other, then both, as transformers does
        (``longest_first``); None cuts nothing. RequestError if the tokens around the texts alone are too many.
        """
        with _translate_errors(text), _translate_errors(pair or ""):
            first = self._backend.encode(text, add_special_tokens=False)
            second = None if pair is None else self._backend.encode(pair, add_special_tokens=False)
            if most is not None:
                room = most - self._backend.num_special_tokens_to_add(pair is not None)
                if room < 0:
                    raise RequestError(f"at most {most} tokens are allowed, fewer than stand around a text; allow more")
                if second is not None and len(first) + len(second) > room:
                    shorter, longer = (first, second) if len(first) <= len(second) else (second, first)
                    shorter.truncate(min(len(shorter), room // 2))
                    longer.truncate(room - len(shorter))
                elif second is None:
                    first.truncate(room)
            whole = self._backend.post_process(first, second, add_special_tokens=True)
            return list(whole.ids), list(whole.type_ids)

    def encode_disguised(self, prompt: str, disguise: Disguise) -> list[int]:
        """Token ids of a prompt rendered by a template with marks: only marks are control tokens.
        Raises RequestError: as :meth:`encode`, or the tokenizer cannot encode such a text as text."""
        if not disguise.hidden:
            ids = self.encode(self.controls.unmark(prompt), add_special_tokens=False)
            if self.controls.all_written(prompt, ids):
                return ids
        with _translate_errors(prompt):
            return self.controls.encode(prompt, disguise)

    def encode_plain(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """:meth:`encode`, but special tokens spelled in the text stay text; errors as in :meth:`encode_disguised`."""
        disguise = Disguise(self.controls)
        ids = self.encode_disguised(disguise.hide(text), disguise)
        if not add_special_tokens:
            return ids
        before, after = self._around
        return [*before, *ids, *after]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts before and after a prompt."""
        bare, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        start = next(position for position in range(len(whole)) if whole[position : position + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]

    def encode_gap(
        self, before: str | Sequence[int], after: str, most: int, add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        """The prompt for the gap between two texts, and the tokens that end the answer.

        Special tokens spelled in the texts stay text. Texts of more than ``most`` tokens are not fully encoded.

        Raises:
            UsageError: the tokenizer has no known marks for a gap (fill in the middle).
            RequestError: as :meth:`encode_disguised`.
        """
        infill = find_infill(self.token_to_id)
        if infill is None:
            raise UsageError(
                "suffix",
                "is given, but the tokenizer has no known marks for a gap, such as <|fim_prefix|>",
                "leave it out",
            )
        plain = partial(self.encode_plain, add_special_tokens=False)
        first = self.encode_within(before, most, plain)[0] if isinstance(before, str) else before
        ids = write_infill(infill, self.token_to_id, first, self.encode_within(after, most, self._encode_inner)[0])
        return [*(self._around[0] if add_special_tokens else ()), *ids], find_ends(infill, self.token_to_id)

    def _encode_inner(self, text: str) -> list[int]:
        """:meth:`encode_plain` of a text that continues another, so SentencePiece must not add a space."""
        lead = self.encode("\n", add_special_tokens=False)
        if len(lead) > 1:  # the space, and the line end
            ids = self.encode_plain(f"\n{text}", add_special_tokens=False)
            if ids[: len(lead)] == lead:
                return ids[len(lead) :]
        return self.encode_plain(text, add_special_tokens=False)

    def encode_within(
        self, text: str, most: int, encode: Callable[[str], list[int]], from_end: bool = False
    ) -> tuple[list[int], int]:
        """Encode ``text``; if it has more than ``most`` tokens, encode only enough for a few more than that.

        The work depends on ``most``, not on the length of the text. ``from_end``: keep the end of the text, not its
        beginning.

        Returns:
            The tokens, and the number of characters that were encoded. If not all were, the last (or first)
            :data:`CUT_TOKENS` tokens may differ from those of the whole text.
        """
        read = PLAIN_CHARACTERS * (most + CUT_TOKENS)
        while read < len(text):
            ids = encode(text[-read:] if from_end else text[:read])
            if len(ids) > most + CUT_TOKENS:
                return ids, read
            read *= 2
        return encode(text), len(text)

    def cut_text(self, text: str, most: int) -> str:
        """The beginning of ``text`` that has at most ``most`` tokens (1 or more), without special tokens around it."""
        encode = partial(self.encode, add_special_tokens=False)
        ids, read = self.encode_within(text, most, encode)
        if len(ids) <= most:
            return text
        with _translate_errors(text):
            spans = self._backend.encode(text[:read], add_special_tokens=False).offsets
        # The last token kept may end within a character, the first one left out begin behind a space.
        return text[: min(spans[most - 1][1], spans[most][0])]

    @cached_property
    def controls(self) -> ControlTokens:
        unknown = (self.special_tokens.get("unk_token"), getattr(self._backend.model, "unk_token", None))
        return ControlTokens(self._backend, [text for text in unknown if text is not None])

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; computing it takes a tenth of a second for a large vocabulary."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; invalid UTF-8 becomes U+FFFD, ids without a token nothing. UsageError: a bad id."""
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise UsageError("token_ids", f"holds a value that is not an integer of at least 0: {error}") from error

    def count_normalized(self, text: str) -> int:
        """Number of characters of ``text`` after normalization."""
        normalizer = self._backend.normalizer
        return len(text) if normalizer is None else len(normalizer.normalize_str(text))

    def rewriters(self) -> list[Any]:
        """The normalizer and the decoder as tokenizer.json states them; the vocabulary is not parsed again."""
        parts = (self._backend.normalizer, self._backend.decoder)
        return [json.loads(part.__getstate__()) for part in parts if part is not None]

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its exact text in tokenizer.json, None if there is none."""
        return self._backend.token_to_id(token)

    def is_silent(self, token_id: int) -> bool:
        """True if decoding skips this id: a special token, or no token at all (a padded vocabulary)."""
        return token_id in self._special_ids or self._backend.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """True for a byte-fallback token such as ``<0xE4>``, whose text depends on the neighbouring bytes."""
        return token_id in self._byte_ids

    def spell(self, token_id: int) -> bytes:
        """The bytes that a token adds inside a text (a special token: its name); they need not be valid UTF-8."""
        if token_id in self._added:
            return self._added[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._byte_ids:
            return bytes([int(token[3:5], 16)])
        if self._is_byte_level:
            with suppress(UnicodeEncodeError):  # a token outside the byte alphabet is plain text
                return token.translate(_BYTE_LEVEL).encode("latin-1")
        # A decoder may drop a space at the start: decode the token twice and take the second.
        return self.decode([token_id, token_id])[len(self.decode([token_id])) :].encode()


# Byte-level tokenizers write a byte without printable Latin-1 character as a character from U+0100 on, as GPT-2 did.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_BYTE_LEVEL = {0x100 + place: byte for place, byte in enumerate(sorted({*range(256)} - _PRINTABLE))}


@contextmanager
def _translate_errors(text: Any) -> Iterator[None]:
    if not isinstance(text, str):
        raise UsageError("text", f"is {type(text).__name__}, expected str")
    try:
        text.encode("utf-8")
        yield
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: character {error.start} is the lone surrogate "
            f"U+{ord(text[error.start]):04X}, which stands for a byte that is not UTF-8; convert the input to UTF-8"
        ) from error
    except (RequestError, BundleError):
        raise
    except BaseException as error:  # tokenizers raises plain Exception; a panic is a BaseException
        if not _is_of_tokenizers(error):
            raise
        raise RequestError(f"the tokenizer cannot encode the text: {error}") from error


def _is_of_tokenizers(error: BaseException) -> bool:
    """True for an error or a panic of the library; the class of a panic cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


REMEDY = "take it from the checkpoint again"


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special_tokens_map.json for older files; empty if missing. Raises BundleError."""
    config = read_object(folder / CONFIG_FILE)
    if "added_tokens_decoder" not in config:  # the rule of transformers
        config |= read_object(folder / SPECIAL_TOKENS_FILE)
    return config


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no file. Raises BundleError."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} is broken ({error}); {REMEDY}") from error
    if not isinstance(content, dict):
        raise BundleError(f"{path} holds a {type(content).__name__}, expected an object; {REMEDY}")
    return content


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise BundleError(f"{path} is missing; llmc needs the checkpoint's {TOKENIZER_FILE}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:
        if not _is_of_tokenizers(error):
            raise
        raise BundleError(f"{path} is broken ({error}); {REMEDY}") from error
    return_freed_memory()
    backend.no_truncation()  # a prompt is never cut or padded, whatever the file's settings
    backend.no_padding()
    return backend


def _add_special_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> dict[str, str]:
    """Register the tokens that tokenizer_config.json adds to tokenizer.json; return the named ones.

    As in transformers 5, tokenizer.json goes first: its tokens keep their properties (but a named token is always
    special), and only its post-processor decides about BOS and EOS around a prompt.
    """
    declared = sorted((int(token_id), token) for token_id, token in (config.get("added_tokens_decoder") or {}).items())
    _add_missing(backend, [tokenizers.AddedToken(**token) for _, token in declared])
    named = {name: _content(config[name]) for name in _NAMED_TOKENS if config.get(name) is not None}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    texts = [*named.values(), *(_content(token) for token in (extra.values() if isinstance(extra, dict) else extra))]
    infill = find_infill(backend.token_to_id)  # a GGUF file has these tokens only in its vocabulary
    texts += infill.marks if infill else ()
    _add_missing(backend, [tokenizers.AddedToken(text, special=True, normalized=False) for text in texts])
    for token in backend.get_added_tokens_decoder().values():
        if token.content in named.values() and not token.special:
            token.special = True
            backend.add_special_tokens([token])
    return named


def _add_missing(backend: tokenizers.Tokenizer, tokens: list[tokenizers.AddedToken]) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in tokens if token.content not in known])


def _content(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"special token is {token!r}, expected text or an object with a content")
    return text


def _byte_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    if backend.decoder is None or b"ByteFallback" not in backend.decoder.__getstate__():
        return frozenset()
    names = [f"<0x{byte:{pattern}}>" for byte in range(256) for pattern in ("02X", "02x")]
    return frozenset(token_id for name in names if (token_id := backend.token_to_id(name)) is not None)
