"""From a request to its state: what is filled in, and what is refused before it waits."""

from dataclasses import replace
from typing import Any

import pytest

from llmc.errors import RequestError, UsageError
from llmc.runtime.api.handle import OutputCollector
from llmc.runtime.api.request import Request
from llmc.runtime.engine.input_processor import InputProcessor, draws
from llmc.runtime.observe.metrics import EngineMetrics
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sessions.adapters import Adapters

IDS = list(range(10, 20))
VOCAB = 4096


@pytest.fixture
def inputs(served: Any, tiny_tokenizer: Any) -> InputProcessor:
    return InputProcessor(served, tiny_tokenizer, 64, 4, Adapters(served, lambda: None))


def state(inputs: InputProcessor, prompt: Any = IDS, *, max_tokens: int = 4, request: Any = None, **params: Any) -> Any:
    asked = Request(prompt, SamplingParams(max_tokens=max_tokens, **params), **(request or {}))
    return inputs.process(asked, OutputCollector(), EngineMetrics())


@pytest.mark.parametrize(("params", "chance"), [({}, True), ({"temperature": 0.0}, False), ({"num_beams": 2}, False)])
def test_a_seed_is_taken_where_anything_is_left_to_chance(inputs, params, chance):
    made = state(inputs, **params)
    assert draws(made.request.params) is chance
    assert (made.params.seed is not None) is chance
    assert made.params == replace(made.request.params, seed=made.params.seed)
    assert not chance or state(inputs, **params).params.seed != made.params.seed


@pytest.mark.parametrize(
    ("params", "rows", "samples"),
    [({}, 1, 1), ({"n": 3}, 1, 3), ({"n": 2, "best_of": 5}, 1, 5), ({"num_beams": 4}, 4, 1)],
)
def test_rows_are_what_must_run_at_once_and_samples_may_follow(inputs, params, rows, samples):
    made = state(inputs, **params)
    assert (made.group.width, getattr(made.group, "draws", 1)) == (rows, samples)


@pytest.mark.parametrize(
    ("params", "more", "message"),
    [
        ({"speculate": True}, {}, "speculate is True, but the engine has no drafts"),
        ({"banned_tokens": (5000,)}, {}, r"banned_tokens holds token id 5000, .* expected 0 \.\.\. 4095"),
        ({"allowed_tokens": (4096,)}, {}, "allowed_tokens holds token id 4096"),
        ({"logit_bias": ((4096, 1.0),)}, {}, "logit_bias holds token id 4096"),
        ({"banned_tokens": (10**5000,)}, {}, "banned_tokens is .an integer of about 5001 digits., expected"),
    ],
)
def test_what_the_parts_of_a_request_cannot_have_together_is_refused_at_the_door(inputs, params, more, message):
    with pytest.raises(UsageError, match=message):
        state(inputs, request=more, **params)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**70])
def test_a_token_outside_the_vocabulary_is_refused_by_name(inputs, token):
    with pytest.raises(UsageError, match=rf"prompt holds token id {token}, .* expected 0 \.\.\. {VOCAB - 1}"):
        state(inputs, [5, token, 6])


def test_new_tokens_beyond_every_number_are_refused_in_a_short_sentence(inputs):
    with pytest.raises(RequestError, match="18446744073709551615 new ones are asked for") as caught:
        state(inputs, max_tokens=(1 << 64) - 1)
    assert len(str(caught.value)) < 400


@pytest.mark.threat("bad-words")
def test_bad_words_are_forbidden_with_and_without_a_space_before_them(inputs, tiny_tokenizer):
    made = inputs._bad_words(SamplingParams(bad_words=(" return", "x y", "  ")))
    wanted = ["return", " return", "x y", " x y", " "]
    assert made == [tiny_tokenizer.encode(text, add_special_tokens=False) for text in wanted]


def test_bad_words_may_be_token_ids_of_the_vocabulary(inputs, tiny_tokenizer):
    made = inputs._bad_words(SamplingParams(bad_words=((7, 8), "x", (5,))))
    assert made == [*(tiny_tokenizer.encode(text, add_special_tokens=False) for text in ("x", " x")), [7, 8], [5]]
    with pytest.raises(UsageError, match="bad_words holds token id 4096, which is out of range"):
        state(inputs, bad_words=((7, 4096),))
