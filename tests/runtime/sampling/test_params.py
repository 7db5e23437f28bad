import math
from typing import Any

import pytest

from llmc.bundle import Generation
from llmc.errors import UsageError
from llmc.runtime.sampling import SamplingParams

GREEDY_CHECKPOINT = Generation((2,), 1, False, None, None, None, None)
SAMPLING_CHECKPOINT = Generation((2,), 1, True, 0.7, 20, 0.8, 0.05)


class TestParams:
    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("max_tokens", 0, "an integer of at least 1"),
            ("max_tokens", 2.0, "an integer of at least 1"),
            ("max_tokens", True, "an integer of at least 1"),
            ("temperature", -1.0, "a number of at least 0"),
            ("temperature", math.nan, "a number of at least 0"),
            ("temperature", math.inf, "a number of at least 0"),
            ("temperature", "1", "a number of at least 0"),
            ("temperature", False, "a number of at least 0"),
            ("temperature", None, "a number of at least 0"),
            ("top_k", -1, "an integer of at least 0 (0 keeps all)"),
            ("top_k", 1.5, "an integer of at least 0 (0 keeps all)"),
            ("top_p", 0, "a number above 0 and at most 1"),
            ("top_p", 1.01, "a number above 0 and at most 1"),
            ("top_p", math.nan, "a number above 0 and at most 1"),
            ("min_p", -0.1, "a number from 0 to 1"),
            ("min_p", 1.1, "a number from 0 to 1"),
            ("min_p", math.nan, "a number from 0 to 1"),
            ("seed", -1, "an integer from 0 to 2**64 - 1, or None"),
            ("seed", 2**64, "an integer from 0 to 2**64 - 1, or None"),
            ("seed", 1.0, "an integer from 0 to 2**64 - 1, or None"),
            ("stop", "end", "a tuple of non-empty strings"),
            ("stop", ("",), "a tuple of non-empty strings"),
            ("stop", (3,), "a tuple of non-empty strings"),
            ("stop_token_ids", [1], "a tuple of token ids"),
            ("stop_token_ids", (-1,), "a tuple of token ids"),
            ("ignore_eos", 1, "True or False"),
        ],
    )
    def test_out_of_range_are_refused(self, name: str, value: Any, expected: str) -> None:
        with pytest.raises(UsageError) as caught:
            SamplingParams(**{name: value})
        assert str(caught.value) == f"{name} is {value!r}, expected {expected}"

    def test_at_the_edges_are_accepted(self) -> None:
        SamplingParams(1, 0, 0, 1, 0, 0, (), (), True)
        SamplingParams(1, 1e30, 10**9, 1e-9, 1, 2**64 - 1, ("a", "b"), (0, 5))

    def test_left_out_come_from_the_checkpoint(self) -> None:
        assert SamplingParams.from_defaults(SAMPLING_CHECKPOINT) == SamplingParams(256, 0.7, 20, 0.8, 0.05)
        assert SamplingParams.from_defaults(SAMPLING_CHECKPOINT, top_k=0, seed=None) == SamplingParams(
            256, 0.7, 0, 0.8, 0.05
        )

    def test_of_a_greedy_checkpoint_are_greedy_unless_sampling_is_asked_for(self) -> None:
        assert SamplingParams.from_defaults(GREEDY_CHECKPOINT, max_tokens=5) == SamplingParams(5, 0.0)
        assert SamplingParams.from_defaults(GREEDY_CHECKPOINT, top_p=0.5) == SamplingParams(top_p=0.5)

    def test_stop_may_be_one_text_or_a_list(self) -> None:
        assert SamplingParams.from_defaults(GREEDY_CHECKPOINT, stop="end").stop == ("end",)
        assert SamplingParams.from_defaults(GREEDY_CHECKPOINT, stop=["a", "b"], stop_token_ids=[3]).stop_token_ids == (
            3,
        )

    def test_unknown_names_are_refused_with_the_nearest_one(self) -> None:
        with pytest.raises(UsageError, match="unknown sampling parameter 'temprature'; did you mean temperature"):
            SamplingParams.from_defaults(GREEDY_CHECKPOINT, temprature=1.0)
        with pytest.raises(
            UsageError, match="unknown sampling parameter 'zzz'; expected one of max_tokens, temperature"
        ):
            SamplingParams.from_defaults(GREEDY_CHECKPOINT, zzz=1.0)
