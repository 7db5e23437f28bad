"""Runner for llama.cpp: MODEL is a GGUF file. Needs llama-cpp-python."""

# Lives in another interpreter than the one that type-checks:
# mypy: disable-error-code=import-not-found

import ctypes
from typing import Any

import harness
import llama_cpp
import numpy as np

MICRO_BATCH = 512  # llama.cpp's own default


class LlamaCpp:
    """Drives the C interface directly: nothing of the high-level Python class is in the measured loop."""

    def __init__(self, job: harness.Job) -> None:
        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self._keep_alive = silent  # ctypes does not hold the callback
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        model = llama_cpp.llama_model_load_from_file(str(job.model).encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise SystemExit(f"{job.model}: llama.cpp cannot load it; write it with convert_gguf.py")
        self._context = llama_cpp.llama_init_from_model(model, _parameters(job))
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._token = 0

    def generate(self, prompt: list[int], new_tokens: int) -> harness.Timing:
        """Greedy: the arg max is numpy's, over llama.cpp's own buffer of logits."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        return harness.time_steps(lambda: self._step(prompt), lambda: self._step([self._token]), new_tokens)

    def details(self) -> dict[str, str]:
        """CPU features compiled in: a build without AVX512_VNNI = 1 on such a machine is not a fair peer."""
        return {"system_info": llama_cpp.llama_print_system_info().decode()}

    def _step(self, tokens: list[int]) -> None:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(tokens))) != 0:
            raise SystemExit(f"llama_decode failed on {len(tokens)} tokens")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), (self._vocabulary,))
        self._token = int(logits.argmax())


def _parameters(job: harness.Job) -> Any:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = job.context
    parameters.n_batch = max(*job.prompts, MICRO_BATCH)
    parameters.n_ubatch = MICRO_BATCH
    parameters.n_threads = parameters.n_threads_batch = job.threads
    return parameters


if __name__ == "__main__":
    harness.main(LlamaCpp, packages=["llama-cpp-python"])
