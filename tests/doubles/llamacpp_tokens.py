"""500 texts and the tokens that llama.cpp makes of them, recorded as digests in ``tests/data/llamacpp_tokens.json``.

To record them anew, in an environment with ``xllamacpp``, gguf and numpy: ``python tests/doubles/llamacpp_tokens.py``.
"""

import hashlib
import json
import random
import sys
import tempfile
import unicodedata
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "llamacpp_tokens.json"
TINY = ROOT / "recipes" / "tiny"
PRE_TOKENIZERS = (
    "gpt-2", "smollm", "starcoder", "llama-bpe", "dbrx", "qwen2", "deepseek-r1-qwen", "seed-coder", "gpt-4o", "tekken",
    "deepseek-coder", "deepseek-v3",
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
    return {name: {**words, "pre": name} for name in PRE_TOKENIZERS} | {
        "llama": sentences,
        "llama without a space": {**sentences, "add_space_prefix": False},
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
    import gguf
    import numpy as np
    import xllamacpp

    found = {}
    for name, tokenizer in vocabularies().items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            writer = gguf.GGUFWriter(path, "llama")
            sizes = {"block_count": 1, "context_length": 4096, "embedding_length": 32, "feed_forward_length": 32}
            for key, value in {**sizes, "attention.head_count": 2, "attention.head_count_kv": 2}.items():
                writer.add_uint32(f"llama.{key}", value)
            writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
            for key, value in tokenizer.items():
                kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
                kinds.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
            matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
            shapes = {f"blk.0.{part}.weight": (32, 32) for part in matrices}
            shapes |= {f"blk.0.{part}_norm.weight": (32,) for part in ("attn", "ffn")}
            shapes |= {"token_embd.weight": (len(tokenizer["tokens"]), 32), "output_norm.weight": (32,)}
            for tensor, shape in shapes.items():
                writer.add_tensor(tensor, np.zeros(shape, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            tokens = [_tokenized(address, text) for address in [_served(xllamacpp, path)] for text in texts()]
            found[name] = digest(tokens)
            if len(sys.argv) > 1:
                (Path(sys.argv[1]) / f"{name}.json").write_text(json.dumps(tokens))
    RECORDED.write_text(json.dumps({"xllamacpp": xllamacpp.__version__, "sha256": found}, indent=1) + "\n")


_SERVERS = []


def _served(xllamacpp: Any, path: Path) -> str:
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.warmup = str(path), 256, False
    _SERVERS.append(xllamacpp.Server(parameters))
    return str(_SERVERS[-1].listening_address)


def _tokenized(address: str, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    request = urllib.request.Request(f"{address}/tokenize", body, {"Content-Type": "application/json"})
    found: list[int] = json.loads(urllib.request.urlopen(request).read())["tokens"]
    return found


if __name__ == "__main__":
    _record()
