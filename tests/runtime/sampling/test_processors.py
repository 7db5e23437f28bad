import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import GrammarError, NonFiniteError, ProcessorError, RequestError
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.penalties import BadWords
from llmc.runtime.sampling.processors import SamplingContext, build_processors
from llmc.runtime.sampling.samplers import make_sampler

SIZE = 60
EOS = (7, 9)
# Both add float32 numbers of a size of 100.
BIAS_TOLERANCE = 1e-5


def random_logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 3.0, SIZE).astype(np.float32)


def processed(params: dict[str, Any], tokens: Sequence[int], prompt_length: int = 0, **more: Any) -> np.ndarray:
    """What the steps before the grammar make of the logits."""
    logits = random_logits()
    for step in build_processors(SamplingContext(SamplingParams(**params), SIZE, prompt_length, EOS, **more)):
        logits = step(tokens, logits)
    return logits


def of_transformers(name: str, tokens: Sequence[int], *args: Any) -> np.ndarray:
    import torch
    from transformers.generation import logits_process

    processor = getattr(logits_process, name)(*args)
    result: np.ndarray = processor(torch.tensor([list(tokens)]), torch.from_numpy(random_logits())[None])[0].numpy()
    return result


class TestTokens:
    def test_biased_equal_transformers(self):
        biases = {3: 2.5, 50: -100.0, 4: 0.125}
        expected = of_transformers("SequenceBiasLogitsProcessor", [1, 2], {(t,): b for t, b in biases.items()})
        found = processed({"logit_bias": tuple(biases.items())}, [1, 2])
        np.testing.assert_allclose(found, expected, atol=BIAS_TOLERANCE)

    def test_biased_otherwise_fail_that_check(self):
        expected = of_transformers("SequenceBiasLogitsProcessor", [1, 2], {(3,): 2.5})
        found = processed({"logit_bias": ((3, 2.4999),)}, [1, 2])
        assert np.abs(found - expected).max() > BIAS_TOLERANCE

    def test_banned_equal_transformers(self):
        expected = of_transformers("SuppressTokensLogitsProcessor", [1], [3, 5])
        np.testing.assert_array_equal(processed({"banned_tokens": (3, 5, 3)}, [1]), expected)

    def test_allowed_equal_transformers(self):
        expected = of_transformers("PrefixConstrainedLogitsProcessor", [1], lambda batch, ids: [3, 5, 11], 1)
        np.testing.assert_array_equal(processed({"allowed_tokens": (11, 3, 5)}, [1]), expected)

    def test_allowed_and_banned_are_forbidden(self):
        found = processed({"allowed_tokens": (11, 3, 5), "banned_tokens": (3, 4)}, [1])
        assert np.flatnonzero(found > -np.inf).tolist() == [5, 11]

    @pytest.mark.parametrize("length", [2, 4, 5, 6, 9])
    def test_that_end_the_output_too_early_equal_transformers(self, length):
        tokens = [1] * length
        expected = of_transformers("MinNewTokensLengthLogitsProcessor", tokens, 2, 3, [*EOS, 12])
        found = processed({"min_tokens": 3, "stop_token_ids": (12,)}, tokens, prompt_length=2)
        np.testing.assert_array_equal(found, expected)

    def test_that_end_the_output_may_come_early_if_they_do_not_end_it(self):
        found = processed({"min_tokens": 3, "stop_token_ids": (12,), "ignore_eos": True}, [1])
        assert np.flatnonzero(found == -np.inf).tolist() == [12]


TOKENS = st.lists(st.integers(0, 4), max_size=8)
SEQUENCES = st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple)


class TestSequences:
    @given(tokens=TOKENS.filter(bool), words=st.lists(SEQUENCES, min_size=1, max_size=12))
    @settings(max_examples=30, deadline=None)
    def test_forbidden_equal_transformers(self, tokens, words):
        expected = of_transformers("NoBadWordsLogitsProcessor", tokens, [list(word) for word in words])
        np.testing.assert_array_equal(processed({}, tokens, bad_words=words), expected)

    def test_come_with_bans_and_allowed_tokens_of_single_tokens(self):
        found = processed({"banned_tokens": (6,), "allowed_tokens": (4, 5, 6)}, [0, 1], bad_words=[(1, 4)])
        assert np.flatnonzero(found > -np.inf).tolist() == [5]

    def test_start_where_there_is_no_token_yet(self):
        assert np.flatnonzero(np.isinf(processed({}, [], bad_words=[(3,), (1, 4)]))).tolist() == [3]

    def test_of_branches_depend_on_nothing_that_was_seen_before(self):
        step = BadWords([(1, 2, 3)])
        for tokens, forbidden in (([1, 2], [3]), ([1, 1], []), ([2], []), ([0, 1, 2], [3])):
            assert np.flatnonzero(np.isinf(step(tokens, random_logits()))).tolist() == forbidden


class TestOwnProcessors:
    def test_run_in_order_with_the_tokens_so_far(self):
        seen: list[tuple[int, ...]] = []

        def note(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
            seen.append(tuple(tokens))
            return logits

        def only_five(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
            result = np.full_like(logits, -np.inf)
            result[5] = 1.0
            return result

        def rather_six(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
            logits[6] = logits[5] + 1
            return logits

        processors = [note, only_five, rather_six]
        sampler = make_sampler(
            SamplingContext(SamplingParams(temperature=0), SIZE, prompt_length=0, processors=processors)
        )
        assert [sampler(random_logits(), tokens).token for tokens in ([1, 2], [1, 2, 6])] == [6, 6]
        assert seen == [(1, 2), (1, 2, 6)]

    def test_cannot_reach_the_tokens_or_the_logits_of_the_caller(self):
        kept = np.full(SIZE, 2.0, np.float32)

        def greedy_writer(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
            assert not hasattr(tokens, "append")
            logits[:] = 0.0
            return kept

        logits, tokens = random_logits(), [1, 2]
        params = SamplingParams(temperature=0.5, top_p=0.5)
        make_sampler(SamplingContext(params, SIZE, prompt_length=0, processors=[greedy_writer]))(logits, tokens)
        np.testing.assert_array_equal(logits, random_logits())
        np.testing.assert_array_equal(kept, np.full(SIZE, 2.0, np.float32))

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (None, r"returned NoneType, expected float32 \[60\]"),
            (np.zeros(SIZE, np.float64), r"returned float64 \[60\], expected float32 \[60\]"),
            (np.zeros(SIZE + 1, np.float32), r"returned float32 \[61\], expected float32 \[60\]"),
            (np.zeros((1, SIZE), np.float32), r"returned float32 \[1, 60\], expected"),
            (np.full(SIZE, np.nan, np.float32), "returned NaN, expected at least one finite logit"),
            (np.append(np.zeros(SIZE - 1, np.float32), np.float32(math.nan)), "returned NaN"),
            (np.append(np.zeros(SIZE - 1, np.float32), np.float32(math.inf)), r"returned \+inf"),
            (np.full(SIZE, -np.inf, np.float32), "returned nothing but -inf"),
        ],
        ids=str,
    )
    def test_that_return_nonsense_are_named(self, result, message):
        def broken(tokens: Sequence[int], logits: np.ndarray) -> Any:
            return result

        for params in ({"temperature": 0.0}, {"top_p": 0.9}, {"top_n_sigma": 0.5}):
            sampler = make_sampler(
                SamplingContext(SamplingParams(**params), SIZE, prompt_length=0, processors=[broken])
            )
            with pytest.raises(ProcessorError, match=rf"processor .*broken at position 2 {message}"):
                sampler(random_logits(), [1, 2])

    def test_that_raise_are_named_with_their_error(self):
        class Broken:
            def __call__(self, tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
                raise KeyError("no such state")

        sampler = make_sampler(SamplingContext(SamplingParams(), SIZE, prompt_length=0, processors=[Broken()]))
        with pytest.raises(ProcessorError, match="Broken at position 1 raised KeyError: 'no such state'") as caught:
            sampler(random_logits(), [1])
        assert isinstance(caught.value.__cause__, KeyError)

    @pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
    def test_that_would_end_the_process_only_end_the_request(self, error):
        def broken(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
            raise error

        sampler = make_sampler(SamplingContext(SamplingParams(), SIZE, prompt_length=0, processors=[broken]))
        with pytest.raises(ProcessorError, match=f"broken at position 1 raised {error.__name__}; correct it"):
            sampler(random_logits(), [1])

    def test_may_make_their_own_array_read_only(self):
        def freeze(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
            logits[5] = 100
            logits.flags.writeable = False
            return logits

        def rather_six(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
            logits[6] = logits[5] + 1
            return logits

        params = SamplingParams(temperature=0.5, top_p=0.5)
        sampler = make_sampler(SamplingContext(params, SIZE, prompt_length=0, processors=[freeze, rather_six, freeze]))
        assert sampler(random_logits(), [1]).token == 6

    @pytest.mark.parametrize("change", ["shape", "dtype", "base"])
    def test_that_change_what_the_logits_are_are_named(self, change):
        def broken(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
            if change == "base":
                assert logits.base is not None
                logits.base.flags.writeable = False
            else:
                setattr(logits, change, {"shape": (1, SIZE), "dtype": np.int32}[change])
            return logits

        sampler = make_sampler(
            SamplingContext(SamplingParams(temperature=0.5), SIZE, prompt_length=0, processors=[broken])
        )
        message = "made the logits read-only" if change == "base" else r"returned (float32 \[1, 60\]|int32)"
        with pytest.raises(ProcessorError, match=f"broken at position 1 {message}"):
            sampler(random_logits(), [1])

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_are_not_blamed_for_the_model(self, value):
        logits = random_logits()
        logits[4] = value
        sampler = make_sampler(
            SamplingContext(SamplingParams(), SIZE, prompt_length=0, processors=[lambda tokens, logits: logits])
        )
        with pytest.raises(NonFiniteError, match="the model's logits hold"):
            sampler(logits, [1])


class OnlyTokens:
    """A guide that allows a set of tokens, and remembers what it accepted."""

    finished = False

    def __init__(self, *allowed: int) -> None:
        self._allowed = list(allowed)
        self.accepted: list[int] = []

    def mask(self, logits: np.ndarray) -> np.ndarray:
        result = np.full_like(logits, -np.inf)
        result[self._allowed] = logits[self._allowed]
        return result

    def accept(self, token: int) -> None:
        self.accepted.append(token)


class TestGuide:
    @pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 1}, {"top_p": 0.2}, {"xtc_probability": 1.0}])
    def test_has_the_last_word_on_what_is_allowed(self, params):
        def flood(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
            return np.where(np.arange(SIZE) == 3, np.float32(30), logits)

        guide = OnlyTokens(5, 8, 13)
        sampler = make_sampler(
            SamplingContext(SamplingParams(**params, seed=1), SIZE, prompt_length=0, processors=[flood], guide=guide)
        )
        tokens: list[int] = []
        for position in range(60):
            tokens.append(sampler(random_logits(position), tokens).token)
        assert guide.accepted == tokens and set(tokens) <= {5, 8, 13}

    def test_that_leaves_nothing_fails(self):
        for params in ({"banned_tokens": (5,)}, {"allowed_tokens": (6, 7)}):
            sampler = make_sampler(
                SamplingContext(SamplingParams(**params), SIZE, prompt_length=0, guide=OnlyTokens(5))
            )
            with pytest.raises(GrammarError, match="leaves no token at position 3"):
                sampler(random_logits(), [1, 2, 3])

    def test_is_told_nothing_when_the_step_fails(self):
        guide = OnlyTokens(5)
        sampler = make_sampler(SamplingContext(SamplingParams(), SIZE, prompt_length=0, guide=guide))
        with pytest.raises(RequestError, match="the model's logits are all -inf"):
            sampler(np.full(SIZE, -np.inf, np.float32), [1])
        assert guide.accepted == []


def test_settings_that_leave_no_token_are_named():
    logits = np.full(SIZE, -np.inf, np.float32)
    logits[EOS[0]] = 1.0
    for params in ({"temperature": 0}, {"top_p": 0.5}, {"top_n_sigma": 0.5}):
        sampler = make_sampler(
            SamplingContext(SamplingParams(min_tokens=2, **params), SIZE, prompt_length=1, eos_token_ids=EOS)
        )
        with pytest.raises(RequestError, match=r"min_tokens.* leave no token at position 2; loosen"):
            sampler(logits, [1, 2])
        assert sampler(logits, [1, 2, 3]).token == EOS[0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "repetition_penalty": 1.5},
        {"top_p": 0.9, "frequency_penalty": 1.0, "logit_bias": ((3, 4.0),)},
        {"top_n_sigma": 0.5, "temperature": 0.3},
        {"allowed_tokens": (1, 2, 3), "logprobs": 3},
    ],
    ids=str,
)
def test_the_callers_logits_stay_as_they_are(params):
    logits = random_logits()
    logits.flags.writeable = False
    make_sampler(SamplingContext(SamplingParams(**params), SIZE, prompt_length=0))(logits, [1, 2, 3, 1, 2])
    np.testing.assert_array_equal(logits, random_logits())


def test_processors_for_searches_may_switch_between_sequences():
    params = SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.5, dry_multiplier=0.8, no_repeat_ngram_size=2, num_beams=2
    )
    shared = build_processors(SamplingContext(params, SIZE, 1))
    assert len(shared) == 4
    for tokens in ([1, 2, 3, 1], [1, 2, 4, 1, 2], [1, 2, 3, 1, 2], [1, 5]):
        found, expected = random_logits(), random_logits()
        for step, fresh in zip(shared, build_processors(SamplingContext(params, SIZE, 1)), strict=True):
            found, expected = step(tokens, found), fresh(tokens, expected)
        np.testing.assert_array_equal(found, expected)


def test_sequences_of_one_request_draw_differently_and_repeatably():
    def draws(seed: int, index: int) -> list[int]:
        sampler = make_sampler(SamplingContext(SamplingParams(seed=seed), SIZE, prompt_length=0), index)
        return [sampler(np.zeros(SIZE, np.float32), [0] * position).token for position in range(20)]

    assert draws(4, 2) == draws(6, 0) != draws(4, 0)
    assert draws(2**64 - 1, 1) == draws(0, 0)
