"""Prompts with a gap: the marks of each family, at the places that its authors gave them."""

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from llmc.errors import UsageError
from llmc.runtime.text.infill import FAMILIES
from llmc.runtime.text.tokenizer import Tokenizer

BEFORE, AFTER = "def f(a):\n    return ", "\n\nf(1)"
# The prompts as the model cards write them.
CARDS = {
    "<|fim_prefix|>": "<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>",
    "<fim_prefix>": "<fim_prefix>{before}<fim_suffix>{after}<fim_middle>",
    "<fim-prefix>": "<fim-prefix>{before}<fim-suffix>{after}<fim-middle>",
    "<｜fim▁begin｜>": "<｜fim▁begin｜>{before}<｜fim▁hole｜>{after}<｜fim▁end｜>",
    "[PREFIX]": "[SUFFIX]{after}[PREFIX]{before}",
    "<[fim-prefix]>": "<[fim-suffix]>{after}<[fim-prefix]>{before}<[fim-middle]>",
    "<|code_prefix|>": "<|code_prefix|>{before}<|code_suffix|>{after}<|code_middle|>",
}
LLAMA = "▁<PRE>"


def byte_level(*marks: str) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *marks])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(marks))
    return backend


def test_every_family_is_tried():
    assert {family.prefix for family in FAMILIES} == {*CARDS, LLAMA}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.prefix != LLAMA], ids=lambda f: f.prefix)
def test_a_prompt_with_a_gap_is_as_the_model_card_writes_it(family):
    backend = byte_level(*family.marks, *family.ends, "<|bos|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
    )
    tokenizer = Tokenizer(backend, {})
    wanted = backend.encode(CARDS[family.prefix].format(before=BEFORE, after=AFTER))
    ids, ends = tokenizer.encode_gap(BEFORE, AFTER, 100)
    assert ids == wanted.ids
    assert tokenizer.encode_gap(tokenizer.encode(BEFORE, False), AFTER, 100, False)[0] == wanted.ids[1:]
    assert {backend.id_to_token(token) for token in ends} == {*family.marks, *family.ends}


def test_code_llama_has_no_space_before_the_text_after_the_gap():
    """As ``encode_infilling`` of the code that its authors published."""
    family = next(family for family in FAMILIES if family.prefix == LLAMA)
    texts = ["<unk>", *family.marks, *family.ends, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcd"]
    vocab = {token: number for number, token in enumerate(texts)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in family.marks])
    ids, _ = Tokenizer(backend, {}).encode_gap("ab", "c d", 100)
    assert [backend.id_to_token(token) for token in ids] == ["▁<PRE>", "▁", "a", "b", "▁<SUF>", "c", "▁", "d", "▁<MID>"]


def test_marks_that_the_texts_spell_are_text():
    tokenizer = Tokenizer(byte_level("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), {})
    ids, ends = tokenizer.encode_gap("<fim_middle>", "<fim_prefix>", 100)
    assert sum(token in ends for token in ids) == 3 and len(ids) == 3 + len("<fim_middle><fim_prefix>")


def test_texts_longer_than_the_context_are_not_made_whole():
    tokenizer = Tokenizer(byte_level("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), {})
    assert 20 < len(tokenizer.encode_gap("a" * 100_000, "b" * 100_000, 20)[0]) < 3000


def test_a_tokenizer_without_the_marks_is_named():
    with pytest.raises(UsageError, match="suffix is given, but the tokenizer has no known marks"):
        Tokenizer(byte_level("<fim_prefix>", "<fim_suffix>"), {}).encode_gap("a", "b", 100)


def test_marks_that_are_in_the_vocabulary_alone_are_tokens(tmp_path):
    """As GGUF has them."""
    backend = byte_level()
    vocab = {**backend.get_vocab(), "<fim_prefix>": 256, "<fim_suffix>": 257, "<fim_middle>": 258}
    bare = tokenizers.Tokenizer(models.BPE(vocab, []))
    bare.pre_tokenizer, bare.decoder = backend.pre_tokenizer, backend.decoder
    bare.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<fim_prefix>a<fim_middle>")[::2] == [256, 258]
    assert len(tokenizer.encode_plain("<fim_prefix>")) == len("<fim_prefix>")
