"""Tokenizers of the two kinds that decoders come with, trained or written out in a moment."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def f(x):\n    return x + 1\n",
    "naïve café 北京 🎉🎉 123",
] * 20


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE as in Llama 3 and Qwen: every byte has a token; special tokens only by name."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return save(tmp_path_factory.mktemp("byte_level"), tokenizer, {"eos_token": "<|end|>", "pad_token": "<|end|>"})


@pytest.fixture(scope="session")
def metaspace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BPE on words that begin with a visible space, bytes for what it does not know and BOS, as in Llama 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        [text.encode("ascii", "ignore").decode() for text in CORPUS],
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False),
    )
    return save(tmp_path_factory.mktemp("metaspace"), with_bytes_as_plain_tokens(tokenizer), LLAMA_CONFIG)


LLAMA_CONFIG = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "unk_token": "<unk>"}


def with_bytes_as_plain_tokens(trained: Tokenizer) -> Tokenizer:
    """The trainer makes every token it is given special; only the first three are."""
    content = json.loads(trained.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, config: dict[str, object]) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
