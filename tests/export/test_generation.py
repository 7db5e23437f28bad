"""Defaults of generation_config.json: as transformers' generate follows them, and nothing left out in silence."""

import json
from functools import cache
from typing import Any

import pytest

from llmc.bundle import Generation
from llmc.export.keys import Keys
from llmc.export.sources.generation import read_generation
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import SamplingContext
from llmc.runtime.sampling.samplers import make_sampler

VOCAB, NEW_TOKENS = 40, 24
PROMPT = [5, 9, 5, 7]
EOS = 2
OTHERS = [0, 1, *range(3, VOCAB - 2)]  # what leaves the end and two tokens


def read(values: dict[str, Any]) -> tuple[Generation, list[str]]:
    return read_generation(Keys(values, "folder/generation_config.json"), VOCAB, (EOS,), None)


@cache
def make_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)  # whose answers do not end at once
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, **shape, bos_token_id=None, eos_token_id=EOS, initializer_range=0.5)
    return LlamaForCausalLM(config).eval()


def by_transformers(values: dict[str, Any], **asked: Any) -> list[int]:
    import torch
    from transformers import GenerationConfig

    always = {"eos_token_id": EOS, "pad_token_id": 0, "do_sample": False, "max_new_tokens": NEW_TOKENS}
    inputs = torch.tensor([PROMPT])
    config = GenerationConfig(**{**always, **values, **asked})
    output = make_model().generate(inputs, generation_config=config, attention_mask=torch.ones_like(inputs))
    return [int(token) for token in output[0, len(PROMPT) :]]


def by_llmc(values: dict[str, Any], **asked: Any) -> list[int]:
    """The tokens that llmc chooses from the same model's logits with the defaults of such a file."""
    import torch

    params = SamplingParams.from_defaults(read(values)[0], max_tokens=NEW_TOKENS, **asked)
    words = [list(word) for word in params.bad_words]
    sampler = make_sampler(SamplingContext(params, VOCAB, len(PROMPT), (EOS,), bad_words=words))
    tokens = [*PROMPT]
    while len(tokens) < len(PROMPT) + NEW_TOKENS and (tokens[-1] != EOS or len(tokens) == len(PROMPT)):
        with torch.no_grad():
            logits = make_model()(torch.tensor([tokens])).logits[0, -1]
        tokens.append(sampler(logits.numpy(), tokens).token)
    return tokens[len(PROMPT) :]


def plain() -> list[int]:
    return by_transformers({})


def defaults() -> dict[str, dict[str, Any]]:
    """Defaults that change the model's answer, made from what it answers without them."""
    first, second, third = plain()[:3]
    return {
        "repetition_penalty": {"repetition_penalty": 1.3},
        "suppress_tokens": {"suppress_tokens": [first, third]},
        "bad_words_ids": {"bad_words_ids": [[first, second], [third], [EOS]]},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "min_new_tokens": {"min_new_tokens": 9, "suppress_tokens": OTHERS},
        "all": {"repetition_penalty": 1.1, "suppress_tokens": [third], "bad_words_ids": [[first]], "min_new_tokens": 3},
    }


NAMES = ("repetition_penalty", "suppress_tokens", "bad_words_ids", "no_repeat_ngram_size", "min_new_tokens", "all")


@pytest.mark.parametrize("name", NAMES)
def test_defaults_give_the_tokens_of_transformers(name):
    values = defaults()[name]
    assert by_llmc(values) == by_transformers(values) != plain() == by_llmc({})


def test_an_answer_ends_earlier_without_min_new_tokens():
    assert len(by_llmc({"suppress_tokens": OTHERS})) < 9 <= len(by_llmc(defaults()["min_new_tokens"]))


def test_a_requests_own_values_count_instead_as_in_transformers():
    values, own = {"repetition_penalty": 1.3, "suppress_tokens": [plain()[0]]}, {"repetition_penalty": 1.05}
    assert by_llmc(values, **own, banned_tokens=[]) == by_transformers(values, **own, suppress_tokens=[])
    assert by_llmc(values, repetition_penalty=1.0, banned_tokens=[]) == plain()


def test_every_key_of_transformers_is_honoured_or_noted_or_changes_no_token():
    from transformers import GenerationConfig

    known = [name for name in vars(GenerationConfig()) if name not in ("eos_token_id", "bos_token_id", "do_sample")]
    assert len(known) > 60
    plain_defaults = read({})[0]
    values = dict.fromkeys(known, 0.5) | {"top_k": 3, "min_new_tokens": 3, "no_repeat_ngram_size": 3}
    values |= {"suppress_tokens": [3], "bad_words_ids": [[3]]}
    silent = {name for name in known if not read({name: values[name]})[1]}
    honoured = {name for name in known if read({name: values[name]})[0] != plain_defaults}
    assert honoured == {
        *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size"),
        *("min_new_tokens", "suppress_tokens", "bad_words_ids"),
    }
    # How transformers computes, what it gives beside tokens, and drafts, which change no distribution.
    assert silent - honoured == {
        *("use_mtp", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "renormalize_logits"),
        *("remove_invalid_values", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        *("return_dict_in_generate", "pad_token_id", "decoder_start_token_id", "is_assistant", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens"),
        *("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
        *("speculation_type", "compile_config", "disable_compile", "continuous_batching_config", "low_memory"),
        *("prefill_chunk_size", "_from_model_config", "transformers_version"),
    }


@pytest.mark.parametrize(
    "values",
    [
        {"num_beams": 1, "length_penalty": 1.0, "guidance_scale": 1, "early_stopping": False, "diversity_penalty": 0.0},
        {"begin_suppress_tokens": [], "stop_strings": None, "unheard_of": None, "suppress_tokens": [], "min_length": 0},
    ],
    ids=str,
)
def test_neutral_values_are_not_noted(values):
    assert read(values) == read({})


def test_what_is_left_out_is_noted_by_its_name():
    values = {"num_beams": 4, "max_new_tokens": 2048, "penalty\n\x1b[2J": {"a": 1}, "forced_bos_token_id": 0}
    assert read(values)[1] == [
        "generation_config.json: num_beams=4 is not supported and was left out",
        "generation_config.json: max_new_tokens=2048 bounds no answer (max_tokens of a request does) and was left out",
        "generation_config.json: penalty \\x1b[2J={'a': 1} is not supported and was left out",
        "generation_config.json: forced_bos_token_id=0 is not supported and was left out",
    ]
    notes = read({f"key{number}": number for number in range(5000)})[1]
    assert len(notes) == 51 and notes[-1].endswith("4950 more keys are not supported and were left out")


def test_tokens_beyond_the_models_rows_are_left_out_with_a_note():
    found, notes = read({"suppress_tokens": [3, VOCAB, 10**9], "bad_words_ids": [[3, VOCAB], [4]]})
    assert (found.banned_tokens, found.bad_words) == ((3,), ((4,),))
    assert [note.split(": ")[1] for note in notes] == ["suppress_tokens", "bad_words_ids"]


def test_more_bad_words_than_a_request_may_have_are_left_out_with_a_note():
    found, notes = read({"bad_words_ids": [[3, 4]] * 1025})
    assert found.bad_words == () and "1025 sequences" in notes[0]
    SamplingParams.from_defaults(read({"bad_words_ids": [[3, 4]] * 1024, "suppress_tokens": [*range(VOCAB)]})[0])


def test_a_file_that_transformers_writes_is_read_without_notes(tmp_path):
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
    config.save_pretrained(tmp_path)
    found, notes = read(json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8")))
    assert (found.repetition_penalty, found.temperature, notes) == (1.05, 0.7, [])
