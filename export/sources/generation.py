"""A checkpoint's generation defaults: each key is used, or known not to change a token, or noted."""

from typing import Any

from llmc import bundle
from llmc.errors import printable
from llmc.export.keys import Keys
from llmc.export.reading import token_ids

# fmt: off
# Keys about how transformers computes, and about its further outputs.
_IRRELEVANT = frozenset({
    "_commit_hash", "_from_model_config", "_name_or_path", "assistant_confidence_threshold", "assistant_early_exit",
    "assistant_lookbehind", "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
    "decoder_start_token_id", "disable_compile", "is_assistant", "low_memory", "max_cache_len",
    "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "pad_token_id", "prefill_chunk_size",
    "prompt_lookup_num_tokens", "remove_invalid_values", "renormalize_logits", "return_dict_in_generate",
    "return_legacy_cache", "speculation_type", "target_lookbehind", "transformers_version", "trust_remote_code",
    "use_cache", "use_mtp",
})
# Keys that do nothing at 1, at 0 or if empty.
_IDLE_AT_1 = frozenset({
    "encoder_repetition_penalty", "guidance_scale", "length_penalty", "num_beam_groups", "num_beams",
    "num_return_sequences",
})
_IDLE_AT_0 = frozenset({
    "begin_suppress_tokens", "constraints", "diversity_penalty", "early_stopping", "encoder_no_repeat_ngram_size",
    "epsilon_cutoff", "eta_cutoff", "force_words_ids", "min_length", "mirostat", "penalty_alpha", "sequence_bias",
    "stop_strings", "token_healing", "xtc_probability",
})
# fmt: on
_LENGTHS = ("max_length", "max_new_tokens")
_MOST_NOTED = 50  # ignored keys that get a note; transformers knows 72
# The limits of requests, see llmc.runtime.sampling.params.
_MOST_WORDS, _MOST_IDS = 1_024, 8_192


def read_generation(
    keys: Keys, vocab_size: int, eos: tuple[int, ...], bos: int | None
) -> tuple[bundle.Generation, list[str]]:
    """The defaults, and notes about ignored keys; ``eos`` and ``bos`` come from config.json.
    Raises CheckpointError: a value is out of its range."""
    eos = token_ids(keys, "eos_token_id", vocab_size) or eos
    generation = bundle.Generation(
        eos_token_ids=eos,
        bos_token_id=next(iter(token_ids(keys, "bos_token_id", vocab_size)), bos),
        do_sample=keys.flag("do_sample"),
        temperature=keys.optional_number("temperature"),
        top_k=keys.optional_integer("top_k"),
        top_p=keys.optional_number("top_p"),
        min_p=keys.optional_number("min_p"),
        typical_p=keys.optional_number("typical_p"),
        repetition_penalty=keys.optional_number("repetition_penalty"),
        no_repeat_ngram_size=keys.optional_integer("no_repeat_ngram_size"),
        min_tokens=keys.optional_integer("min_new_tokens"),
        banned_tokens=_suppressed(keys, vocab_size),
        bad_words=_bad_words(keys, vocab_size, eos),
    )
    _note_others(keys)
    return generation, keys.notes


def _suppressed(keys: Keys, vocab_size: int) -> tuple[int, ...]:
    value = keys.raw("suppress_tokens")
    if value is None:
        return ()
    if not _are_tokens(value) or len(value) > bundle.MOST_SUPPRESSED:
        raise keys.error("suppress_tokens", value, f"null or a list of at most {bundle.MOST_SUPPRESSED} token ids")
    return tuple(_drop_rowless(keys, "suppress_tokens", value, [token < vocab_size for token in value]))


def _bad_words(keys: Keys, vocab_size: int, eos: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The sequences without single end tokens, which transformers leaves out, too."""
    value = keys.raw("bad_words_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(word and _are_tokens(word) for word in value):
        raise keys.error("bad_words_ids", value, "null or a list of lists of token ids")
    words = _drop_rowless(keys, "bad_words_ids", value, [max(word) < vocab_size for word in value])
    words = [word for word in words if len(word) > 1 or word[0] not in eos]
    if len(words) > _MOST_WORDS or sum(map(len, words)) > _MOST_IDS:
        keys.note(f"bad_words_ids has {len(words)} sequences, at most {_MOST_WORDS} of {_MOST_IDS} ids; all left out")
        return ()
    return tuple(map(tuple, words))


def _are_tokens(given: object) -> bool:
    return isinstance(given, list) and all(type(token) is int and token >= 0 for token in given)


def _drop_rowless(keys: Keys, name: str, items: list[Any], has_rows: list[bool]) -> list[Any]:
    """The items whose tokens have rows in the model; it never generates the others."""
    if not all(has_rows):
        keys.note(f"{name}: entries with tokens that the model has no rows for were left out ({has_rows.count(False)})")
    return [item for item, has in zip(items, has_rows, strict=True) if has]


def _note_others(keys: Keys) -> None:
    ignored = {name: value for name, value in keys.unread().items() if not _is_idle(name, value)}
    for name, value in [*ignored.items()][:_MOST_NOTED]:
        why = "bounds no answer (max_tokens of a request does)" if name in _LENGTHS else "is not supported"
        shown = printable(name).replace("\n", " ")
        keys.note(f"{shown:.80}={value!r:.80} {why} and was left out")
    if len(ignored) > _MOST_NOTED:
        keys.note(f"{len(ignored) - _MOST_NOTED} more keys are not supported and were left out")


def _is_idle(name: str, value: object) -> bool:
    return (
        name in _IRRELEVANT or (name in _IDLE_AT_1 and value == 1) or (name in _IDLE_AT_0 and value in (0, [], {}, ""))
    )
