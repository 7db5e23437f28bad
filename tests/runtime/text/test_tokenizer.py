import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from llmc.errors import BundleError, RequestError
from llmc.runtime.text.tokenizer import Tokenizer

# Texts that are encoded until another thread has had a turn: it may be long in coming where all processors are busy.
ATTEMPTS = 200
ENDLESS_S = 1000.0

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "runs      of\t\ttabs\n\n\n and\r\nline  ends\n",
    "the quick brown fox, don't you think? 1234567890 3.14159 1e-9",
    "def f(x):\n\treturn {'a': [x, 'b']}  # comment\n",
    "العربية עברית हिन्दी বাংলা ไทย ភាសាខ្មែរ ქართული ελληνικά Русский 中文 日本語 한국어 ትግርኛ",
    "𝕌𝕟𝕚𝕔𝕠𝕕𝕖 𓀀 𐍈 Ⅷ ½ ﷽ ﬁ ｆｕｌｌ",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇯🇵 🎉🎉🎉 #️⃣",
    "e\u0301 n\u0303 Z\u0351\u036b\u0343 a\u0308\u0323 \u1100\u1161",
    "zero\u200bwidth\ufeff \u00a0nbsp \u2003em \u202eright-to-left\u202c",
    "control \x00 \x01 \x1b[31m \x7f \x85 \u2028",
    "<s> <|end|> </s> <think> <0x41> ▁ Ġ � <unk>",
    "x" * 3000,
    "aé北🎉" * 300,
    "\U0010ffff \ue000 \ufffd \ufffe",
]


@pytest.fixture(params=["byte_level_folder", "metaspace_folder", "tiny_checkpoint"])
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def changed(folder: Path, target: Path, **config: Any) -> Path:
    """A copy of a tokenizer's folder with other settings in tokenizer_config.json."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **config}), encoding="utf-8")
    return target


def assert_parity(folder: Path, texts: list[str]) -> None:
    ours, theirs = Tokenizer.from_folder(folder), transformers_tokenizer(folder)
    for text in texts:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


class TestParity:
    def test_of_ids_and_text_with_transformers(self, folder):
        assert_parity(folder, TEXTS)

    def test_of_any_ids(self, folder):
        ours, theirs = Tokenizer.from_folder(folder), transformers_tokenizer(folder)
        for start in range(0, ours.vocab_size, 97):
            ids = [(start + 31 * step) % (ours.vocab_size + 5) for step in range(40)]
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    @pytest.mark.parametrize(
        "config",
        [
            {"additional_special_tokens": ["<think>", "<new>", "the"]},
            {"extra_special_tokens": {"image_token": "<image>"}},
            {"added_tokens_decoder": {"900": {"content": "<late>", "special": False}}, "pad_token": "<pad>"},
            {"clean_up_tokenization_spaces": True},
            {"added_tokens_decoder": {}, "unk_token": {"content": "<unk>", "__type": "AddedToken"}},
        ],
        ids=str,
    )
    def test_of_what_the_configuration_adds(self, byte_level_folder, tmp_path, config):
        texts = [*TEXTS[:4], "a<think>b <new>c", "<image> <late>x<pad> , <unk> ."]
        assert_parity(changed(byte_level_folder, tmp_path, **config), texts)

    @pytest.mark.parametrize("kind", ["GPTNeoXTokenizer", "GPTNeoXTokenizerFast", "GPT2Tokenizer"])
    @pytest.mark.parametrize("flag", [None, False])
    def test_of_what_stands_around_a_text(self, tmp_path, kind, flag):
        """GPT-NeoX's class puts nothing there, whatever tokenizer.json says."""
        backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<eos>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")]))
        backend.add_special_tokens(["<eos>"])
        single = tokenizers.processors.TemplateProcessing("$A <eos>", "$A $B <eos>", [("<eos>", 0)])
        backend.post_processor, backend.decoder = single, tokenizers.decoders.ByteLevel()
        backend.save(str(tmp_path / "tokenizer.json"))
        named = {"tokenizer_class": kind, "eos_token": "<eos>", "unk_token": "<eos>", "pad_token": "<eos>"}
        flags = {} if flag is None else {"add_eos_token": flag}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, **flags}))
        (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
        found = Tokenizer.from_folder(tmp_path).encode("ab")
        assert found == transformers_tokenizer(tmp_path)("ab").input_ids == ([3, 0] if kind == "GPT2Tokenizer" else [3])

    def test_of_the_older_file_of_special_tokens(self, byte_level_folder, tmp_path):
        folder = changed(byte_level_folder, tmp_path)
        content = {"bos_token": {"content": "<|turn|>", "lstrip": False}, "sep_token": "<sep>"}
        (folder / "special_tokens_map.json").write_text(json.dumps(content), encoding="utf-8")
        assert_parity(folder, ["a<sep>b<|turn|>"])
        assert Tokenizer.from_folder(folder).special_tokens["bos_token"] == "<|turn|>"


def lets_others_run(work: Callable[[], object]) -> bool:
    """Whether another thread ran during ``work``, by whose leave alone it can: nobody else takes Python's lock away."""
    interval, go, ran = sys.getswitchinterval(), threading.Lock(), []
    other = threading.Thread(target=lambda: ran.append(go.acquire()))
    sys.setswitchinterval(ENDLESS_S)
    try:
        go.acquire()
        other.start()
        go.release()
        work()
        return bool(ran)
    finally:
        sys.setswitchinterval(interval)
        other.join()


class TestTokenizer:
    def test_lets_other_threads_run_while_it_encodes(self, byte_level_folder):
        tokenizer, text = Tokenizer.from_folder(byte_level_folder), "the quick brown fox\n" * 10_000
        assert any(lets_others_run(lambda: tokenizer.encode(text)) for _ in range(ATTEMPTS))
        assert not any(lets_others_run(lambda: tokenizer._backend.encode(text)) for _ in range(3))  # holds the lock
        assert tokenizer.encode(text) == tokenizer._backend.encode(text).ids

    def test_does_not_truncate_or_pad_whatever_the_file_says(self, byte_level_folder, tmp_path):
        folder = changed(byte_level_folder, tmp_path)
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.decode(tokenizer.encode("x" * 100)) == "x" * 100


class TestBadInput:
    def test_undecodable_bytes_are_refused(self, folder):
        text = b"abc\xff".decode("utf-8", "surrogateescape")
        with pytest.raises(RequestError, match=r"character 3 is the lone surrogate U\+DCFF"):
            Tokenizer.from_folder(folder).encode(text)

    def test_a_missing_file_is_refused(self, tmp_path):
        with pytest.raises(BundleError, match=r"tokenizer\.json is missing"):
            Tokenizer.from_folder(tmp_path)

    @pytest.mark.parametrize("content", ["", "[]", '{"model": {"type": "BPE"}}'])
    def test_a_broken_file_is_refused(self, tmp_path, content):
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
        with pytest.raises(BundleError, match=r"tokenizer\.json is broken"):
            Tokenizer.from_folder(tmp_path)

    @pytest.mark.parametrize(
        "content", ["{", "[]", '{"bos_token": 3}', '{"added_tokens_decoder": [1]}', '{"extra_special_tokens": 3}']
    )
    def test_a_broken_configuration_is_refused(self, byte_level_folder, tmp_path, content):
        shutil.copy(byte_level_folder / "tokenizer.json", tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
        with pytest.raises(BundleError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)

    def test_spaces_are_not_cleaned_up(self, tmp_path):
        from tokenizers import Tokenizer as Backend
        from tokenizers import models

        Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"clean_up_tokenization_spaces": true}', encoding="utf-8")
        with pytest.raises(BundleError, match="clean_up_tokenization_spaces is true for a WordLevel tokenizer"):
            Tokenizer.from_folder(tmp_path).require_spaces(tmp_path)


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_the_spellings_of_tokens_are_together_the_text(folder, text):
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(text, add_special_tokens=False)
    spelt = b"".join(map(tokenizer.spell, ids)).decode()
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    assert spelt == decoded or spelt == " " + decoded  # which Metaspace takes from the first word


def test_a_special_token_is_spelt_by_its_name_and_no_token_not_at_all(byte_level_folder):
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    end = tokenizer.token_to_id("<|end|>")
    assert end is not None
    assert (tokenizer.spell(end), tokenizer.spell(tokenizer.vocab_size + 5)) == (b"<|end|>", b"")
