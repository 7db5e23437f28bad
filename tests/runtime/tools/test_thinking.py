"""Reasoning bound token by token: free before its end, forced at its budget, and guided after it."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken

from llmc.errors import GrammarError
from llmc.runtime.guided.grammars import Grammars
from llmc.runtime.guided.guide import GrammarGuide
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.tools.thinking import MARKS, Thinking, ThinkingGuide

EOS = (0, 2)


@pytest.fixture(scope="module", params=["text", "token"])
def vocabulary(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Tokenizer:
    """Marks spelt by several tokens, as in no family, and as one token each, as in all of them."""
    tokenizer = Tokenizer.from_folder(tiny_checkpoint)
    if request.param == "token":
        marks = [AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")]
        tokenizer._backend.add_tokens(marks)
    return tokenizer


def guide_of(tokenizer: Tokenizer, opened: bool, budget: int | None, regex: str | None = None) -> ThinkingGuide:
    answer = None
    if regex is not None:
        compiled = Grammars(tokenizer, tokenizer.vocab_size, EOS).compile_grammar(SamplingParams(regex=regex))
        assert compiled is not None
        answer = GrammarGuide(compiled)
    return ThinkingGuide(Thinking(MARKS[0], opened, budget), tokenizer, EOS, answer)


def allowed(guide: ThinkingGuide, tokenizer: Tokenizer) -> list[int]:
    masked = guide.mask(np.zeros(tokenizer.vocab_size, np.float32))
    return np.flatnonzero(masked > -np.inf).tolist()


def feed(guide: ThinkingGuide, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert token in allowed(guide, tokenizer), (text, tokenizer.decode([token]))
        guide.accept(token)


def spelt(tokenizer: Tokenizer, guide: ThinkingGuide) -> str:
    """The text that is forced from here on."""
    tokens = []
    while len(found := allowed(guide, tokenizer)) == 1:
        tokens += found
        guide.accept(found[0])
    return tokenizer.decode(tokens)


@pytest.mark.threat("endless-reasoning")
@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("opened", [True, False])
def test_the_end_is_forced_after_as_many_tokens_as_the_budget_has(vocabulary, opened, budget):
    guide = guide_of(vocabulary, opened, budget)
    if not opened:
        feed(guide, vocabulary, "<think>")
    for _ in range(budget):
        assert len(allowed(guide, vocabulary)) == vocabulary.vocab_size
        guide.accept(100)
    assert spelt(vocabulary, guide) == "</think>"
    assert len(allowed(guide, vocabulary)) == vocabulary.vocab_size and not guide.finished


def test_the_end_is_forced_even_if_it_is_banned(vocabulary):
    guide = guide_of(vocabulary, True, 0)
    masked = guide.mask(np.full(vocabulary.vocab_size, -np.inf, np.float32))
    assert masked.max() == 0


def test_reasoning_that_ends_by_itself_is_left_alone(vocabulary):
    guide = guide_of(vocabulary, True, 50)
    feed(guide, vocabulary, "a < b </ think></think>\n\n")
    for _ in range(80):
        assert len(allowed(guide, vocabulary)) == vocabulary.vocab_size
        guide.accept(100)


def test_an_answer_without_reasoning_has_no_budget(vocabulary):
    guide = guide_of(vocabulary, False, 0)
    feed(guide, vocabulary, "\nno <think>")
    assert len(allowed(guide, vocabulary)) == vocabulary.vocab_size


@pytest.mark.parametrize("between", ["", "\n", "\n\n"])
def test_a_form_counts_from_the_answer_on(vocabulary, between):
    guide = guide_of(vocabulary, True, None, "yes|no")
    assert not set(EOS) & set(allowed(guide, vocabulary))
    feed(guide, vocabulary, f"maybe</think>{between}yes")
    assert guide.finished and set(allowed(guide, vocabulary)) == set(EOS)


def test_a_form_may_follow_a_forced_end(vocabulary):
    guide = guide_of(vocabulary, True, 2, "yes|no")
    # The first byte of a character that no third token may complete.
    broken = next(i for i in range(vocabulary.vocab_size) if vocabulary.spell(i) == b"\xe4")
    guide.accept(100)
    guide.accept(broken)
    assert spelt(vocabulary, guide) == "</think>"
    feed(guide, vocabulary, "no")
    assert guide.finished


def test_a_guided_answer_may_come_at_once_or_after_reasoning(tiny_checkpoint):
    tokenizer = Tokenizer.from_folder(tiny_checkpoint)
    tokenizer._backend.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "</think>")])
    for text in ("no", "<think>well</think>no"):
        guide = guide_of(tokenizer, False, None, "yes|no")
        feed(guide, tokenizer, text)
        assert guide.finished
    with pytest.raises(GrammarError):
        guide_of(tokenizer, False, None, "yes|no").accept(tokenizer.encode("well", False)[0])


def test_text_in_the_token_that_ends_a_mark_is_the_answers(tiny_checkpoint):
    tokenizer = Tokenizer.from_folder(tiny_checkpoint)
    tokenizer._backend.add_tokens([AddedToken("</think>no", normalized=False)])
    guide = guide_of(tokenizer, True, None, "yes|no")
    guide.accept(tokenizer.token_to_id("</think>no"))
    assert guide.finished
