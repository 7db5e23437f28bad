"""The pre-tokenizers that GGUF files name: they split a text into words before byte-pair encoding.

Each is a list of patterns; every pattern splits the pieces that the earlier ones left. The patterns are those of the
original ``tokenizer.json`` files, the names those that llama.cpp's converter writes as ``tokenizer.ggml.pre``.
Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from dataclasses import dataclass, replace

_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_SEED = _QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHERS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_GPT4O = rf"{_WORDS.replace('%s', _CONTRACTED + '?')}|\p{{N}}{{1,3}}|{_OTHERS}"
_TEKKEN = rf"{_WORDS.replace('%s', '')}|\p{{N}}|{_OTHERS}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns in their order."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token stays whole, whatever merges would make of it
    begins: bool = False  # a text begins with the BOS token unless the file says otherwise
    composed: bool = False  # letters and accents are first composed, Unicode's form NFC


_OF_GPT2 = PreTokenizer((_GPT2,))
_OF_STARCODER = PreTokenizer((r"\p{N}", _GPT2))
_OF_LLAMA3 = PreTokenizer((_LLAMA3,), whole_words=True, begins=True)
_OF_QWEN2 = PreTokenizer((_QWEN2,))
PRE_TOKENIZERS = {
    "gpt-2": _OF_GPT2,
    "phi-2": _OF_GPT2,
    "mpt": _OF_GPT2,
    "olmo": _OF_GPT2,
    "smollm": _OF_STARCODER,
    "starcoder": _OF_STARCODER,
    "refact": _OF_STARCODER,
    "command-r": replace(_OF_STARCODER, composed=True),
    "llama-bpe": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "falcon3": _OF_LLAMA3,
    "pixtral": _OF_LLAMA3,
    "lfm2": _OF_LLAMA3,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": replace(_OF_QWEN2, composed=True),
    "qwen35": PreTokenizer((_QWEN35,), composed=True),
    "deepseek-r1-qwen": _OF_QWEN2,
    "seed-coder": PreTokenizer((_SEED,)),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, begins=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}
