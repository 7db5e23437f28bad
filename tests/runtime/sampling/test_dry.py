from collections.abc import Collection, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.sampling.dry import Breakers, Dry

# float32 of logits and penalties, where the reference works in float64.
RELATIVE_TOLERANCE = 1e-6
VOCABULARY = 12

SEQUENCES = st.lists(st.integers(0, 3), min_size=1, max_size=50)


def alone(*tokens: int) -> Breakers:
    """Tokens that are breakers by themselves: each is spelt with a letter of its own."""
    return Breakers([chr(token + 97) for token in tokens], lambda token: bytes([token + 97]))


def zeros() -> np.ndarray:
    return np.zeros(VOCABULARY, np.float32)


def penalties(
    tokens: Sequence[int],
    multiplier: float,
    base: float = 1.75,
    allowed_length: int = 2,
    window: int = 0,
    breakers: Collection[int] = (),
) -> np.ndarray:
    """By definition: for each token, the longest suffix of the text that occurred before and was followed by it."""
    text = list(tokens)[-window:] if window else list(tokens)
    result = np.zeros(VOCABULARY)
    for token in set(range(VOCABULARY)) - set(breakers):
        best = 0
        for end in range(1, len(text)):
            if text[end] != token:
                continue
            length = 0
            while length < end and text[end - 1 - length] == text[-1 - length] and text[-1 - length] not in breakers:
                length += 1
            best = max(best, length)
        if best >= allowed_length:
            result[token] = multiplier * base ** (best - allowed_length)
    return result


@given(
    tokens=SEQUENCES,
    multiplier=st.floats(0.1, 5),
    base=st.floats(1, 3),
    allowed_length=st.integers(1, 5),
    window=st.integers(0, 60),
    breakers=st.sets(st.integers(0, 3), max_size=2),
)
@settings(max_examples=300, deadline=None)
def test_the_penalty_follows_the_definition(tokens, multiplier, base, allowed_length, window, breakers):
    found = -Dry(multiplier, base, allowed_length, window, alone(*breakers))(tokens, zeros())
    expected = np.minimum(penalties(tokens, multiplier, base, allowed_length, window, breakers), 1e9)
    np.testing.assert_allclose(found, expected, rtol=RELATIVE_TOLERANCE)


@pytest.mark.parametrize("wrong", [(0.81, 1.75, 2), (0.8, 1.76, 2), (0.8, 1.75, 3)], ids=str)
def test_the_penalty_of_other_arguments_fails_that_check(wrong):
    tokens = [1, 2, 3, 4, 5, 1, 2, 3, 4]
    found = -Dry(0.8)(tokens, zeros())
    assert np.abs(found - penalties(tokens, *wrong)).max() > RELATIVE_TOLERANCE


def test_the_example_of_its_author():
    """Four tokens that were followed by 5 before: multiplier * base ** (4 - 2) from token 5 alone."""
    found = Dry(0.8, 1.75, 2)([1, 2, 3, 4, 5, 9, 1, 2, 3, 4], zeros())
    assert np.flatnonzero(found).tolist() == [5]
    assert found[5] == np.float32(-0.8 * 1.75**2)


def test_breakers_end_a_repetition_and_are_not_punished():
    tokens = [1, 2, 0, 3, 4, 5, 9, 1, 2, 0, 3, 4]
    across = Dry(1.0, 2.0, 2, breakers=alone(0))(tokens, zeros())
    assert across[5] == -1.0  # two tokens repeat since the breaker, not five
    assert Dry(1.0, 2.0, 2)(tokens, zeros())[5] == -8.0
    assert not Dry(1.0, breakers=alone(5))(tokens, zeros()).any()
    assert not Dry(1.0, breakers=alone(4))(tokens, zeros()).any()


SPELT = ["a", "b", "c", "xay", "ab", "bc", "\n", ":\n", "cab", "日".encode()[:2], "日".encode()[2:], "本"]


def spelling(token: int) -> bytes:
    text = SPELT[token]
    return text if isinstance(text, bytes) else text.encode()


@given(
    tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
    texts=st.lists(st.sampled_from(["a", "\n", "bc", "abc", "cab", "日", "ya", "aa"]), max_size=3),
    cuts=st.lists(st.integers(1, 30), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_a_breaker_breaks_where_it_ends_in_the_text_whatever_tokens_spell_it(tokens, texts, cuts):
    text, ends = b"", []
    for token in tokens:
        text += spelling(token)
        ends.append(len(text))
    since = 0  # tokens up to the one in which the last breaker ends
    for place in range(len(text)):
        for breaker in (item.encode() for item in texts):
            if text.startswith(breaker, place):
                since = max(since, 1 + next(i for i, end in enumerate(ends) if end >= place + len(breaker)))
    spared = {i for i in range(VOCABULARY) if any(item.encode() in spelling(i) for item in texts)}
    expected = np.zeros(VOCABULARY)
    for token in set(tokens) - spared:
        lengths = [
            next((n for n in range(end) if tokens[end - 1 - n] != tokens[-1 - n]), end)
            for end in range(1, len(tokens))
            if tokens[end] == token
        ]
        best = min(max(lengths, default=0), len(tokens) - since)
        expected[token] = best >= 1 and 2.0 ** (best - 1)
    dry = Dry(1.0, 2.0, 1, breakers=Breakers(texts, spelling))
    for cut in sorted(cuts):
        dry(tokens[:cut], zeros())
    np.testing.assert_allclose(-dry(tokens, zeros()), expected, rtol=RELATIVE_TOLERANCE)


def test_every_token_whose_text_contains_a_breaker_is_one(tiny_tokenizer):
    """Not only the one that the tokenizer writes it as."""
    breakers = Breakers((":",), tiny_tokenizer.spell)
    vocabulary = range(tiny_tokenizer.vocab_size)
    containing = {i for i in vocabulary if ":" in tiny_tokenizer.decode([i], skip_special_tokens=False)}
    assert {i for i in vocabulary if i in breakers} == containing
    assert len(containing) > 5
    inside = max(containing - set(tiny_tokenizer.encode(":")))
    tokens = [1, 2, inside, 3, 4, 5, 9, 1, 2, inside, 3, 4]
    assert Dry(1.0, 2.0, 2, breakers=breakers)(tokens, np.zeros(len(vocabulary), np.float32))[5] == -1.0


def test_only_the_window_is_looked_at():
    tokens = [1, 2, 3, 4, 9, 9, 1, 2, 3]
    assert Dry(1.0)(tokens, zeros())[4] < 0
    assert Dry(1.0, window=8)(tokens, zeros())[4] == -1.0
    assert not Dry(1.0, window=7)(tokens, zeros())[4]


@pytest.mark.parametrize("allowed_length", [2**31, 2**63, 10**400])
def test_an_allowed_length_beyond_every_sequence_punishes_nothing(allowed_length):
    tokens = [1, 2] * 20
    assert not Dry(1.0, 1.75, allowed_length)(tokens, zeros()).any()
    assert Dry(1.0, 1.75, 30)(tokens, zeros()).any()


def test_a_very_long_repetition_forbids_without_overflow():
    with np.errstate(all="raise"):
        found = Dry(5.0, 1e300)([1] * 3000, zeros())
        assert np.isfinite(found).all() and found[1] <= -1e8
        assert Dry(0.8)([1] * 3000, zeros())[1] <= -1e8
        assert Dry(0.8, 1.0)([1] * 3000, zeros())[1] == np.float32(-0.8)


@given(tokens=SEQUENCES, cuts=st.lists(st.integers(1, 50), max_size=5), branching=st.booleans())
@settings(max_examples=60, deadline=None)
def test_growth_in_steps_of_any_size_changes_nothing(tokens, cuts, branching):
    grown = Dry(0.8, branching=branching)
    for cut in sorted(cuts):
        grown(tokens[:cut], zeros())
    np.testing.assert_array_equal(grown(tokens, zeros()), Dry(0.8)(tokens, zeros()))


@given(sequences=st.lists(SEQUENCES, min_size=2, max_size=5))
@settings(max_examples=60, deadline=None)
def test_branches_are_kept_apart(sequences):
    branching = Dry(0.8, branching=True)
    for tokens in sequences:
        np.testing.assert_array_equal(branching(tokens, zeros()), Dry(0.8)(tokens, zeros()))
