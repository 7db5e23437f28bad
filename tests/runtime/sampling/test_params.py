import math
from dataclasses import fields, replace

import numpy as np
import pytest
from doubles.refusals import about

from llmc.bundle import Generation
from llmc.errors import UsageError, format_value
from llmc.runtime.sampling.params import PARAMETERS, SamplingParams

GREEDY_CHECKPOINT = Generation((2,), 1, False, None, None, None, None)
SAMPLING_CHECKPOINT = Generation((2,), 1, True, 0.7, 20, 0.8, 0.05)
PENALTIES = {"repetition_penalty": 1.05, "no_repeat_ngram_size": 4, "banned_tokens": (7, 8), "bad_words": ((3, 4),)}
PENALIZING_CHECKPOINT = replace(SAMPLING_CHECKPOINT, typical_p=0.9, min_tokens=9, **PENALTIES)


class TestParams:
    def test_at_the_edges_are_accepted(self):
        SamplingParams(1, 0, 0, 1, 0, 0, (), (), True)
        SamplingParams(1, 1e30, 10**9, 1e-9, 1, 2**64 - 1, ("a", "b"), (0, 5))

    def test_left_out_come_from_the_checkpoint(self):
        assert SamplingParams.from_defaults(SAMPLING_CHECKPOINT) == SamplingParams(256, 0.7, 20, 0.8, 0.05)
        assert SamplingParams.from_defaults(SAMPLING_CHECKPOINT, top_k=0, seed=None) == SamplingParams(
            256, 0.7, 0, 0.8, 0.05
        )

    def test_of_a_greedy_checkpoint_are_greedy_unless_sampling_is_asked_for(self):
        assert SamplingParams.from_defaults(GREEDY_CHECKPOINT, max_tokens=5) == SamplingParams(5, 0.0)
        assert SamplingParams.from_defaults(GREEDY_CHECKPOINT, top_p=0.5) == SamplingParams(top_p=0.5)

    def test_stop_may_be_one_text_or_a_list(self):
        assert SamplingParams.from_defaults(GREEDY_CHECKPOINT, stop="end").stop == ("end",)
        assert SamplingParams.from_defaults(GREEDY_CHECKPOINT, stop=["a", "b"], stop_token_ids=[3]).stop_token_ids == (
            3,
        )

    def test_unknown_names_are_refused_with_the_nearest_one(self):
        with pytest.raises(UsageError, match="temprature is no sampling parameter; did you mean temperature"):
            SamplingParams.from_defaults(GREEDY_CHECKPOINT, temprature=1.0)
        with pytest.raises(UsageError, match="zzz is no sampling parameter; expected one of max_tokens, temperature"):
            SamplingParams.from_defaults(GREEDY_CHECKPOINT, zzz=1.0)


class TestRanges:
    @pytest.mark.threat("parameter-bounds")
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("max_tokens", 0),
            ("max_tokens", True),
            ("temperature", -1.0),
            ("temperature", math.nan),
            ("top_k", -1),
            ("top_p", 0),
            ("top_p", 1.01),
            ("min_p", 1.1),
            ("seed", -1),
            ("seed", 2**64),
            ("stop", "end"),
            ("stop", ("",)),
            ("stop_token_ids", [1]),
            ("stop_token_ids", (-1,)),
            ("ignore_eos", 1),
            ("min_tokens", -1),
            ("typical_p", 0),
            ("mirostat", 3),
            ("mirostat", True),
            ("mirostat_tau", 0),
            ("mirostat_eta", 1.5),
            ("top_n_sigma", math.inf),
            ("xtc_threshold", -0.1),
            ("repetition_penalty", 0),
            ("presence_penalty", 2.1),
            ("dry_multiplier", -1),
            ("dry_allowed_length", 0),
            ("dry_sequence_breakers", ["x"]),
            ("dry_sequence_breakers", tuple(map(str, range(200_000)))),
            ("stop", tuple(map(str, range(129)))),
            ("stop", ("x" * 8193,)),
            ("bad_words", ("x",) * 1025),
            ("bad_words", "x"),
            ("bad_words", ("x", ())),
            ("bad_words", ((1, -1),)),
            ("bad_words", ([1],)),
            ("bad_words", ((1,) * 8193,)),
            ("include_stop_str_in_output", 1),
            ("detokenize", None),
            ("no_repeat_ngram_size", -1),
            ("logit_bias", {1: 2.0}),
            ("logit_bias", ((1, 101.0),)),
            ("logit_bias", ((1, 1.0), (1, 2.0))),
            ("logit_bias", ((-1, 1.0),)),
            ("banned_tokens", (5,) * (2**18 + 1)),
            ("allowed_tokens", ()),
            ("logprobs", 21),
            ("n", 1025),
            ("best_of", 1025),
            ("temperature", 10**400),
            ("length_penalty", -(10**400)),
            ("early_stopping", "always"),
            ("consensus", "bleu"),
            ("json_schema", ""),
            ("regex", ""),
            ("choice", ()),
            ("on_overflow", "wrap"),
            ("speculate", 1),
        ],
    )
    def test_are_enforced_by_name(self, name, value):
        with pytest.raises(UsageError) as caught:
            SamplingParams(**{name: value})
        assert str(caught.value) == f"{name} is {format_value(value)}, expected {PARAMETERS[name].range.expected}"
        assert len(str(caught.value)) < 600

    @pytest.mark.threat("parameter-bounds")
    @pytest.mark.parametrize("name", ["temperature", "n", "seed", "top_p", "logprobs", "max_tokens", "min_tokens"])
    def test_of_integers_too_long_to_write_are_enforced(self, name):
        with pytest.raises(UsageError, match=f"{name} is an integer of about 5001 digits, expected"):
            SamplingParams(**{name: 10**5000})

    @pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
    def test_of_arrays_are_enforced(self, name):
        for value in (np.array([1, 2]), np.zeros(0), (np.array([1, 2]),), np.float32(0.5)):
            with pytest.raises(UsageError, check=about(name)) as refused:
                SamplingParams(**{name: value})
            with pytest.raises(UsageError, check=about(name)):
                SamplingParams.from_defaults(GREEDY_CHECKPOINT, **{name: value})
            assert refused.value.problem == f"is {format_value(value)}, expected {PARAMETERS[name].range.expected}"

    def test_exist_for_every_parameter(self):
        assert list(PARAMETERS) == [field.name for field in fields(SamplingParams)]

    @pytest.mark.parametrize("field", fields(SamplingParams), ids=lambda field: field.name)
    def test_hold_the_defaults(self, field):
        assert PARAMETERS[field.name].range.holds(field.default)


class TestCombinations:
    @pytest.mark.threat("many-samples")
    @pytest.mark.parametrize(
        ("params", "name"),
        [
            ({"num_beams": 2, "n": 2}, "n"),
            ({"num_beams": 2, "best_of": 2}, "best_of"),
            ({"num_beams": 2, "top_p": 0.9}, "top_p"),
            ({"num_beams": 2, "top_k": 5}, "top_k"),
            ({"num_beams": 2, "stop": ("x",)}, "stop"),
            ({"num_beams": 2, "regex": "a*"}, "regex"),
            ({"num_beams": 2, "logprobs": 0}, "logprobs"),
            ({"num_beams": 2, "on_overflow": "sink"}, "on_overflow"),
            ({"num_beams": 2, "temperature": 0.7}, "temperature"),
            ({"num_beams": 2, "speculate": True}, "speculate"),
            ({"num_beams": 2, "typical_p": 0.9}, "typical_p"),
            ({"num_beams": 2, "mirostat": 2}, "mirostat"),
            ({"mirostat": 1, "top_k": 40}, "top_k"),
            ({"mirostat": 2, "typical_p": 0.9}, "typical_p"),
            ({"mirostat": 2, "temperature": 0}, "mirostat"),
            ({"mirostat_tau": 3.0}, "mirostat_tau"),
            ({"mirostat_eta": 0.2}, "mirostat_eta"),
            ({"regex": "a", "choice": ("a",)}, "regex"),
            ({"n": 3, "best_of": 2}, "best_of"),
            ({"n": 2, "temperature": 0}, "n"),
            ({"consensus": "f1"}, "consensus"),
            ({"consensus": "f1", "n": 3, "best_of": 5}, "best_of"),
            ({"consensus": "f1", "n": 65}, "consensus"),
            ({"consensus": "f1", "n": 2, "detokenize": False}, "consensus"),
            ({"stop": ("x",), "detokenize": False}, "stop"),
            ({"include_stop_str_in_output": True, "detokenize": False}, "include_stop_str_in_output"),
            ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
            ({"allowed_tokens": (1, 2), "banned_tokens": (2, 1, 3)}, "allowed_tokens"),
            ({"length_penalty": 2.0}, "length_penalty"),
            ({"early_stopping": True}, "early_stopping"),
            ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
        ],
        ids=str,
    )
    def test_that_contradict_are_refused_by_name(self, params, name):
        with pytest.raises(UsageError, check=about(name)):
            SamplingParams(**params)

    @pytest.mark.parametrize(
        "params",
        [
            {
                "num_beams": 4,
                "num_return_sequences": 4,
                "length_penalty": -1.0,
                "early_stopping": "never",
                "repetition_penalty": 1.2,
                "no_repeat_ngram_size": 3,
                "min_tokens": 2,
                "temperature": 0.0,
            },
            {"temperature": 0.7, "repetition_penalty": 1.2, "n": 2, "regex": "a+"},
            {"n": 4, "consensus": "chrf", "top_p": 0.9, "json_schema": {"type": "object"}},
            {"n": 2, "best_of": 4, "logprobs": 5, "speculate": True},
            {"n": 2, "mirostat": 2, "mirostat_tau": 3.0, "temperature": 0.7, "regex": "a+", "speculate": True},
            {"temperature": 0, "top_p": 0.5, "grammar": "start: 'a'"},
            {"num_beams": 2, "bad_words": ("x",), "detokenize": False},
            {"num_beams": 2, "include_stop_str_in_output": True, "stop_token_ids": (3,)},
            {"regex": "a", "bad_words": ("x",), "detokenize": False, "speculate": True, "n": 1024},
        ],
        ids=str,
    )
    def test_that_make_sense_are_accepted(self, params):
        assert SamplingParams(**params).max_tokens == 256


class TestDefaults:
    @pytest.mark.parametrize("asked", [{"n": 2}, {"best_of": 2}, {"xtc_probability": 0.5}], ids=str)
    def test_of_a_greedy_checkpoint_give_way_to_what_only_sampling_can_give(self, asked):
        assert SamplingParams.from_defaults(GREEDY_CHECKPOINT, **asked) == SamplingParams(**asked)

    def test_of_a_greedy_checkpoint_stay_for_what_is_neutral(self):
        assert SamplingParams.from_defaults(GREEDY_CHECKPOINT, n=1, top_n_sigma=0.0).temperature == 0

    @pytest.mark.parametrize("asked", [{"num_beams": 2}], ids=str)
    def test_to_sample_are_left_out_of_searches(self, asked):
        assert SamplingParams.from_defaults(SAMPLING_CHECKPOINT, **asked) == SamplingParams(**asked)

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            ({"max_tokens": 20}, {"min_tokens": 9, "temperature": 0.7, "top_k": 20, "typical_p": 0.9}),
            ({"max_tokens": 5}, {"min_tokens": 5, "temperature": 0.7, "top_k": 20, "typical_p": 0.9}),
            ({"max_tokens": 20, "num_beams": 2}, {"min_tokens": 9, "temperature": 1.0, "top_k": 0, "typical_p": 1.0}),
            ({"max_tokens": 20, "mirostat": 2}, {"min_tokens": 9, "temperature": 0.7, "top_k": 0, "typical_p": 1.0}),
            ({"max_tokens": 20, "repetition_penalty": 1.0, "banned_tokens": [], "min_tokens": 0}, {"min_tokens": 0}),
            ({"max_tokens": 20, "allowed_tokens": [7]}, {"banned_tokens": (), "allowed_tokens": (7,)}),
        ],
        ids=str,
    )
    def test_of_penalties_and_bans_count_beside_what_is_asked_for(self, asked, expected):
        found = SamplingParams.from_defaults(PENALIZING_CHECKPOINT, **asked)
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()}
        expected = {**PENALTIES, **given, **expected}
        assert {name: getattr(found, name) for name in expected} == expected

    def test_of_penalties_count_for_greedy_requests(self):
        for found in (
            SamplingParams.from_defaults(replace(GREEDY_CHECKPOINT, **PENALTIES)),
            SamplingParams.from_defaults(PENALIZING_CHECKPOINT, temperature=0, max_tokens=20),
        ):
            assert (found.temperature, found.repetition_penalty, found.bad_words) == (0, 1.05, ((3, 4),))

    @pytest.mark.parametrize("name", ["typical_p", "top_p"])
    def test_of_a_greedy_checkpoint_give_way_to_a_cut_that_is_named(self, name):
        assert SamplingParams.from_defaults(GREEDY_CHECKPOINT, **{name: 1.0}).temperature == 1

    def test_take_lists_and_mappings_for_tuples(self):
        found = SamplingParams.from_defaults(
            GREEDY_CHECKPOINT,
            logit_bias={5: -100, 7: 1.5},
            banned_tokens=[1],
            allowed_tokens=[2, 3],
            choice=["a", "b"],
            dry_sequence_breakers=["."],
            bad_words=["x", [1, 2]],
        )
        assert found.bad_words == ("x", (1, 2))
        assert found.logit_bias == ((5, -100), (7, 1.5))
        assert (found.banned_tokens, found.allowed_tokens, found.choice) == ((1,), (2, 3), ("a", "b"))
        assert found.dry_sequence_breakers == (".",)
        assert SamplingParams.from_defaults(GREEDY_CHECKPOINT, logit_bias=[[5, 1.0]]).logit_bias == ((5, 1.0),)
