"""Convert a GGUF file's tokenizer to ``tokenizer.json`` and ``tokenizer_config.json``.

There are three kinds. ``gpt2`` is byte-pair encoding of the bytes of words that a pre-tokenizer splits. ``llama`` is
SentencePiece: neighbours that form a token merge, highest score first, and characters without a token become bytes;
``tokenizer.json`` instead lists a merge for each such pair, ordered by score. ``gemma4`` is like ``llama``, with a list
of merges.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.errors import CheckpointError
from llmc.export.sources.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer

# Token types.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
# Most characters of a token, and of all tokens together, to search merges in. The largest vocabulary in use has 262,144
# tokens of six characters.
LONGEST_TOKEN = 1024
MOST_CHARACTERS = 1 << 23
# Most merges. The most in use is 580,604: all pairs that form one of Gemma's 262,144 tokens.
MOST_MERGES = 1 << 20
# SentencePiece's sign for a space.
_SPACE = "▁"
# Ids of SentencePiece's special tokens, if the file does not state them.
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
# Names of special tokens in a file and in tokenizer_config.json.
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Texts of control tokens that end an answer, and of others that structure turns. Some files list them as plain or added
# tokens; as in llama.cpp, the text decides.
# fmt: off
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]",
    "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<turn|>", "<|tool_response>",
    "<|return|>", "<|call|>",
})
_TURNS = frozenset({
    "<|im_start|>", "<|im_sep|>", "<start_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>",
    "<|user|>", "<|assistant|>", "<|system|>", "<|turn>", "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>",
    "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<|start_of_role|>", "<|end_of_role|>",
})
# fmt: on
# If a file has both, <|end|> ends a message, not the answer, as in OpenAI's harmony.
_HARMONY = ("<|return|>", "<|call|>")
# Special tokens after which Phi-3's tokenizer keeps spaces; after the others it drops them.
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True)
class Tokenizer:
    """Contents of the two files, the ids of the tokens that begin and end a text, and notes about parts left out."""

    json: dict[str, Any]
    config: dict[str, Any]
    bos: int | None
    ends: tuple[int, ...]
    notes: tuple[str, ...] = ()


def read_tokenizer(where: str, metadata: Mapping[str, Any]) -> Tokenizer:
    return _Reader(where, metadata).tokenizer()


class _Reader:
    def __init__(self, where: str, metadata: Mapping[str, Any]) -> None:
        self._where = where
        self._metadata = metadata
        self._notes: list[str] = []
        self._kind = metadata.get("tokenizer.ggml.model")
        if self._kind not in ("gpt2", "llama", "gemma4"):
            raise self._error("model", self._kind, "gpt2, llama or gemma4")
        self._tokens = self._list("tokens")
        turns = [token in _ENDS or token in _TURNS for token in self._tokens]
        self._types = np.where(turns, _CONTROL, self._numbers("token_type", "iu"))
        self._vocab = self._vocabulary()
        defaults = _SENTENCEPIECE_IDS if self._kind == "llama" else {}
        self._ids = {name: self._id(name, defaults.get(name)) for name in (*_NAMED, "eot", "eom")}

    def tokenizer(self) -> Tokenizer:
        pre = self._pre_tokenizer() if self._kind == "gpt2" else None
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._list_added_tokens(),
            **(self._bytes(pre) if pre else self._sentencepiece()),
            "post_processor": self._around(begins=pre.begins if pre else True),
        }
        return Tokenizer(content, self._config(), self._ids["bos"], self._ends(), tuple(self._notes))

    # ------------------------------------------------------------------------------------------------- vocabulary

    def _vocabulary(self) -> dict[str, int]:
        ids: dict[str, int] = {}
        for index, (token, kind) in enumerate(zip(self._tokens, self._types.tolist(), strict=True)):
            if kind == _UNUSED and token == f"[PAD{index}]":
                continue
            if ids.setdefault(token or f"[EMPTY_{index}]", index) != index:
                raise self._make_error(f"tokens {ids[token]} and {index} are both {token!r:.80}")
        return ids

    def _list_added_tokens(self) -> list[dict[str, Any]]:
        strips = self._kind == "llama" and self._metadata.get("general.architecture") == "phi3"
        kinds = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
        return [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": strips and token not in _KEEP_SPACE,
                "normalized": False,
                "special": kinds[kind],
            }
            for token, index in self._vocab.items()
            if (kind := int(self._types[index])) in kinds
        ]

    # ------------------------------------------------------------------------------------------ byte-pair encoding

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._metadata.get("tokenizer.ggml.pre")
        if name not in PRE_TOKENIZERS:
            raise self._error("pre", name, f"one of {', '.join(PRE_TOKENIZERS)}")
        return PRE_TOKENIZERS[str(name)]

    def _bytes(self, pre: PreTokenizer) -> dict[str, Any]:
        cuts = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in pre.patterns
        ]
        whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {
            "normalizer": {"type": "NFC"} if pre.composed else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, whole]},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": _bpe(self._vocab, self._merges(), ignore_merges=pre.whole_words),
        }

    def _merges(self) -> list[tuple[str, str]]:
        stored, vocab, merges = self._list("merges"), self._vocab, []
        if len(stored) > MOST_MERGES:
            raise self._make_error(f"it has {len(stored)} merges, expected at most {MOST_MERGES}")
        for merge in stored:
            cut = merge.find(" ", 1)
            left, right = merge[:cut], merge[cut + 1 :]
            if cut < 0 or left not in vocab or right not in vocab or left + right not in vocab:
                raise self._make_error(f"the merge {merge!r:.80} does not join two tokens to a third")
            merges.append((left, right))
        return merges

    # ------------------------------------------------------------------------------------------------ SentencePiece

    def _sentencepiece(self) -> dict[str, Any]:
        prefix = self._flag("add_space_prefix", self._kind == "llama")
        before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
        after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        unspaced = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        unknown = self._ids["unknown"]
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": [unspaced, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]},
            "model": _bpe(
                self._vocab,
                self._list_scored_merges() if self._kind == "llama" else self._merges(),
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            ),
        }

    def _list_scored_merges(self) -> list[tuple[str, str]]:
        """Every pair of tokens that forms a third, by the third's score, highest first."""
        scores = self._numbers("scores", "f").tolist()
        if not np.isfinite(scores).all():
            raise self._make_error("a score is not a number")
        if max(map(len, self._tokens)) > LONGEST_TOKEN or sum(map(len, self._tokens)) > MOST_CHARACTERS:
            raise self._make_error(
                f"its tokens have more than {LONGEST_TOKEN} characters, or {MOST_CHARACTERS} of them together"
            )
        types = self._types.tolist()
        mergeable = {
            token: index for token, index in self._vocab.items() if types[index] in (_NORMAL, _USER_DEFINED, _UNUSED)
        }
        merges = []
        for token, index in mergeable.items():
            pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            parts = [(mergeable[a], mergeable[b]) for a, b in pairs if a in mergeable and b in mergeable]
            merges += [(scores[index], len(self._tokens[a]), len(self._tokens[b]), a, b) for a, b in sorted(parts)]
        merges.sort(key=lambda pair: pair[:3], reverse=True)
        return [(self._tokens[a], self._tokens[b]) for *_, a, b in merges]

    # ------------------------------------------------------------------------------------------------ special tokens

    def _around(self, begins: bool) -> dict[str, Any] | None:
        names = {"bos": self._flag("add_bos_token", begins), "eos": self._flag("add_eos_token", False)}
        tokens: dict[str, int] = {}
        for name in (name for name, added in names.items() if added):
            index = self._ids[name]
            if index is None:
                raise self._make_error(f"a text has a token {name} around it, but {name}_token_id is missing")
            tokens[name] = index
        if not tokens:
            return None
        texts = {name: self._tokens[index] for name, index in tokens.items()}
        special = {name: {"SpecialToken": {"id": text, "type_id": 0}} for name, text in texts.items()}
        first, last = [special[n] for n in ("bos",) if n in special], [special[n] for n in ("eos",) if n in special]
        a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        return {
            "type": "TemplateProcessing",
            "single": [*first, a, *last],
            "pair": [*first, a, *last, *first, b, *last],
            "special_tokens": {
                text: {"id": text, "ids": [tokens[name]], "tokens": [text]} for name, text in texts.items()
            },
        }

    def _config(self) -> dict[str, Any]:
        named = {key: self._tokens[index] for name, key in _NAMED.items() if (index := self._ids[name]) is not None}
        template = self._templates()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **named,
            **({"chat_template": template} if template else {}),
        }

    def _templates(self) -> str | list[dict[str, str]] | None:
        plain = self._metadata.get("tokenizer.chat_template")
        names = self._metadata.get("tokenizer.chat_templates", [])
        named = {name: self._metadata.get(f"tokenizer.chat_template.{name}") for name in names}
        if not all(isinstance(text, str) for text in (*named.values(), plain or "")):
            raise self._make_error("a chat template is not a text")
        if not named:
            return plain
        templates = ({"default": plain} if plain else {}) | named
        return [{"name": name, "template": str(text)} for name, text in templates.items()]

    def _ends(self) -> tuple[int, ...]:
        """Ids that end an answer: first those that the file names, then those with a known text."""
        stated = [index for name in ("eos", "eot", "eom") if (index := self._ids[name]) is not None]
        ends = _ENDS - {"<|end|>"} if self._vocab.keys() >= {*_HARMONY} else _ENDS
        return tuple(dict.fromkeys([*stated, *(self._vocab[text] for text in sorted(ends & self._vocab.keys()))]))

    # ----------------------------------------------------------------------------------------------------- metadata

    def _list(self, name: str) -> list[str]:
        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, list):
            raise self._make_error(f"tokenizer.ggml.{name} is missing, or not a list of texts")
        return values

    def _numbers(self, name: str, kinds: str) -> Any:
        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds or len(values) != len(self._tokens):
            raise self._make_error(f"tokenizer.ggml.{name} is missing, or not a number for each of the tokens")
        return values

    def _id(self, name: str, default: int | None) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id", default)
        if value is not None and (type(value) is not int or value < 0):
            raise self._error(f"{name}_token_id", value, f"an id below {len(self._tokens)}")
        if value is not None and value >= len(self._tokens):  # llama.cpp ignores it too
            self._notes.append(f"{name}_token_id={value} was left out, since the file has {len(self._tokens)} tokens")
            return None
        return value

    def _flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if type(value) is not bool:
            raise self._error(name, value, "true or false")
        return value

    def _error(self, name: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self._where}: tokenizer.ggml.{name}={value!r:.80} is unsupported; expected {expected}"
        )

    def _make_error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: its tokenizer is broken ({why}); get the file from another source")


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    plain = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**plain, **options, "vocab": vocab, "merges": merges}
