"""500 texts and the tokens that llama.cpp makes of them, recorded as digests in ``tests/data/llamacpp_tokens.json``.

To record them anew, in an environment with ``llama-cpp-python`` and gguf: ``python tests/doubles/llamacpp_tokens.py``.
"""

import hashlib
import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "llamacpp_tokens.json"
TINY = ROOT / "recipes" / "tiny"
PRE_TOKENIZERS = (
    "gpt-2", "smollm", "starcoder", "llama-bpe", "dbrx", "qwen2", "deepseek-r1-qwen", "seed-coder", "gpt-4o", "tekken",
    "deepseek-coder", "deepseek-v3", "lfm2",
)  # fmt: skip
# Written by hand, for what chance does not make: contractions, spaces, digits, scripts, control tokens, bytes.
TEXTS = (
    "Hello world", "I'll can't WE'RE don't 'S y'all'd", "   leading and  double   spaces ", "", " ", "\n", "x",
    "tabs\tand\nnewlines\r\n\r\n  x", "12345 3.14159 1,000,000 ½ ² 0x1F 1234", "日本語のテキスト 中文 한국어 글",
    "a" * 300, "\n\n \n",
    "Ünïcödé naïve café Ångström", "emoji 😀👩‍👩‍👧 🏳️‍🌈 ok", "def f(x):\n    return x**2  # comment\n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "العربية עברית हिन्दी ไทย বাংলা",
    "!!!???...---___=== -> != <= //", "https://example.com/a?b=c&d=%20", "\u00a0nbsp\u2003em\u3000ideographic",
    "don’t “quote” — dash…", "Zażółć gęślą jaźń", "İstanbul ı ß ſ", "𝔘𝔫𝔦 𝟙𝟚𝟛 Ⅻ ①", "\x01\x7f control",
    "CamelCaseWordsHTTPServer snake_case_words", '{"k": [1, 2.5e-3, null]}', "<0x0A> <s> </s> <unk>", "▁already▁marked",
    "SELECT * FROM t WHERE a='b';", "word\u200bzero width", "trailing newline\n", "  \n  mixed \t \n",
)  # fmt: skip
_LETTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789      \n\t.,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+~`"
    "éüñçøåßжщюяΩλπ中文字日本語カタカナ한국어ءابتहिन्दी😀🚀½²①"
)


def texts() -> list[str]:
    """The 500 texts, of which a fifth is English, in Unicode's composed form."""
    chance, english = random.Random(1), (TINY / "validation.txt").read_text(encoding="utf-8")
    found = list(TEXTS)
    while len(found) < 500:
        if len(found) % 5 == 0:
            start = int(chance.random() * (len(english) - 300))
            found.append(english[start : start + 1 + int(chance.random() * 299)])
        else:
            length = 1 + int(chance.random() * 80)
            found.append("".join(_LETTERS[int(chance.random() * len(_LETTERS))] for _ in range(length)))
    return [unicodedata.normalize("NFC", text) for text in found]


def digest(tokens: Iterable[list[int]]) -> str:
    """One hash of the tokens of all texts."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()


def vocabularies() -> dict[str, dict[str, Any]]:
    """Metadata of a tokenizer for each pre-tokenizer and, of SentencePiece's kind, with a space put in front or not."""
    tiny = json.loads((TINY / "checkpoint" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    # Digits of the small model do not merge; these show where a pre-tokenizer cuts a number.
    pairs = [f"{number:02}" for number in range(100)]
    tokens = [*tiny["vocab"], *pairs, "1234"]
    special = {"bos_token_id": 1, "eos_token_id": 2}
    words = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [3, 3, 3, *[1] * (len(tokens) - 3)],
        "merges": [*(" ".join(merge) for merge in tiny["merges"]), *(" ".join(pair) for pair in pairs), "12 34"],
        **special,
    }
    pieces = _pieces(tiny)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    sentences = {
        "model": "llama",
        "pre": "default",
        "tokens": ["<unk>", "<s>", "</s>", *bytes_, *pieces],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "scores": [0.0] * 259 + [-float(rank) for rank, _ in enumerate(pieces)],
        "unknown_token_id": 0,
        **special,
    }
    # Gemma 4 has SentencePiece's tokens and byte-pair encoding's merges; newlines are in tokens of their own.
    runs = ["\n" * count for count in range(1, 6)]
    lines = [*(piece for piece in pieces if "\n" not in piece), *runs]
    cuts = ((piece[:cut], piece[cut:]) for piece in lines for cut in range(1, len(piece)))
    known = {*lines}
    merged = {
        "model": "gemma4",
        "tokens": [*sentences["tokens"][:259], *lines],
        "token_type": [*sentences["token_type"][:259], *[1] * len(lines)],
        "merges": [f"{left} {right}" for left, right in cuts if {left, right} <= known],
        "unknown_token_id": 0,
        "add_space_prefix": False,
        "add_bos_token": True,
        **special,
    }
    # Bytes of a letter and its vowel sign, which Qwen3.5 does not cut (llama.cpp cuts them in gpt-4o and tekken, too).
    signs = {"tokens": [*tokens, "¹à"], "token_type": [*words["token_type"], 1], "merges": [*words["merges"], "¹ à"]}
    return {name: {**words, "pre": name} for name in PRE_TOKENIZERS} | {
        "qwen35": {**words, **signs, "pre": "qwen35"},
        "llama": sentences,
        "llama without a space": {**sentences, "add_space_prefix": False},
        "gemma4": merged,
    }


def _pieces(tiny: dict[str, Any]) -> list[str]:
    """Texts of the small model's tokens as SentencePiece would have them, from the most frequent on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + place): byte for place, byte in enumerate(b for b in range(256) if b not in printable)}
    found = {}
    for token in [*("".join(merge) for merge in tiny["merges"]), *list(tiny["vocab"])[3:]]:
        try:
            text = bytes(alphabet[letter] for letter in token).decode("utf-8")
        except UnicodeDecodeError:
            continue
        found[text.replace(" ", "▁")] = None
    return list(found)


def _record() -> None:
    import ctypes

    import gguf
    import llama_cpp

    found, silent = {}, llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    for name, tokenizer in vocabularies().items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            writer = gguf.GGUFWriter(path, "llama")
            for key, value in tokenizer.items():
                kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
                kinds.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        vocabulary, ids = llama_cpp.llama_model_get_vocab(model), (llama_cpp.llama_token * 4096)()
        tokens = []
        for text in map(str.encode, texts()):
            count = llama_cpp.llama_tokenize(vocabulary, text, len(text), ids, len(ids), True, True)
            tokens.append(ids[:count])
        found[name] = digest(tokens)
        if len(sys.argv) > 1:
            (Path(sys.argv[1]) / f"{name}.json").write_text(json.dumps(tokens))
    RECORDED.write_text(json.dumps({"llama-cpp-python": llama_cpp.__version__, "sha256": found}, indent=1) + "\n")


if __name__ == "__main__":
    _record()
