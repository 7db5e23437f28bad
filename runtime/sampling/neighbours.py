"""Other programs' names for llmc's parameters: an error suggests the right one."""

import difflib
from collections.abc import Collection

# By llmc's names: parameters of requests, options of engines, flags and settings. Sources: transformers, vLLM, SGLang,
# llama.cpp, Ollama, text-generation-inference, uvicorn.
_OTHERS = {
    "max_tokens": "max_new_tokens num_predict n_predict max_output_tokens max_completion_tokens max_length max_gen_len",
    "temperature": "temp",
    "repetition_penalty": "repeat_penalty rep_pen",
    "typical_p": "typical typ_p",
    "mirostat_tau": "mirostat_ent",
    "mirostat_eta": "mirostat_lr",
    "min_tokens": "min_new_tokens",
    "banned_tokens": "suppress_tokens",
    "bad_words": "bad_words_ids",
    "stop": "stop_sequences stop_strings stop_words reverse_prompt",
    "num_beams": "beam_width beam_size",
    "n": "num_samples num_generations",
    "seed": "random_seed",
    "json_schema": "guided_json format json_object",
    "compact_json": "disable_any_whitespace whitespace_flexible",
    "regex": "guided_regex",
    "grammar": "guided_grammar grammar_file",
    "choice": "guided_choice choices",
    "max_context": "max_model_len max_seq_len context_length num_ctx n_ctx ctx_size context",
    "max_batch": "max_num_seqs max_batch_size max_running_requests parallel batch",
    "threads": "n_threads num_threads num_thread",
    "memory": "gpu_memory_utilization mem_fraction_static max_memory",
    "draft": "model_draft draft_model speculative_model assistant_model",
    "keys_file": "api_key api_key_file api_keys",
    "tls_cert": "ssl_certfile ssl_cert_file",
    "tls_key": "ssl_keyfile ssl_key_file",
    "unix_socket": "uds",
    "cors_origins": "allowed_origins",
    "drain_s": "timeout_graceful_shutdown",
    "system": "system_prompt sys",
    "prompt": "input text",
    "chat": "conversation interactive",
    "output": "out outfile out_dir output_dir",
}
_OURS = {other: ours for ours, others in _OTHERS.items() for other in others.split()}


def neighbour(name: str, known: Collection[str]) -> str | None:
    """The entry of ``known`` that another program calls ``name``, else one with a similar spelling, else None."""
    if name in _OURS:
        return _OURS[name] if _OURS[name] in known else None
    ours = {other: mine for other, mine in _OURS.items() if mine in known} | {each: each for each in known}
    return next((ours[close] for close in difflib.get_close_matches(name, ours, n=1)), None)
