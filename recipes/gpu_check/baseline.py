"""What one would use instead: transformers on the GPU, decoding compiled on a static cache, prefill by torch's SDPA."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_check.machine import installed, need
from gpu_check.work import NotHereError

PROMPT, PREFILL, NEW_TOKENS = 128, 2048, 128
# Compiled calls before timing: the first compiles, the second records the CUDA graph, the third replays it.
WARM_UP = 4


def baseline(export: str, rounds: int, device: str, compiler: str) -> dict[str, Any]:
    """Seconds of a decode step and of a prefill of 2,048 tokens, both in float16, medians of ``rounds``.

    Speeds do not depend on the weights, so the model is made from its config alone.

    Raises:
        NotHereError: torch, transformers or a GPU that torch can use are missing.
    """
    need("torch", "transformers")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if device == "cuda" and not torch.cuda.is_available():
        raise NotHereError(f"torch {torch.__version__} sees no GPU")
    config = AutoConfig.from_pretrained(Path(export))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16, attn_implementation="sdpa").eval()
    context = config.max_position_embeddings
    with torch.no_grad():
        length = min(PREFILL, context)
        prefill_s = prefill(model, length, rounds)
        step_s = decode(model, min(PROMPT, context // 2), min(NEW_TOKENS, context // 4), rounds, compiler)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "transformers": installed("transformers"),
        "prefill_tokens": length,
        "prefill_s": prefill_s,
        "step_s": step_s,
        "tokens_per_s": 1 / step_s,
    }


def prefill(model: Any, length: int, rounds: int) -> float:
    """Median seconds to the logits after the last token, the keys and values kept."""
    import torch

    ids = torch.randint(10, 1000, (1, length), device=model.device)

    def run() -> None:
        model(ids, use_cache=True, logits_to_keep=1)
        wait(model)

    run()
    return statistics.median(timed(run) for _ in range(max(3, rounds)))


def decode(model: Any, length: int, new_tokens: int, rounds: int, compiler: str) -> float:
    """Median seconds of a greedy step, compiled in whole, on a static cache after a prompt of ``length``."""
    import torch
    from transformers import StaticCache

    def step(token: Any, position: Any, cache: Any) -> Any:
        found = model(token, position_ids=position, past_key_values=cache, use_cache=True)
        return found.logits[:, -1:].argmax(dim=-1)

    compiled = torch.compile(step, fullgraph=True, **options(compiler))
    ids = torch.randint(10, 1000, (1, length), device=model.device)
    token, position = ids[:, -1:].clone(), torch.zeros((1, 1), dtype=torch.long, device=model.device)
    cache = StaticCache(config=model.config, max_cache_len=length + new_tokens + WARM_UP)

    def advance() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        token.copy_(compiled(token, position, cache))
        position.add_(1)

    steps = []
    for _ in range(rounds):
        cache.reset()
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        position.fill_(length)
        for _ in range(WARM_UP):
            advance()
        steps.append(mean_step(advance, new_tokens, lambda: wait(model)))
    return statistics.median(steps)


def options(compiler: str) -> dict[str, str]:
    """Arguments of torch.compile: the fastest mode of its own compiler, or another one that has no modes."""
    return {"mode": "reduce-overhead"} if compiler == "inductor" else {"backend": compiler}


def mean_step(advance: Callable[[], None], count: int, wait_for: Callable[[], None]) -> float:
    """Mean seconds of ``count`` steps that follow each other without waiting for the host."""
    wait_for()
    start = time.perf_counter()
    for _ in range(count):
        advance()
    wait_for()
    return (time.perf_counter() - start) / count


def timed(run: Callable[[], None]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def wait(model: Any) -> None:
    """Until the GPU has done what was asked."""
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize()
