"""Write llama.cpp's logits of given windows of tokens, for quality_per_bit.py. Needs llama-cpp-python and gguf.

    python llamacpp_logits.py MODEL WINDOWS OUTPUT PHASE THREADS

MODEL is a GGUF file, WINDOWS a .npy file of token ids [windows, length], OUTPUT a .npy file to write, float32
[windows, length, V]; PHASE is prefill (a window at once) or decode (token by token). One line of JSON on standard
output says what the file really holds: the weights of its matrices, and their bits.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)  # global, for ctypes does not hold it


def open_context(path: Path, threads: int, **sizes: int) -> tuple[Any, int]:
    """A context of a GGUF file, and the size of the vocabulary; ``sizes``: n_ctx, n_batch and n_ubatch in tokens."""
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"{path}: llama.cpp cannot load it; write it with convert_gguf.py")
    parameters = llama_cpp.llama_context_default_params()
    for name, value in {**sizes, "n_threads": threads, "n_threads_batch": threads}.items():
        setattr(parameters, name, value)
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise SystemExit(f"{path}: llama.cpp cannot make a context of {sizes['n_ctx']} tokens")
    return context, llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))


def window_logits(context: Any, vocabulary: int, tokens: list[int], step: int) -> Iterator[Any]:
    """Logits [step, V] of one window, fed ``step`` tokens at a time; each array is overwritten by the next."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(step, 0, 1)
    for start in range(0, len(tokens), step):
        batch.n_tokens = len(tokens[start : start + step])
        for i, token in enumerate(tokens[start : start + step]):
            batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if llama_cpp.llama_decode(context, batch) != 0:
            raise SystemExit(f"llama_decode failed on {batch.n_tokens} tokens at position {start}")
        yield np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (batch.n_tokens, vocabulary))
    llama_cpp.llama_batch_free(batch)


def description(path: Path) -> dict[str, Any]:
    """The number of weights in matrices, and their bits per weight with scales."""
    import gguf

    matrices = [tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1]
    weights = sum(int(tensor.n_elements) for tensor in matrices)
    bits = 8 * sum(int(tensor.n_bytes) for tensor in matrices) / weights
    return {"matrix_weights": weights, "bits_per_weight": bits}


def main() -> None:
    model, windows_file, output_file, phase, threads = sys.argv[1:]
    windows = np.load(windows_file)
    count, length = windows.shape
    context, vocabulary = open_context(Path(model), int(threads), n_ctx=length, n_batch=length, n_ubatch=length)
    step = length if phase == "prefill" else 1
    output = np.lib.format.open_memmap(output_file, "w+", np.float32, (count, length, vocabulary))
    for row, tokens in zip(output, windows.tolist(), strict=True):
        for i, logits in enumerate(window_logits(context, vocabulary, tokens, step)):
            row[i * step : i * step + len(logits)] = logits
    output.flush()
    print(json.dumps(description(Path(model))))


if __name__ == "__main__":
    main()
