"""Masks against brute force over the vocabulary, and the steps between them."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from doubles.refusals import about

from llmc.errors import GrammarError, RequestError
from llmc.runtime.guided.grammars import Grammars

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["cat", "dog", 7]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}

# What may be read of an output before it is complete, derived by hand.
PARTIAL = {r"(ab|c)*d": r"(ab|c)*(a|d)?", r"the [a-z]{2,4}": r"(t|th|the|the [a-z]{0,4})?", r"x{0,9}": r"x{0,9}"}


class TestMask:
    @pytest.mark.parametrize("regex", PARTIAL)
    def test_allows_just_what_can_still_match(self, vocabulary, regex):
        grammars = vocabulary.grammars()
        for seed in range(4):
            guide = vocabulary.start(grammars, regex=regex)
            read = b""
            for token in vocabulary.walk(vocabulary.start(grammars, regex=regex), seed):
                assert vocabulary.agrees(guide, self.expected(vocabulary, regex, read))
                guide.accept(token)
                read += vocabulary.spellings[token] or b""

    @staticmethod
    def expected(vocabulary: Any, regex: str, read: bytes) -> set[int]:
        ends = set(vocabulary.eos) if re.fullmatch(regex.encode(), read) else set()
        partial = re.compile(PARTIAL[regex].encode())
        spelled = ((token, spelling) for token, spelling in enumerate(vocabulary.spellings) if spelling)
        return ends | {token for token, spelling in spelled if partial.fullmatch(read + spelling)}

    def test_brute_force_notices_a_token_too_many(self, tiny):
        """The planted error: another regex, which differs in its last character only."""
        guide = tiny.start(regex=r"(ab|c)*[de]")
        assert not tiny.agrees(guide, self.expected(tiny, r"(ab|c)*d", b""))

    def test_leaves_the_logits_and_keeps_those_allowed(self, tiny):
        logits = np.random.default_rng(0).normal(0, 3, tiny.size).astype(np.float32)
        before = logits.copy()
        guide = tiny.start(regex="[a-z]+")
        masked = guide.mask(logits)
        kept = np.isfinite(masked)
        np.testing.assert_array_equal(logits, before)
        np.testing.assert_array_equal(masked[kept], logits[kept])
        assert set(masked[~kept]) == {-np.inf}
        assert masked.dtype == np.float32

    def test_never_allows_special_tokens_nor_padding(self, vocabulary):
        guide = vocabulary.start(regex=r"(?s:.*)")
        ordinary = {token for token, spelling in enumerate(vocabulary.spellings) if spelling is not None}
        assert vocabulary.allowed(guide) - set(vocabulary.eos) <= ordinary

    def test_allows_a_special_token_that_the_grammar_names(self, byte_level):
        guide = byte_level.start(byte_level.grammars(eos=(0,)), grammar='start: <|turn|> "x"')
        assert byte_level.allowed(guide) == {1}

    def test_fits_a_model_with_fewer_tokens_than_the_tokenizer(self, tiny):
        size = len(tiny.spellings) - 1003
        guide = tiny.start(Grammars(tiny.tokenizer, size, (0,)), regex="[a-z ]+")
        logits = np.random.default_rng(0).normal(0, 3, size).astype(np.float32)
        for _ in range(20):
            guide.accept(int(guide.mask(logits).argmax()))

    def test_is_the_same_for_every_thread(self, tiny):
        alone = list(tiny.outputs(walks=8, json_schema=SCHEMA))
        grammars = tiny.grammars()

        def run(seed: int) -> str:
            return tiny.text(tiny.walk(tiny.start(grammars, json_schema=SCHEMA), seed))

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(run, range(8))) == alone


class TestEnd:
    def test_is_every_end_of_sequence_token_where_the_output_is_complete(self, byte_level):
        guide = byte_level.start(byte_level.grammars(eos=(0, 1)), regex="ab?")
        first, second = byte_level.spell(b"a") + byte_level.spell(b"b")
        assert not byte_level.allowed(guide) & {0, 1}
        guide.accept(first)
        assert byte_level.allowed(guide) == {0, 1, second}
        assert not guide.finished
        guide.accept(second)
        assert byte_level.allowed(guide) == {0, 1}
        assert guide.finished

    @pytest.mark.parametrize("eos", [0, 1])
    def test_comes_once(self, byte_level, eos):
        guide = byte_level.start(byte_level.grammars(eos=(0, 1)), regex="a+")
        guide.accept(*byte_level.spell(b"a"))
        guide.accept(eos)
        assert guide.finished
        assert byte_level.allowed(guide) == {0, 1}
        with pytest.raises(GrammarError, match="after its end"):
            guide.accept(0)

    def test_is_needed(self, tiny):
        with pytest.raises(RequestError, match="end-of-sequence"):
            tiny.ask(tiny.grammars(eos=(10**6,)), regex="a")

    def test_is_never_text_even_if_it_has_one(self, tiny):
        (comma,) = tiny.spell(b",")
        guide = tiny.start(tiny.grammars(eos=(comma,)), regex="a?,?")
        guide.accept(comma)
        assert guide.finished
        with pytest.raises(GrammarError, match="no token"):
            tiny.ask(tiny.grammars(eos=(comma,)), regex=",")


class TestSteps:
    def test_refuse_a_token_outside_the_mask_and_stay(self, tiny):
        guide = tiny.start(regex="a+")
        before = tiny.allowed(guide)
        for token in (*tiny.spell(b"b"), 0, -1, tiny.size - 1, tiny.size, 10**9):
            with pytest.raises(GrammarError, check=about("regex")):
                guide.accept(token)
        assert tiny.allowed(guide) == before
        guide.accept(*tiny.spell(b"a"))

    def test_end_with_an_error_where_no_token_spells_the_rest(self, words):
        guide = words.start(regex="(a|ab)c|x")
        assert words.allowed(guide) == {1, 2, 4}
        guide.accept(1)
        with pytest.raises(GrammarError, match="regex allows no token of the vocabulary after 1 tokens"):
            words.allowed(guide)
